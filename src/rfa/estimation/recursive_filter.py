"""The recursive robust filter: each observation is weighted by a filter that has been robust so far.

It keeps one Gaussian. Each row gets the mean of its gains over the scales that its error may have (`noise_scale`), and
the uncertainty between these scales inflates the covariance (moment matching, as for a Gaussian sum):

    m = m- + K_w (z - H m-),   P = (I - K_w H) P- + P- H^T scatter H P-,    K_w the Kalman gain with noise R / w

A run of rejected rows may be right: the state has jumped, or the filter has started at an outlier. So a rejected row
starts a second filter, the challenger. Its covariance is inflated until the row fits. The challenger takes over when it
expects the later rows 1,000 times as much as the filter does.
"""

from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .contributions import Contributions
from .gaussian import Gaussian
from .grid import ObservationGrid, Transitions
from .kalman import FilteredState, check_finite, combined, kalman_filter

# The scale of each measurement error: what an innovation says of it, and how often each scale occurs

_SCALES = 18  # multiples of R: 1, and half decades above it. The last one grows with the row.
_ABOVE = 0.25  # prior probability of a scale above 1
_FALL = 0.6  # factor of that probability from one scale to the next
_PRIOR_ROWS = 5.0  # number of rows that the prior of the scales counts for
_PERSISTENCE = 0.3  # probability that a row has the scale of the row before: errors come in bursts
_LARGEST_VARIANCE = 100.0  # h, in units of the noise, above which less certain predictions no longer lower w


class NoiseScale(NamedTuple):
    """What is known of the scales s of a series.

    Args:
        counts: `(b, scales)`: rows with each scale so far, and the prior's (the parameter of a Dirichlet distribution).
        last: `(b, scales)`: the probability of each scale for the last row.
    """

    counts: Float[Tensor, "b scales"]
    last: Float[Tensor, "b scales"]

    @classmethod
    def prior(cls, like: Float[Tensor, "b ..."]) -> "NoiseScale":
        """Before the first row, for as many series as `like` has."""
        falling = _FALL ** torch.arange(_SCALES - 1, dtype=like.dtype, device=like.device)
        above = _ABOVE * falling / falling.sum()
        probability = torch.cat([1 - above.sum(dim=0, keepdim=True), above]).expand(len(like), -1)
        return cls(_PRIOR_ROWS * probability, probability)

    def expected(self) -> Float[Tensor, "b scales"]:
        """The probability of each scale for the next row."""
        learned = self.counts / self.counts.sum(-1, keepdim=True)
        return (1 - _PERSISTENCE) * learned + _PERSISTENCE * self.last

    def median(self) -> Float[Tensor, " b"]:
        """The median scale of the rows. It is 1 where R is right."""
        cumulative = (self.counts / self.counts.sum(-1, keepdim=True)).detach().cumsum(-1)
        return _scales(cumulative)[(cumulative < 0.5).sum(-1)]

    def updated(self, row: "ScalePosterior") -> "NoiseScale":
        """After a row."""
        valid = row.valid[:, None]
        return NoiseScale(self.counts + row.probability * valid, torch.where(valid, row.probability, self.last))


class ScalePosterior(NamedTuple):
    """What the innovation of one row says of its scale. Where there is no prediction, the row has weight 1.

    Args:
        weight: w, `(b,)`, in (0, 1]. The row counts as if its noise were R / w.
        gain_ratio: `(h + 1) / (h + 1 / w)`, `(b,)`, in (0, 1]: the row's gain over the gain with w = 1.
        scatter: `(b, m, m)`: the covariance between scales of the whitened correction.
        probability: `(b, scales)`: of each scale.
        log_evidence: `(b,)`: the log density of the row, 0 without a prediction.
        valid: `(b,)`: whether there is a row and a prediction of it.
    """

    weight: Float[Tensor, " b"]
    gain_ratio: Float[Tensor, " b"]
    scatter: Float[Tensor, "b m m"]
    probability: Float[Tensor, "b scales"]
    log_evidence: Float[Tensor, " b"]
    valid: Bool[Tensor, " b"]

    def where(self, condition: Bool[Tensor, " b"], other: "ScalePosterior") -> "ScalePosterior":
        """Itself in the series where the condition holds, the other one elsewhere."""
        pairs = zip(self, other, strict=True)
        return ScalePosterior(
            *(torch.where(condition.reshape(-1, *(1,) * (mine.dim() - 1)), mine, theirs) for mine, theirs in pairs)
        )

    def selected(self, series: Tensor) -> "ScalePosterior":
        """Of some series by their index."""
        return ScalePosterior(*(x[series] for x in self))


