"""What every backend is handed beside states and positions: parameters and options."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rfa.dynamics import TimeDependentNoise, covariance, time_dependent_variance

Weight = Literal["student_t", "exponential"]
Prior = Literal["lyapunov", "riccati"]


class Parameters(NamedTuple):
    """The dynamics and noises of each head, `(heads,)`; `frequency` is `(heads, modes)`.

    `noise` holds the parts of the process noise beside the white one, None for none.
    """

    decay: Tensor
    frequency: Tensor
    process_noise: Tensor
    key_noise: Tensor
    query_noise: Tensor
    noise_floor: Tensor
    robustness: Tensor
    inverse_temperature: Tensor
    horizon: Tensor | None = None
    noise: TimeDependentNoise | None = None

    def to(self, dtype: torch.dtype) -> "Parameters":
        """The same in another dtype, but for `noise`: its phases are formed before rounding."""
        return Parameters(*(p.to(dtype) if isinstance(p, Tensor) else p for p in self))  # type: ignore[arg-type]

    def unsqueezed(self, dimensions: int) -> "Parameters":
        """The same with so many dimensions of size 1 behind the heads, to broadcast with lags; not `frequency`."""
        index = (..., *(None,) * dimensions)
        changed: dict[str, Any] = {name: p[index] for name, p in self._asdict().items() if isinstance(p, Tensor)}
        changed["frequency"] = self.frequency
        if self.noise is not None:
            changed["noise"] = TimeDependentNoise(*(p[index] for p in self.noise))
        return self._replace(**changed)

    def variance(self, lag: Tensor) -> Tensor:
        """`Sigma(tau)`, the variance of a key after a lag that broadcasts with the parameters."""
        if self.noise is None:
            return covariance(self.decay, self.process_noise, self.key_noise, self.noise_floor, lag)
        accumulated = time_dependent_variance(self.decay, self.process_noise, self.noise, lag)
        none = torch.zeros_like(self.process_noise)
        return accumulated + covariance(self.decay, none, self.key_noise, self.noise_floor, lag)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that are given, by name, those of the noise among them."""
        named = {name: given for name, given in self._asdict().items() if name != "noise" and given is not None}
        return named | ({} if self.noise is None else self.noise._asdict())


class Options(NamedTuple):
    """The choices that select a variant of the operator."""

    causal: bool
    weight: Weight
    rotate_values: bool
    prior: Prior
    gate: bool
    query_noise_in_bias: bool
    log_precision: bool
    in_frame: bool = False  # states stand in the common frame already, and the estimate stays in it
