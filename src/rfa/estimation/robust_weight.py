"""How much an observation counts: by its squared distance from an estimate, or by its innovation from a filter.

    estimate:  w(d^2) = rho'(d^2),    rho a bounded penalty
    filter:    e ~ N(0, H + s I): w averages the gains over the scales s that the error of a row may have

Weights below 1 also make the estimate less certain: the calibration measures by how much, for Gaussian errors.

Source: appendix A.3 for the first; the second goes beyond the paper (docs/theory.md).
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from rfa.checks import check_choice, require

LOWEST_LOG_WEIGHT = -69.0  # log 1e-30: a row's largest weight is at least this, so that its variance is finite

Penalty = Literal["power", "welsch"]
Number = float | int | Real[Tensor, ""]  # a tensor where a gradient is needed
_SMALLEST_NU = 1e-6  # below, all weight lies within sqrt(nu) of the estimate and is lost to rounding
_NU, _KAPPA = f"degrees of freedom > 0, at least {_SMALLEST_NU}", "a finite exponent > 0"
_SMALLEST_MEAN = 1e-30  # mean weight: quotients by it stay finite
_CHI_RANGE = 12.0  # chi_m lies within that distance of sqrt(m): its deviation is about 0.7 for any m


@dataclass(frozen=True)
class RobustWeight:
    """`w(s) = rho'(s)` of a squared distance s of m dimensions (appendix A.3).

    power: `w = (1 + s / nu)^-kappa`, `rho = nu / (kappa - 1) (1 - (1 + s / nu)^(1 - kappa))`. With `kappa = 1` the
        weight is, up to `(nu + m) / nu`, the posterior mean of the inverse scale of a Student-t residual.
    welsch: `w = exp(-s / m)`, `rho = m (1 - exp(-s / m))`, the limit of `kappa = (nu + m) / m` for large nu. With an
        infinite nu and a finite kappa all weights are 1.
    """

    nu: Number  # degrees of freedom >= 1e-6
    kappa: Number | None  # exponent > 0
    size: int  # m
    penalty: Penalty = "power"

    def __post_init__(self):
        require(bool(self.nu >= _SMALLEST_NU), "nu", self.nu, _NU)
        require(self.kappa is None or bool(0 < self.kappa < math.inf), "kappa", self.kappa, _KAPPA)
        check_choice("penalty", self.penalty, Penalty)

    @classmethod
    def of(cls, nu: object, kappa: object, size: int, penalty: Penalty = "power") -> "RobustWeight":
        """With nu and kappa as a caller gives them."""
        found = cls(_number("nu", nu, _NU), None if kappa is None else _number("kappa", kappa, _KAPPA), size, penalty)
        return replace(found, penalty="welsch") if kappa is None and found.gaussian else found

    @property
    def gaussian(self) -> bool:
        """Whether all weights are 1."""
        return self.penalty == "power" and not isinstance(self.nu, Tensor) and math.isinf(self.nu)

    @property
    def exponent(self) -> Number:
        """kappa, by default `(nu + m) / m` with the model's m: logits do not grow with the dimension."""
        return (self.nu + self.size) / self.size if self.kappa is None else self.kappa

    def log_weight(self, distance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`log w` of squared distances."""
        if self.gaussian:
            return torch.zeros_like(distance)
        if self.penalty == "welsch":
            return -distance / self.size
        return -self.exponent * torch.log1p(distance / self.nu)

    def cost(self, distance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The penalty rho of squared distances."""
        if self.gaussian:
            return distance
        if self.penalty == "welsch":
            return -self.size * torch.expm1(-distance / self.size)
        if self.exponent == 1:
            return self.nu * torch.log1p(distance / self.nu)
        return self.nu / (self.exponent - 1) * -torch.expm1((1 - self.exponent) * torch.log1p(distance / self.nu))

    def consistency(self, observed: int | None = None) -> tuple[Number, Number]:
        """For `s ~ chi^2_k`, that is, a right model: the mean weight, and the variance over that of all weights 1.

        They are `E w` and `(E[w^2 s] / k) / (E w + 2 E[w' s] / k)^2`, the asymptotic variance of an M-estimator of
        location. k is how many of the m components a row has.
        """
        k = self.size if observed is None else observed
        if self.gaussian or not k:
            return 1.0, 1.0
        if isinstance(self.nu, Tensor) or isinstance(self.kappa, Tensor):
            return self._consistency_tensors(k)
        return self._consistency_numbers(k)

    @functools.cache  # noqa: B019 - the cache holds a few numbers only
    def _consistency_numbers(self, k: int) -> tuple[float, float]:
        mean, variance = self._consistency_tensors(k)
        return mean.item(), variance.item()

    def _consistency_tensors(self, k: int) -> tuple[Tensor, Tensor]:
        # chi_k, the root of s, has a density without a singularity. Powers of large k overflow, so logarithms are used.
        low, high = max(0.0, math.sqrt(k) - _CHI_RANGE), math.sqrt(k) + _CHI_RANGE
        root = low + (high - low) * (torch.arange(2**17, dtype=torch.float64) + 0.5) / 2**17
        density = torch.softmax((k - 1) * torch.log(root) - root.square() / 2, dim=0)
        s = root.square()
        log_weight = self.log_weight(s)
        largest = log_weight.max().detach()
        weight = torch.exp(log_weight - largest)  # both ratios do not depend on this scale
        slope = -weight / self.size if self.penalty == "welsch" else -self.exponent * weight / (self.nu + s)
        spread = (density * weight.square() * s).sum() / k
        mean = (density * weight).sum()
        sensitivity = torch.maximum(mean + 2 * (density * slope * s).sum() / k, 1e-4 * mean)
        return (mean * largest.exp()).clamp(min=_SMALLEST_MEAN), spread / sensitivity.square()

    def calibration(self, observed: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The product of both numbers of `consistency` for each row's components: weights are divided by it."""
        if not observed.numel():
            return observed.to(torch.float64)
        counts, position = observed.unique(return_inverse=True)
        table = [torch.as_tensor(math.prod(self.consistency(k)), dtype=torch.float64) for k in counts.tolist()]
        return torch.stack(table).to(observed.device)[position]


def _number(name: str, given: object, expected: str) -> Number:
    if isinstance(given, Tensor) and given.requires_grad and not given.dim():
        return given.to("cpu", torch.float64)  # a tensor without dimensions on the CPU works with those of any device
    try:
        if not isinstance(given, str | bool):
            return float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(f"{name}: got {given!r}, expected {expected}")


# The scale of each measurement error: what an innovation says of it, and how often each scale occurs. These constants
# are the only ones of the robust step: C++ is given them by `compiled.RobustConstants`, the graph of ONNX imports them.

SCALES = 18  # multiples of R: 1, and half decades above it. The last one grows with the row.
_ABOVE = 0.25  # prior probability of a scale above 1
_FALL = 0.6  # factor of that probability from one scale to the next
PRIOR_ROWS = 5.0  # number of rows that the prior of the scales counts for
PERSISTENCE = 0.3  # probability that a row has the scale of the row before: errors come in bursts
LARGEST_VARIANCE = 100.0  # h, in units of the noise, above which less certain predictions no longer lower w
REJECTED = 0.1  # a row of smaller weight starts a challenger
PRIOR_LOG_ODDS = -7.0  # of a new challenger: 1 to 1,000
ABANDONED_LOG_ODDS = -9.0  # a challenger with smaller odds is given up
SAME_LOG_ODDS = 0.05  # change in odds by which filter and challenger are the same: another challenger may start
NO_DIGITS = 1e14  # a squared distance from a mean. A row that far off would lose its digits beside the mean.


class NoiseScale(NamedTuple):
    """What is known of the scales s of a series."""

    counts: Float[Tensor, "b scales"]  # rows with each scale so far, and the prior's: a Dirichlet parameter
    last: Float[Tensor, "b scales"]  # the probability of each scale for the last row

    @classmethod
    def prior(cls, like: Float[Tensor, "b ..."]) -> "NoiseScale":
        """Before the first row, for as many series as `like` has."""
        falling = _FALL ** torch.arange(SCALES - 1, dtype=like.dtype, device=like.device)
        above = _ABOVE * falling / falling.sum()
        probability = torch.cat([1 - above.sum(dim=0, keepdim=True), above]).expand(len(like), -1)
        return cls(PRIOR_ROWS * probability, probability)

    def expected(self) -> Float[Tensor, "b scales"]:
        """The probability of each scale for the next row."""
        learned = self.counts / self.counts.sum(-1, keepdim=True)
        return (1 - PERSISTENCE) * learned + PERSISTENCE * self.last

    def median(self) -> Float[Tensor, " b"]:
        """The median scale of the rows. It is 1 where R is right."""
        cumulative = (self.counts / self.counts.sum(-1, keepdim=True)).detach().cumsum(-1)
        return noise_scales(cumulative)[(cumulative < 0.5).sum(-1)]

    def updated(self, row: "ScalePosterior") -> "NoiseScale":
        """After a row."""
        valid = row.valid[:, None]
        return NoiseScale(self.counts + row.probability * valid, torch.where(valid, row.probability, self.last))


class ScalePosterior(NamedTuple):
    """What the innovation of one row says of its scale. Where there is no prediction, the row has weight 1."""

    weight: Float[Tensor, " b"]  # w in (0, 1]: the row counts as if its noise were R / w
    gain_ratio: Float[Tensor, " b"]  # `(h + 1) / (h + 1 / w)` in (0, 1]: the row's gain over the gain with w = 1
    scatter: Float[Tensor, "b m m"]  # the covariance between scales of the whitened correction
    probability: Float[Tensor, "b scales"]  # of each scale
    log_evidence: Float[Tensor, " b"]  # the log density of the row, 0 without a prediction
    valid: Bool[Tensor, " b"]  # whether there is a row and a prediction of it

    def where(self, condition: Bool[Tensor, " b"], other: "ScalePosterior") -> "ScalePosterior":
        """Itself in the series where the condition holds, the other one elsewhere."""
        pairs = zip(self, other, strict=True)
        return ScalePosterior(
            *(torch.where(condition.reshape(-1, *(1,) * (mine.dim() - 1)), mine, theirs) for mine, theirs in pairs)
        )


def infer_scale(
    expected: Float[Tensor, "b scales"],
    innovation: Float[Tensor, "b m"],
    variance: Float[Tensor, "b m m"],
    present: Bool[Tensor, "b m"],
) -> ScalePosterior:
    """The posterior of the scale of one row.

    With w the Kalman gain is the mean of the gains over s: exactly where `H = h I`. h is bounded, because for large h
    1 / w would be the mean of all s, and the row would count for nothing.

    `innovation` and H, the covariance of its prediction, are in units of the noise, and 0 where a component is missing.
    """
    observed = present.sum(-1).clamp(min=1)
    scale = noise_scales(innovation).expand(len(innovation), -1)
    last = torch.maximum(scale[:, -1], innovation.square().sum(-1) / observed)  # so that no row lies above all scales
    scale = torch.cat([scale[:, :-1], last[:, None]], dim=-1)
    noise = torch.diag_embed(torch.where(present[:, None, :], scale[..., None], 1.0))
    variance, factor = _cholesky_factors(variance, noise)
    correction = torch.cholesky_solve(innovation[:, None, :, None].expand(*scale.shape, -1, 1), factor)[..., 0]
    log_density = -(correction * innovation[:, None]).sum(-1) / 2 - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    joint = expected.log() + log_density
    probability = torch.softmax(joint, dim=-1)
    mean_variance = variance.diagonal(dim1=-2, dim2=-1).sum(-1) / observed
    bounded = mean_variance.clamp(max=LARGEST_VARIANCE)
    ratio = probability / (bounded[:, None] + scale)
    weight = ratio.sum(-1) / (ratio * scale).sum(-1)
    gain_ratio = weight * (mean_variance + 1) / (weight * mean_variance + 1)
    deviation = correction - (probability[..., None] * correction).sum(1, keepdim=True)
    scatter = (probability[..., None, None] * deviation[..., :, None] * deviation[..., None, :]).sum(1)
    large = mean_variance > LARGEST_VARIANCE
    reduction = torch.where(large, bounded / torch.where(large, mean_variance, 1.0), 1.0)
    scatter = scatter * reduction[:, None, None].square()
    return ScalePosterior(weight, gain_ratio, scatter, probability, torch.logsumexp(joint, dim=-1), present.any(-1))


def _cholesky_factors(variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """H and the Cholesky factors of `H + s I`. Where rounding makes that indefinite, H loses its correlations."""
    factor, failed = torch.linalg.cholesky_ex(variance[:, None] + noise)
    indefinite = (failed > 0).any(-1)
    if not bool(indefinite.any()):
        return variance, factor
    diagonal = torch.diag_embed(variance.diagonal(dim1=-2, dim2=-1).abs())
    variance = torch.where(indefinite[:, None, None], diagonal, variance)
    return variance, torch.linalg.cholesky(variance[:, None] + noise)


def noise_scales(like: Tensor) -> Float[Tensor, " scales"]:
    """The scales s, multiples of R."""
    return 10.0 ** (torch.arange(SCALES, dtype=like.dtype, device=like.device) / 2)