def infer_scale(
    expected: Float[Tensor, "b scales"],
    innovation: Float[Tensor, "b m"],
    variance: Float[Tensor, "b m m"],
    present: Bool[Tensor, "b m"],
) -> ScalePosterior:
    """The posterior of the scale of one row, by the equations of this file.

    With w the Kalman gain is the mean of the gains over s. This is exact where H is a multiple of I. The larger h, the
    less the row says of s. In the limit 1 / w would be the mean of all s, and the row would count for nothing. So h is
    bounded.

    Args:
        expected: p(s).
        innovation: e in units of the noise, 0 where a component is missing.
        variance: H, the covariance of the prediction of e, 0 where a component is missing.
        present: which components are observed.
    """
    observed = present.sum(-1).clamp(min=1)
    scale = _scales(innovation).expand(len(innovation), -1)
    last = torch.maximum(scale[:, -1], innovation.square().sum(-1) / observed)  # so that no row lies above all scales
    scale = torch.cat([scale[:, :-1], last[:, None]], dim=-1)
    noise = torch.diag_embed(torch.where(present[:, None, :], scale[..., None], 1.0))
    variance, factor = _cholesky_factors(variance, noise)
    correction = torch.cholesky_solve(innovation[:, None, :, None].expand(*scale.shape, -1, 1), factor)[..., 0]
    log_density = -(correction * innovation[:, None]).sum(-1) / 2 - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    joint = expected.log() + log_density
    probability = torch.softmax(joint, dim=-1)
    mean_variance = variance.diagonal(dim1=-2, dim2=-1).sum(-1) / observed
    bounded = mean_variance.clamp(max=_LARGEST_VARIANCE)
    ratio = probability / (bounded[:, None] + scale)
    weight = ratio.sum(-1) / (ratio * scale).sum(-1)
    gain_ratio = weight * (mean_variance + 1) / (weight * mean_variance + 1)
    deviation = correction - (probability[..., None] * correction).sum(1, keepdim=True)
    scatter = (probability[..., None, None] * deviation[..., :, None] * deviation[..., None, :]).sum(1)
    large = mean_variance > _LARGEST_VARIANCE
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


def _scales(like: Tensor) -> Float[Tensor, " scales"]:
    """The scales s, multiples of R."""
    return 10.0 ** (torch.arange(_SCALES, dtype=like.dtype, device=like.device) / 2)


_REJECTED = 0.1  # a row of smaller weight starts a challenger
_PRIOR_LOG_ODDS = -7.0  # of a new challenger: 1 to 1,000
_ABANDONED_LOG_ODDS = -9.0  # a challenger with smaller odds is given up
_SAME_LOG_ODDS = 0.05  # change in odds by which filter and challenger are the same: another challenger may start
_NO_DIGITS = 1e14  # a squared distance from a mean. A row that far off would lose its digits beside the mean.

Part = TypeVar("Part", Gaussian, Contributions)


