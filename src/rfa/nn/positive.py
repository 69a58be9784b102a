"""Positive numbers of each head, learned through softplus, in full precision."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import FullPrecision


def softplus_inverse(value: Tensor) -> Tensor:
    """`x` with `softplus(x) = value`, for `value > 0`."""
    return value + torch.log(-torch.expm1(-value))


class PositiveParameters(FullPrecision):
    """Base of modules whose parameters are positive numbers: each is stored as `raw_<name>` before softplus."""

    def hold(self, name: str, value: Tensor) -> None:
        """A learned number that begins at `value > 0`."""
        self.register_parameter(f"raw_{name}", nn.Parameter(softplus_inverse(value.clamp(min=1e-12))))

    def positive(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All numbers held, by name, at least in float32."""
        dtype = torch.promote_types(dtype, torch.float32)
        raw = {name: value for name, value in self.named_parameters(recurse=False) if name.startswith("raw_")}
        return {name.removeprefix("raw_"): F.softplus(value.to(dtype)) for name, value in raw.items()}
