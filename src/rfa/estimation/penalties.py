"""Whom to believe: weights of residuals, and the penalties whose slopes they are."""

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

FAINTEST = -69.0  # log 1e-30: what was seen weighs no less, so that a row believes somebody and its variance is finite

Penalty = Literal["power", "welsch"]
Number = float | Tensor  # a tensor without dimensions where a gradient is wanted
_LEAST = (
    1e-6  # degrees of freedom; next to none, all weight lies within sqrt(nu) of the estimate, and is lost to rounding
)
_NU, _KAPPA = f"degrees of freedom > 0, at least {_LEAST}", "a finite exponent > 0"
_FAINTEST = 1e-30  # mean weight: what is divided by it stays finite
_SPREAD = 12.0  # chi_m lies within that of sqrt(m): its deviation is about 0.7 for any m


@dataclass(frozen=True)
class Belief:
    """`w(s) = rho'(s)` of a squared distance s, of m dimensions (appendix A.3).

    power: `w = (1 + s / nu)^-kappa`, `rho = nu / (kappa - 1) (1 - (1 + s / nu)^(1 - kappa))`. With `kappa = 1` the
        weight is, up to `(nu + m) / nu`, the posterior mean of the inverse scale of a Student-t residual.
    welsch: `w = exp(-s / m)`, `rho = m (1 - exp(-s / m))`, the limit of `kappa = (nu + m) / m`.

    Args:
        nu: degrees of freedom >= 1e-6; infinite: all weights are 1, the Gaussian consensus.
        kappa: exponent > 0.
        size: m.
        penalty: "power" or "welsch".

    Raises:
        ValueError: for a value out of range.
    """

    nu: Number
    kappa: Number | None
    size: int
    penalty: Penalty = "power"

    def __post_init__(self):
        if not self.nu >= _LEAST:
            raise ValueError(f"nu: got {self.nu}, expected {_NU}")
        if self.kappa is not None and not 0 < self.kappa < math.inf:
            raise ValueError(f"kappa: got {self.kappa}, expected {_KAPPA}")
        if self.penalty not in get_args(Penalty):
            raise ValueError(
                f"penalty: got {self.penalty!r}, expected one of {', '.join(map(repr, get_args(Penalty)))}"
            )

    @classmethod
    def of(cls, nu: object, kappa: object, size: int, penalty: Penalty = "power") -> "Belief":
        """With nu and kappa as a caller gives them; raises as the class."""
        return cls(_number("nu", nu, _NU), None if kappa is None else _number("kappa", kappa, _KAPPA), size, penalty)

    @property
    def gaussian(self) -> bool:
        """Whether all weights are 1."""
        return self.penalty == "power" and not isinstance(self.nu, Tensor) and math.isinf(self.nu)

    @property
    def exponent(self) -> Number:
        """kappa, by default `(nu + m) / m`: logits that do not grow with the dimension.

        m is the model's, also where components are missing: a row has one exponent, whatever of it was seen.
        """
        return (self.nu + self.size) / self.size if self.kappa is None else self.kappa

    def log_weight(self, distance: Tensor) -> Tensor:
        """`log w`."""
        if self.gaussian:
            return torch.zeros_like(distance)
        if self.penalty == "welsch":
            return -distance / self.size
        return -self.exponent * torch.log1p(distance / self.nu)

    def cost(self, distance: Tensor) -> Tensor:
        """`rho`."""
        if self.gaussian:
            return distance
        if self.penalty == "welsch":
            return -self.size * torch.expm1(-distance / self.size)
        if self.exponent == 1:
            return self.nu * torch.log1p(distance / self.nu)
        return self.nu / (self.exponent - 1) * -torch.expm1((1 - self.exponent) * torch.log1p(distance / self.nu))

    def consistency(self, seen: int | None = None) -> tuple[Number, Number]:
        """Of `s ~ chi^2_k`, the model being right: the mean weight, and the estimate's variance over the Gaussian's.

        `E w` and `(E[w^2 s] / k) / (E w + 2 E[w' s] / k)^2`, the asymptotic variance of an M-estimator of location.

        Args:
            seen: k, how many of the m components a row shows; m by default.
        """
        k = self.size if seen is None else seen
        if self.gaussian or not k:
            return 1.0, 1.0
        if isinstance(self.nu, Tensor) or isinstance(self.kappa, Tensor):
            return self._moments(k)
        return self._numbers(k)

    @functools.cache  # noqa: B019 - holds on to a few numbers
    def _numbers(self, k: int) -> tuple[float, float]:
        usual, spread = self._moments(k)
        return usual.item(), spread.item()

    def _moments(self, k: int) -> tuple[Tensor, Tensor]:
        # chi_k, the root of s, has a density without a singularity; by its logarithm, as powers of large k overflow
        low, high = max(0.0, math.sqrt(k) - _SPREAD), math.sqrt(k) + _SPREAD
        root = low + (high - low) * (torch.arange(2**17, dtype=torch.float64) + 0.5) / 2**17
        density = torch.softmax((k - 1) * torch.log(root) - root.square() / 2, dim=0)
        s = root.square()
        log_weight = self.log_weight(s)
        largest = log_weight.max().detach()
        weight = torch.exp(log_weight - largest)  # both ratios are free of the scale
        slope = -weight / self.size if self.penalty == "welsch" else -self.exponent * weight / (self.nu + s)
        spread = (density * weight.square() * s).sum() / k
        mean = (density * weight).sum()
        sensitivity = torch.maximum(mean + 2 * (density * slope * s).sum() / k, 1e-4 * mean)
        return (mean * largest.exp()).clamp(min=_FAINTEST), spread / sensitivity.square()

    def calibration(self, seen: Tensor) -> Tensor:
        """The product of the two numbers of `consistency`, for as many components as each row shows.

        Weights over it add up to the precision that the estimate has if all is Gaussian.
        """
        if not seen.numel():
            return seen.to(torch.float64)
        counts, place = seen.unique(return_inverse=True)
        table = [torch.as_tensor(math.prod(self.consistency(k)), dtype=torch.float64) for k in counts.tolist()]
        return torch.stack(table).to(seen.device)[place]


def _number(name: str, given: object, expected: str) -> Number:
    if isinstance(given, Tensor) and given.requires_grad and not given.dim():
        return given.to("cpu", torch.float64)  # a number there meets tensors of every device
    try:
        if not isinstance(given, str | bool):
            return float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(f"{name}: got {given!r}, expected {expected}")