class FilterPass(NamedTuple):
    """A robust filter of b series. With challengers it has 2 b series: the filters, then their challengers.

    Args:
        grid: the observations with their weights.
        transitions: of the same series.
        states: the filter at each time index.
        gain_ratio: `(b or 2 b, G)`: the gain of each row over its Kalman gain, 1 where nothing is observed.
        median_scale: `(b, G)`: the median scale of the noise, as known at each time.
        replaced: `(b, G)`: where the challenger takes over, before the row is used. None without challengers.
        started: `(b, G)`: where a new challenger starts, before the row is used.
        cleared: `(b, G)`: where it starts without a mean.
    """

    grid: ObservationGrid
    transitions: Transitions
    states: list[FilteredState]
    gain_ratio: Float[Tensor, "c grid"]
    median_scale: Float[Tensor, "b grid"]
    replaced: Bool[Tensor, "b grid"] | None = None
    started: Bool[Tensor, "b grid"] | None = None
    cleared: Bool[Tensor, "b grid"] | None = None

    def without_challengers(self, part: Part) -> Part:
        """Of the b filters alone."""
        if self.replaced is None:
            return part
        return part.selected(slice(0, len(self.replaced)))

    def inherited(self, contributions: Contributions, index: int) -> Contributions:
        """Contributions at a time index, where challengers take over and where they start."""
        if self.replaced is None or self.started is None or self.cleared is None:
            return contributions
        contributions = contributions.selected(_origin(self.replaced[:, index], self.started[:, index]))
        cleared = self.cleared[:, index]
        return contributions.cleared(torch.cat([torch.zeros_like(cleared), cleared]))

    def with_median_noise(self, grid: ObservationGrid) -> ObservationGrid:
        """The observations with the median scale of their noise. Later distances are measured with it."""
        return grid if bool((self.median_scale == 1).all()) else grid.weighted(1 / self.median_scale)


class Recursion(NamedTuple):
    """All that the robust filter carries from one row to the next, of b filters and their b challengers.

    Args:
        state: of the 2 b series.
        scale: what is known of their noise.
        trusted: `(b,)`: how many rows the challenger will still use with weight 1.
        log_odds: `(b,)`: of the challenger. -inf where there is none.
    """

    state: Gaussian
    scale: NoiseScale
    trusted: Float[Tensor, " b"]
    log_odds: Float[Tensor, " b"]

    @classmethod
    def first(cls, state: Gaussian) -> "Recursion":
        """Before the first row, from the state of b series."""
        zeros = torch.zeros_like(state.least_squares)
        both = state.repeated(2 * len(zeros))
        return cls(both, NoiseScale.prior(both.mean), zeros, zeros - torch.inf)


def kalman_pass(grid: ObservationGrid, transitions: Transitions, state: Gaussian) -> FilterPass:
    """The Kalman filter: every row has weight 1."""
    ones = torch.ones_like(grid.times)
    return FilterPass(grid, transitions, kalman_filter(grid, transitions, state), ones, ones)


def robust_filter(grid: ObservationGrid, transitions: Transitions, state: Gaussian) -> FilterPass:
    """The filter in which the prediction of each row gives its weight."""
    return resumed_filter(grid, transitions, Recursion.first(state))[0]


def robust_smoother(grid: ObservationGrid, transitions: Transitions, state: Gaussian) -> FilterPass:
    """The filter in which past and future give the weights. Combined with `backward_information` it is a smoother.

    From the last row back, each row has two predictions: the filter's, and the filter's combined with the future. The
    prediction under which the row is more probable gives its weight. The scales are those of the whole series.
    """
    filtered, recursion = resumed_filter(grid, transitions, Recursion.first(state))
    scale = NoiseScale(*(x[: len(grid.times)] for x in recursion.scale))
    later = grid.information.zero()
    posteriors: list[ScalePosterior] = []
    for k in reversed(range(grid.length)):
        predicted = filtered.without_challengers(filtered.states[k].predicted)
        from_past = _scale_posterior(scale.expected(), predicted, grid, k)
        from_both = _scale_posterior(scale.expected(), combined(predicted, later)[0], grid, k)
        past_wins = ~from_both.valid | (from_past.log_evidence > from_both.log_evidence)
        posterior = from_past.where(from_past.valid & past_wins, from_both)
        scale = scale._replace(last=torch.where(posterior.valid[:, None], posterior.probability, scale.last))
        posteriors.append(posterior)
        if k:
            later = transitions.backward(k - 1, later + grid.information.at(k).weighted(posterior.weight))
    weight, gain_ratio = _weights(posteriors[::-1])
    weighted, median = grid.weighted(weight), scale.median()[:, None].expand_as(gain_ratio)
    return FilterPass(weighted, transitions, kalman_filter(weighted, transitions, state), gain_ratio, median)


