"""Gaussian knowledge of a state, in two forms: mean and covariance, and information. The weight of a row.

    Gaussian:     x ~ N(m, P + c L L^T) for c -> infinity. The columns of L are directions without any information.
    Information:  -(x^T J x - 2 y^T x + c) / 2, a log-likelihood whose J may have any rank.

An observation `z = H x + e`, `e ~ N(0, I)`, updates the first by `m -> m + K (z - H m)`, `P -> (I - K H) P`. It adds
`H^T H` and `H^T z` to the second.

The error of a row may be larger than its noise says, `e ~ N(0, s I)`. `infer_scale` averages the gains over the scales
s by how well each explains the innovation.

Source: Durbin and Koopman, Time Series Analysis by State Space Methods, sections 5.2 and 6.4 (exact diffuse start);
the scales go beyond the paper (docs/theory.md).
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .linear_sde import identity_like, inverse, symmetric

_NO_PART = 1e-7  # relative: an observation that shows less of a diffuse direction shows nothing of it
_NO_CORRELATION = 1e-9  # relative: of two diffuse states
_NO_INFORMATION = 1e-280  # precisions from here on: the square of their scale would overflow
_ROUNDING = 1e-14  # an eigenvalue of an information matrix at a unit diagonal that comes from rounding
_SINGULAR = 1e-13  # smallest eigenvalue over the largest, at a unit diagonal, below which a direction is unknown

T = TypeVar("T")


def mapped(known: T, change: Callable[[Tensor], Tensor]) -> T:
    """A tuple, named or plain, with each of its tensors changed, those of tuples in it too. None stays None."""
    if isinstance(known, Tensor):
        return change(known)  # type: ignore[return-value]
    if known is None:
        return known
    assert isinstance(known, tuple)
    parts = [mapped(part, change) for part in known]
    return type(known)(*parts) if hasattr(known, "_fields") else type(known)(parts)  # type: ignore[return-value]


class AffineUpdate(NamedTuple):
    """What an observation does to a mean: `m -> factor m + gain z`."""

    factor: Float[Tensor, "#b n n"]
    gain: Float[Tensor, "#b n m"]

    @classmethod
    def of_components(cls, rows: Float[Tensor, "#b m n"], gains: list[Tensor]) -> "AffineUpdate":
        """Of m components, used one after another: component i does `m -> m + k_i (z_i - h_i m)`."""
        n = rows.shape[-1]
        factor, found = identity_like(rows).expand(len(rows), n, n), list[Tensor]()
        for row, gain in zip(rows.unbind(-2), gains, strict=True):
            factor = factor - gain[..., :, None] * (row[..., None, :] @ factor)
            found = [earlier - gain * (row * earlier).sum(-1, keepdim=True) for earlier in found] + [gain]
        return cls(factor, torch.stack(found, dim=-1))


class DiffuseDirections(NamedTuple):
    """Directions without any information: the columns of L. Their variance is infinite."""

    root: Float[Tensor, "#b n n"]  # L
    origin: Float[Tensor, "#b n n"]  # L as it would be without observations: the size of rounding errors in L
    remaining: Float[Tensor, "#b"]  # how many directions are still diffuse

    def predicted(self, transition: Float[Tensor, "#b n n"]) -> "DiffuseDirections":
        """`L -> Phi L`. While all directions are diffuse L stays as it is, so that decay cannot shrink it to zero."""
        unobserved = self.unobserved()
        root, origin = (torch.where(unobserved, x, transition @ x) for x in (self.root, self.origin))
        return DiffuseDirections(root, origin, self.remaining)

    def unobserved(self) -> Bool[Tensor, "#b 1 1"]:
        """Whether all directions are diffuse."""
        return (self.remaining == self.root.shape[-1])[:, None, None]

    def updated(self, row: Float[Tensor, "#b n"]) -> tuple[Tensor, Tensor, "DiffuseDirections"]:
        """Whether a component `h x` shows a part of them, its gain `L a / a^T a` with `a = L^T h`, and what remains."""
        shown = (self.root.mT @ row[..., None])[..., 0]
        most = (row.abs() * self.scales()).sum(-1, keepdim=True)
        size = shown.square().sum(-1, keepdim=True)
        shows = size > (_NO_PART * most).square()
        direction = shown / torch.where(shows, size, 1.0)
        gain = (self.root @ direction[..., None])[..., 0] * shows
        remaining = self.remaining - shows[..., 0].to(self.remaining.dtype)
        root = (self.root - gain[..., :, None] * shown[..., None, :]) * (remaining > 0)[..., None, None]
        return shows, gain, DiffuseDirections(root, self.origin, remaining)

    def scales(self) -> Float[Tensor, "#b n"]:
        """The size of each state's variation without observations."""
        return self.origin.square().sum(-1).sqrt()


