"""Powers of two that bring gradients of scores into the range of float16, for products with states on folds."""

from typing import NamedTuple

import torch
from torch import Tensor

from rfa.ops.kernel import KernelInputs

from .fold_numbers import Folds
from .frame import Frame
from .incoming import Incoming

HIGHEST = 14.0  # products reach 2^14; float16 ends at 2^16, and its normal numbers begin at 2^-14
MOST = 60.0  # bits of a scale


class FoldScales(NamedTuple):
    """By what the kernels multiply, and divide their sums.

    A gradient of a score is at most `A (|dout_i| max|v| + |delta_i|)`, and its factor of the states at most `2 c / G`.

    Fields:
        rows: of the scores' gradients of a row, `(batch, heads, queries)`.
        gains: of `2 c / G`, `(heads,)`.
        keys: of the product of both for all rows, `(batch, heads)`.
    """

    rows: Tensor
    gains: Tensor
    keys: Tensor


def fold_scales(inputs: KernelInputs, frame: Frame, folds: Folds | None, incoming: Incoming) -> FoldScales | None:
    """The scales of a call in float16 that has folds, else None: bfloat16 has the range of float32."""
    if folds is None or inputs.query.dtype != torch.float16:
        return None
    value = frame.value_norm.nan_to_num(0.0).amax(-1, keepdim=True).sqrt()
    rows = torch.linalg.vector_norm(incoming.grad_out, dim=-1, dtype=torch.float32) * value + incoming.delta.abs()
    rows = (rows + incoming.delta_rest.abs()).nan_to_num(0.0)
    gains = 2.0 * inputs.scalars[0].float().clamp(min=1.0) / folds.least_gain
    of_rows, of_gains = _scale(rows), _scale(gains.nan_to_num(1.0), 0.0)  # NaN in heads that do not fold
    return FoldScales(of_rows, of_gains.contiguous(), (of_rows.amin(-1) * of_gains).contiguous())


def _scale(greatest: Tensor, highest: float = HIGHEST) -> Tensor:
    """The power of two, up to 2^60, that takes a number below `2^highest`."""
    return torch.exp2((highest - greatest.log2().ceil()).clamp(-MOST, MOST))