def resumed_filter(
    grid: ObservationGrid, transitions: Transitions, recursion: Recursion
) -> tuple[FilterPass, Recursion]:
    """The robust filter of further rows, and what it carries on. Its state is already predicted to the first row."""
    b = len(grid.times)
    filters, challengers = slice(0, b), slice(b, 2 * b)
    grid, transitions = grid.doubled(), transitions.doubled()
    state, scale, trusted, log_odds = recursion
    nothing = torch.zeros_like(grid.present[filters, 0])
    determining = -(-state.mean.shape[-1] // grid.values.shape[-1]) - 1  # rows beside the first that determine a state
    states, posteriors, medians, replacements, starts, clearings = [], [], [], [], [], []
    for k in range(grid.length):
        predicted = state.predicted(*transitions[k - 1]) if k else state
        check_finite(predicted.covariance[filters], k)
        posterior = _scale_posterior(scale.expected(), predicted, grid, k)
        posterior = _with_trust(posterior, torch.cat([nothing, trusted > 0]))
        valid = posterior.valid[filters] & posterior.valid[challengers]
        change = torch.where(valid, posterior.log_evidence[challengers] - posterior.log_evidence[filters], 0.0).detach()
        same = valid & (change.abs() < _SAME_LOG_ODDS)
        log_odds = log_odds + change
        replaced = log_odds > 0
        ended = replaced | ~(log_odds > _ABANDONED_LOG_ODDS)
        predicted, scale, posterior = _inherited(predicted, scale, posterior, _origin(replaced, nothing))
        started = (ended | same) & posterior.valid[filters] & (posterior.weight[filters] < _REJECTED)
        cleared = nothing
        log_odds = torch.where(started, _PRIOR_LOG_ODDS, torch.where(ended, -torch.inf, log_odds))
        if bool(started.any()):
            predicted, scale, posterior = _inherited(predicted, scale, posterior, _origin(nothing, started))
            new = torch.cat([nothing, started])
            challenger, cleared = _challenger(predicted, grid, k)
            predicted = predicted._replace(
                mean=torch.where(new[:, None], challenger.mean, predicted.mean),
                covariance=torch.where(new[:, None, None], challenger.covariance, predicted.covariance),
            )
            cleared = cleared[challengers] & started
            posterior = _full_weight(scale.expected(), grid, k).where(new, posterior)
        trusted = torch.where(started, 2.0 * determining, (trusted - valid.to(trusted.dtype)).clamp(min=0.0))
        scale = scale.updated(posterior)
        state, gains = _updated(predicted, grid, k, posterior)
        states.append(FilteredState(predicted, state, gains))
        posteriors.append(posterior)
        medians.append(scale.median()[filters])
        replacements.append(replaced)
        starts.append(started)
        clearings.append(cleared)
    weight, gain_ratio = _weights(posteriors)
    along_grid = [torch.stack(values, dim=1) for values in (medians, replacements, starts, clearings)]
    found = FilterPass(grid.weighted(weight), transitions, states, gain_ratio, *along_grid)
    return found, Recursion(state, scale, trusted, log_odds)


def _origin(replaced: Bool[Tensor, " b"], started: Bool[Tensor, " b"]) -> Int[Tensor, " c"]:
    """`(2 b,)`: the series that each filter and each challenger continues."""
    b = len(replaced)
    index = torch.arange(2 * b, device=replaced.device)
    index[:b] += b * replaced
    index[b:] -= b * started
    return index


def _inherited(
    predicted: Gaussian, scale: NoiseScale, posterior: ScalePosterior, origin: Tensor
) -> tuple[Gaussian, NoiseScale, ScalePosterior]:
    """Of the series that each one continues."""
    return predicted.selected(origin), NoiseScale(*(x[origin] for x in scale)), posterior.selected(origin)


def _weights(posteriors: list[ScalePosterior]) -> tuple[Tensor, Tensor]:
    """Weight and gain ratio of each row, `(b, G)`."""
    weights, gain_ratios = zip(*((posterior.weight, posterior.gain_ratio) for posterior in posteriors), strict=True)
    return torch.stack(weights, dim=1), torch.stack(gain_ratios, dim=1)


def _challenger(predicted: Gaussian, grid: ObservationGrid, index: int) -> tuple[Gaussian, Bool[Tensor, " c"]]:
    """The challenger that a row would start, and whether it starts without a mean.

    Its covariance is inflated until it expects the row. The mean is set to zero where the row would lose its digits
    beside it, as beside a fill value.
    """
    cleared = _misfit(predicted, grid, index) > _NO_DIGITS
    predicted = predicted._replace(mean=torch.where(cleared[:, None], 0.0, predicted.mean))
    inflation = _misfit(predicted, grid, index)[:, None, None]
    return predicted._replace(covariance=predicted.covariance * inflation), cleared


def _with_trust(posterior: ScalePosterior, trusted: Bool[Tensor, " c"]) -> ScalePosterior:
    """With weight 1 where a row is trusted and would be rejected.

    A challenger's first row may have moved the wrong state: the velocity, where the position has jumped. The next rows
    correct that, if they are not rejected too.
    """
    trusted = trusted & (posterior.weight < _REJECTED)
    ones, scatter = torch.ones_like(posterior.weight), torch.where(trusted[:, None, None], 0.0, posterior.scatter)
    weight, gain_ratio = (torch.where(trusted, ones, x) for x in (posterior.weight, posterior.gain_ratio))
    return posterior._replace(weight=weight, gain_ratio=gain_ratio, scatter=scatter)


def _misfit(predicted: Gaussian, grid: ObservationGrid, index: int) -> Float[Tensor, " c"]:
    """`d^2 / m` of a row, at least 1: the factor by which the covariance must grow to expect the row."""
    observation, values = grid.at(index)
    innovation = values - (observation @ predicted.mean[..., None])[..., 0]
    variance = observation @ predicted.covariance @ observation.mT
    variance = variance + torch.eye(observation.shape[-2], dtype=observation.dtype, device=observation.device)
    solved, singular = torch.linalg.solve_ex(variance, innovation[..., None])  # singular by rounding: two equal rows
    distance = (innovation * solved[..., 0]).sum(-1).masked_fill(singular > 0, 1.0)
    return (distance / observation.any(-1).sum(-1).clamp(min=1)).clamp(min=1.0)


def _updated(
    predicted: Gaussian, grid: ObservationGrid, index: int, posterior: ScalePosterior
) -> tuple[Gaussian, list[Tensor]]:
    """After a row with its weight. `P H^T scatter H P` inflates the covariance."""
    observation, values = grid.at(index)
    root = posterior.weight.sqrt()
    updated, gains = predicted.updated(observation * root[:, None, None], values * root[:, None])
    across = predicted.covariance @ observation.mT
    return updated._replace(covariance=updated.covariance + across @ posterior.scatter @ across.mT), gains


def _full_weight(expected: Float[Tensor, "c scales"], grid: ObservationGrid, index: int) -> ScalePosterior:
    """A row of weight 1, without a prediction of it."""
    b, m = grid.values[:, index].shape
    ones = grid.values.new_ones(b)
    invalid = torch.zeros_like(grid.present[:, index])
    return ScalePosterior(ones, ones, grid.values.new_zeros(b, m, m), expected, 0 * ones, invalid)


def _scale_posterior(
    expected: Float[Tensor, "c scales"], predicted: Gaussian, grid: ObservationGrid, index: int
) -> ScalePosterior:
    """The scale of a row, by its innovation from the predicted state."""
    observation, values = grid.at(index)
    b, m = values.shape
    valid, full_weight = grid.present[:, index], _full_weight(expected, grid, index)
    if predicted.diffuse is not None:  # a row that shows a diffuse direction has no prediction
        diffuse = predicted.diffuse
        for component in observation.unbind(-2):
            shows, _, diffuse = diffuse.updated(component)
            valid = valid & ~shows[..., 0]
    if not bool(valid.any()):
        return full_weight
    innovation = values - (observation @ predicted.mean[..., None])[..., 0]
    variance = (observation @ predicted.covariance @ observation.mT).expand(b, m, m)
    finite = innovation.isfinite().all(-1) & variance.isfinite().all(-1).all(-1)
    if not bool(finite.all()):  # a prediction that overflows gives no weight
        valid, innovation = valid & finite, torch.where(finite[:, None], innovation, 0.0)
        variance = torch.where(finite[:, None, None], variance, 0.0)
    present = observation.any(-1).expand(b, m)
    return infer_scale(expected, innovation, variance, present).where(valid, full_weight)
