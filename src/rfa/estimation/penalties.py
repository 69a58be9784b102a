"""Whom to believe: weights of residuals, and the penalties whose slopes they are."""

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

FAINTEST = -69.0  # log 1e-30: what was seen weighs no less, so that a row believes somebody and its variance is finite

Penalty = Literal["power", "welsch"]


@dataclass(frozen=True)
class Belief:
    """`w(s) = rho'(s)` of a squared distance s, of m dimensions (appendix A.3).

    power: `w = (1 + s / nu)^-kappa`, `rho = nu / (kappa - 1) (1 - (1 + s / nu)^(1 - kappa))`. With `kappa = 1` the
        weight is, up to `(nu + m) / nu`, the posterior mean of the inverse scale of a Student-t residual.
    welsch: `w = exp(-s / m)`, `rho = m (1 - exp(-s / m))`, the limit of `kappa = (nu + m) / m`.

    Args:
        nu: degrees of freedom > 0; infinite: all weights are 1, the Gaussian consensus.
        kappa: exponent > 0.
        size: m.
        penalty: "power" or "welsch".

    Raises:
        ValueError: for a value out of range.
    """

    nu: float
    kappa: float | None
    size: int
    penalty: Penalty = "power"

    def __post_init__(self):
        if not self.nu > 0:
            raise ValueError(f"nu: got {self.nu}, expected degrees of freedom > 0")
        if self.kappa is not None and not 0 < self.kappa < math.inf:
            raise ValueError(f"kappa: got {self.kappa}, expected a finite exponent > 0")
        if self.penalty not in get_args(Penalty):
            raise ValueError(
                f"penalty: got {self.penalty!r}, expected one of {', '.join(map(repr, get_args(Penalty)))}"
            )

    @property
    def gaussian(self) -> bool:
        """Whether all weights are 1."""
        return self.penalty == "power" and math.isinf(self.nu)

    @property
    def exponent(self) -> float:
        """kappa, by default `(nu + m) / m`: logits that do not grow with the dimension."""
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

    @functools.cache  # noqa: B019 - holds on to a few numbers
    def consistency(self) -> tuple[float, float]:
        """Of `s ~ chi^2_m`, the model being right: the mean weight, and the estimate's variance over the Gaussian's.

        `E w` and `(E[w^2 s] / m) / (E w + 2 E[w' s] / m)^2`, the asymptotic variance of an M-estimator of location.
        """
        if self.gaussian:
            return 1.0, 1.0
        # chi_m, the root of s, has a density without a singularity
        root = torch.linspace(0, 12 + 2 * math.sqrt(self.size), 2**17, dtype=torch.float64)
        density = torch.exp((self.size - 1) * torch.log(root.clamp(min=1e-300)) - root.square() / 2)
        density, s = density / density.sum(), root.square()
        weight = self.log_weight(s).exp()
        slope = -weight / self.size if self.penalty == "welsch" else -self.exponent * weight / (self.nu + s)
        spread = (density * weight.square() * s).sum() / self.size
        mean = (density * weight).sum()
        sensitivity = mean + 2 * (density * slope * s).sum() / self.size
        return mean.item(), (spread / sensitivity.clamp(min=1e-3).square()).item()