class Gaussian(NamedTuple):
    """A state `x ~ N(mean, covariance + c L L^T)` for `c -> infinity`. Series of one model share a covariance."""

    mean: Float[Tensor, "b n"]
    covariance: Float[Tensor, "#b n n"]
    diffuse: DiffuseDirections | None  # L, or None where every direction is known
    least_squares: Float[Tensor, " b"]  # the smallest sum of squared residuals that any state can have

    def predicted(self, transition: Float[Tensor, "#b n n"], variance: Float[Tensor, "#b n n"]) -> "Gaussian":
        """One step later: `m -> Phi m`, `P -> Phi P Phi^T + V`."""
        mean = (transition @ self.mean[..., None])[..., 0]
        covariance = symmetric(transition @ self.covariance @ transition.mT) + variance
        if self.diffuse is None:
            return Gaussian(mean, covariance, None, self.least_squares)
        covariance = torch.where(self.diffuse.unobserved(), self.covariance, covariance)
        return Gaussian(mean, covariance, self.diffuse.predicted(transition), self.least_squares)

    def updated(self, rows: Float[Tensor, "#b m n"], values: Float[Tensor, "b m"]) -> tuple["Gaussian", list[Tensor]]:
        """After an observation, component by component, and their gains. A row of zeros is a missing component."""
        mean, covariance, diffuse, least_squares = self
        identity = identity_like(covariance)
        gains: list[Tensor] = []
        for row, value in zip(rows.unbind(-2), values.unbind(-1), strict=True):
            spread = (covariance @ row[..., None])[..., 0]
            variance = (row * spread).sum(-1, keepdim=True) + 1
            gain = spread / variance
            innovation = value - (row * mean).sum(-1)
            residual = innovation.square() / variance[..., 0]
            if diffuse is not None:
                shows, diffuse_gain, diffuse = diffuse.updated(row)
                gain = torch.where(shows, diffuse_gain, gain)
                residual = torch.where(shows[..., 0], 0.0, residual)
            mean, least_squares = mean + gain * innovation[..., None], least_squares + residual
            factor = identity - gain[..., :, None] * row[..., None, :]  # Joseph's form: no digits cancel
            covariance = symmetric(factor @ covariance @ factor.mT) + gain[..., :, None] * gain[..., None, :]
            gains.append(gain)
        if diffuse is not None and not bool(diffuse.root.any()):
            diffuse = None
        return Gaussian(mean, covariance, diffuse, least_squares), gains

    def informed(self, information: "Information") -> tuple["Gaussian", AffineUpdate]:
        """Updated by information on the state. The mean becomes `factor m + gain y`.

        `J = U diag(l) U^T` is the information of an observation with unit noise and rows `L^-1 U^T J`,
        where `L L^T = U^T J U` for the eigenvalues l > 0.
        """
        scale, matrix = information.scaled()
        eigenvalues, basis = torch.linalg.eigh(matrix.detach())  # equal eigenvalues have no gradient
        informative = (eigenvalues > _ROUNDING * eigenvalues[..., -1:].clamp(min=1.0))[..., None]
        projection = basis.mT * informative
        projected = projection @ matrix
        missing = torch.diag_embed((~informative[..., 0]).to(matrix.dtype))
        factor, failed = torch.linalg.cholesky_ex(projected @ projection.mT + missing)
        if bool((failed > 0).any()):  # rounding, where the eigenvalues differ by more than the digits of float64
            diagonal = torch.diag_embed(torch.where(informative[..., 0], eigenvalues, 1.0).sqrt())
            factor = torch.where((failed > 0)[..., None, None], diagonal, factor)
        rows = torch.linalg.solve_triangular(factor, projected, upper=False) / scale[..., None, :]
        to_values = torch.linalg.solve_triangular(factor, projection * scale[..., None, :], upper=False)
        values = (to_values @ information.vector[..., None])[..., 0]
        posterior, gains = self.updated(rows, values)
        update = AffineUpdate.of_components(rows, gains)
        least_squares = posterior.least_squares + (information.constant - values.square().sum(-1)).clamp(min=0.0)
        return posterior._replace(least_squares=least_squares), AffineUpdate(update.factor, update.gain @ to_values)

    def full_covariance(self) -> Float[Tensor, "b n n"]:
        """The covariance of each series, infinite in diffuse directions."""
        covariance = self.covariance
        if self.diffuse is not None:
            root, scales = self.diffuse.root, self.diffuse.scales()
            length = root.square().sum(-1).sqrt()
            is_diffuse = length > _NO_PART * scales
            correlated = (root @ root.mT).abs() > _NO_CORRELATION * length[..., :, None] * length[..., None, :]
            unknown = is_diffuse[..., :, None] & is_diffuse[..., None, :] & correlated
            infinite = torch.copysign(torch.full_like(root, torch.inf), root @ root.mT)
            covariance = torch.where(unknown, infinite, covariance)
        return covariance.expand(*self.mean.shape, -1)


class Information(NamedTuple):
    """The log-likelihood `-(x^T J x - 2 y^T x + c) / 2 + const` of a state x, for any rank of J."""

    matrix: Float[Tensor, "*#batch n n"]  # J, the precision
    vector: Float[Tensor, "*batch n"]  # y
    constant: Float[Tensor, "*batch"]  # c

    @classmethod
    def of(cls, rows: Float[Tensor, "*#batch m n"], values: Float[Tensor, "*batch m"]) -> "Information":
        """`J = H^T H`, `y = H^T z`, `c = z^T z` of an observation with unit noise. C is not inverted."""
        return cls(rows.mT @ rows, (rows.mT @ values[..., None])[..., 0], values.square().sum(-1))

    def at(self, index: int) -> "Information":
        """At a time index, of information along a grid `(b, G)`."""
        return Information(*(part[:, index] for part in self))

    def zero(self) -> "Information":
        """No information, of the same shape as the first time index of this grid."""
        return Information(*(torch.zeros_like(part[:, 0]) for part in self))

    def weighted(self, weight: Float[Tensor, "*batch"]) -> "Information":
        """The information of the same observations with their noise divided by a weight."""
        vector, constant = self.vector * weight[..., None], self.constant * weight
        return Information(self.matrix * weight[..., None, None], vector, constant)

    def shrinkage(self, variance: Float[Tensor, "*#batch n n"]) -> Float[Tensor, "*batch n n"]:
        """`(I + J V)^-1`: the factor by which J shrinks where V is added to the state."""
        return inverse(identity_like(variance) + self.matrix @ variance)

    def inflated(self, variance: Float[Tensor, "*#batch n n"]) -> "Information":
        """On `x + e`, `e ~ N(0, V)`: precision `(J^-1 + V)^-1 = (I + J V)^-1 J`."""
        factor = self.shrinkage(variance)
        vector = factor @ self.vector[..., None]
        lost = self.vector[..., None, :] @ (variance @ vector)
        return Information(symmetric(factor @ self.matrix), vector[..., 0], self.constant - lost[..., 0, 0])

    def substituted(self, matrix: Float[Tensor, "*#batch n n"]) -> "Information":
        """On x, where this is information on `M x`: `M^T J M`, `M^T y`."""
        vector = (matrix.mT @ self.vector[..., None])[..., 0]
        return Information(matrix.mT @ self.matrix @ matrix, vector, self.constant)

    def solve(self, stationary: Float[Tensor, "*batch n n"] | None) -> tuple[Tensor, Tensor]:
        """`J^-1 y` and `J^-1`: 0 and infinite in unknown directions. Where J is zero, the stationary covariance."""
        scale, matrix = self.scaled()
        vector = self.vector * scale
        eigenvalues = torch.linalg.eigvalsh(matrix.detach())
        regular = eigenvalues[..., 0] > _SINGULAR * eigenvalues[..., -1].clamp(min=1.0)
        solved = inverse(torch.where(regular[..., None, None], matrix, identity_like(matrix)))
        mean, covariance = (solved @ vector[..., None])[..., 0] * scale, _outer(scale) * symmetric(solved)
        if bool(regular.all()):
            return mean, covariance
        eigenvalues, basis = torch.linalg.eigh(matrix.detach())
        unknown = eigenvalues <= _SINGULAR * eigenvalues[..., -1:].clamp(min=1.0)
        pseudo = basis @ torch.diag_embed(torch.where(unknown, 0.0, 1 / eigenvalues)) @ basis.mT
        projector = (basis * unknown[..., None, :]) @ basis.mT
        infinite = torch.copysign(torch.full_like(projector, torch.inf), projector)
        partial = torch.where(projector.abs() > 1e-9, infinite, _outer(scale) * pseudo)
        if stationary is not None:
            nothing = (self.matrix.diagonal(dim1=-2, dim2=-1) <= _NO_INFORMATION).all(-1)
            partial = torch.where(nothing[..., None, None], stationary, partial)
        partial_mean = (pseudo @ vector[..., None])[..., 0] * scale
        covariance = torch.where(regular[..., None, None], covariance, partial)
        return torch.where(regular[..., None], mean, partial_mean), covariance

    def scaled(self) -> tuple[Tensor, Tensor]:
        """`d` and `d J d` with a diagonal of 1, or about 0 where nothing is known: units of states change nothing."""
        diagonal = self.matrix.detach().diagonal(dim1=-2, dim2=-1)
        scale = torch.where(diagonal > _NO_INFORMATION, diagonal, 1.0).rsqrt()
        return scale, symmetric(_outer(scale) * self.matrix)

    def __add__(self, other: "Information") -> "Information":  # type: ignore[override]
        return Information(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def _outer(scale: Tensor) -> Tensor:
    return scale[..., :, None] * scale[..., None, :]


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
MOST_LOG_ODDS_GAIN = 6.5  # by one row, less than PRIOR_LOG_ODDS takes: two wrong rows that agree are no jump yet
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
        conditions = (condition.reshape(-1, *(1,) * (x.dim() - 1)) for x in self)
        return ScalePosterior(*map(torch.where, conditions, self, other))


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
