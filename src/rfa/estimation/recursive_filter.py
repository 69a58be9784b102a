"""The Kalman filter and the recursive robust filter over the rows of a grid in PyTorch, with gradients.

Kalman:

    predicted:  m- = Phi m, P- = Phi P Phi^T + V
    posterior:  m = m- + K (z - H m-), P = (I - K H) P-, K = P- H^T (H P- H^T + I)^-1
    backward:   J_k, y_k: the information of all later observations on the state at time index k

A smoother combines the posterior with the backward information (a two-filter smoother).

The robust filter weights each observation by a filter that has been robust so far. It keeps one Gaussian. Each row gets
the mean of its gains over the scales that its error may have, and the uncertainty between these scales inflates the
covariance (moment matching, as for a Gaussian sum):

    m = m- + K_w (z - H m-),   P = (I - K_w H) P- + P- H^T scatter H P-,    K_w the Kalman gain with noise R / w

A run of rejected rows may be right: the state has jumped, or the filter has started at an outlier. So a rejected row
starts a second filter, the challenger. Its covariance is inflated until the row fits. The challenger takes over when it
expects the later rows 1,000 times as much as the filter does. One row adds at most 6.5 to its log odds, which start
at -7: two wrong rows that agree are no jump yet.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from . import gaussian
from .compiled import discretize
from .gaussian import DiffuseDirections, Gaussian, Information, NoiseScale, ScalePosterior, T, infer_scale, mapped
from .linear_model import Found, Rows
from .linear_sde import LinearSDE, identity_like
from .problem import ObservationGrid, Transitions

_NO_TURN = 1e-16  # of two products of entries: a pair of states whose product is less turns by rounding alone


class FilteredState(NamedTuple):
    """The filter at one time index: the state before and after its observation, and the gain of each component."""

    predicted: Gaussian
    posterior: Gaussian
    gains: list[Tensor]


def diffuse_start(grid: ObservationGrid, transitions: Transitions) -> Gaussian:
    """The state before any observation, of which nothing is known."""
    root = torch.diag_embed(_diffuse_scales(grid, transitions.steps))
    diffuse = DiffuseDirections(root, root, root.new_full(root.shape[:1], root.shape[-1]))
    values = grid.values
    return Gaussian(values.new_zeros(len(values), root.shape[-1]), 0 * root, diffuse, values.new_zeros(len(values)))


@torch.no_grad()
def _diffuse_scales(grid: ObservationGrid, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The unit of each state while it is diffuse, `(b or 1, n)`: the change that the first observations would show."""
    n, identity = grid.rows.shape[-1], identity_like(grid.rows)
    shown, moved = grid.rows.new_zeros(grid.models, n), identity[None]
    for k in range(grid.length):
        if k >= 4 * n and bool((shown > 0).all()):
            break
        moved = steps[k - 1][0] @ moved if k else moved
        nothing_yet = ~(shown > 0).any(-1)[:, None, None]
        moved = torch.where(nothing_yet, identity, moved)
        shown = shown + (grid.rows[:, k] @ without_rounding(moved)).square().sum(-2)
    return torch.where((shown > 0) & shown.isfinite(), shown, 1.0).rsqrt()


def kalman_filter(grid: ObservationGrid, transitions: Transitions, state: Gaussian) -> list[FilteredState]:
    """The filter at every time index, from the state before the first one."""
    found = []
    for k in range(grid.length):
        predicted = state.predicted(*transitions.steps[k - 1]) if k else state
        if not bool(predicted.covariance.isfinite().all()):
            raise overflow_error(k)
        state, gains = predicted.updated(*grid.at(k))
        found.append(FilteredState(predicted, state, gains))
    return found


def overflow_error(index: int) -> ValueError:
    """Of a predicted covariance that is not finite."""
    return ValueError(
        f"times: got a time by which the state overflows (number {index} of all times), expected a shorter series"
    )


def backward_information(grid: ObservationGrid, transitions: Transitions) -> list[Information]:
    """The information of all later observations on the state at each time index."""
    later = grid.information.zero()
    found = [later]
    for k in reversed(range(grid.length - 1)):
        transition, variance = transitions.steps[k]
        later = (later + grid.information.at(k + 1)).inflated(variance).substituted(transition)
        found.append(later)
    return found[::-1]


# The robust filter: weights of rows, and challengers


class FilterPass(NamedTuple):
    """A filter of b series. With challengers it has 2 b series: the filters, then their challengers."""

    grid: ObservationGrid  # the observations with their weights
    transitions: Transitions
    states: list[FilteredState]
    weight: Float[Tensor, "c grid"]  # of each row
    gain_ratio: Float[Tensor, "c grid"]  # of each row over its Kalman gain, 1 where nothing is observed
    median_scale: Float[Tensor, "b grid"]  # the median scale of the noise, as known at each time
    origin: list[Int[Tensor, " c"]] | None = None  # the series that each continues at a row; None: no challengers
    cleared: list[Bool[Tensor, " c"]] | None = None  # which start without a mean there

    def without_challengers(self, part: T) -> T:
        """Of the b filters alone."""
        return part if self.origin is None else mapped(part, lambda x: x[: len(self.median_scale)])

    def estimates(self, smooth: bool) -> list[Gaussian]:
        """The state at each time index, by earlier observations or, in smoothing, by all."""
        states = [self.without_challengers(state.posterior) for state in self.states]
        if not smooth:
            return states
        backward = backward_information(self.grid, self.transitions)
        return [state.informed(later)[0] for state, later in zip(states, backward, strict=True)]


class Recursion(NamedTuple):
    """All that the robust filter carries from one row to the next, of b filters and their b challengers."""

    state: Gaussian  # of the 2 b series
    scale: NoiseScale  # what is known of their noise
    trusted: Float[Tensor, " b"]  # how many rows the challenger will still use with weight 1
    log_odds: Float[Tensor, " b"]  # of the challenger, -inf where there is none

    @classmethod
    def first(cls, state: Gaussian) -> "Recursion":
        """Before the first row, from the state of b series."""
        zeros = torch.zeros_like(state.least_squares)
        both = mapped(state, lambda x: x.repeat(2 * len(zeros) // len(x), *(1,) * (x.dim() - 1)))
        return cls(both, NoiseScale.prior(both.mean), zeros, zeros - torch.inf)


def kalman_pass(grid: ObservationGrid, transitions: Transitions, state: Gaussian) -> FilterPass:
    """The Kalman filter: every row has weight 1."""
    ones = torch.ones_like(grid.times)
    return FilterPass(grid, transitions, kalman_filter(grid, transitions, state), ones, ones, ones)


def robust_smoother(grid: ObservationGrid, transitions: Transitions, start: Recursion) -> tuple[FilterPass, Recursion]:
    """The filter in which past and future give the weights. Combined with `backward_information` it is a smoother.

    Each row has two predictions: the filter's, and the filter's combined with the future. The one under which the row
    is more probable gives its weight.
    """
    filtered, recursion = resumed_filter(grid, transitions, start)
    scale = NoiseScale(*(x[: len(grid.times)] for x in recursion.scale))
    later = grid.information.zero()
    posteriors: list[ScalePosterior] = []
    for k in reversed(range(grid.length)):
        predicted = filtered.without_challengers(filtered.states[k].predicted)
        from_past = _scale_posterior(scale.expected(), predicted, grid, k)
        from_both = _scale_posterior(scale.expected(), predicted.informed(later)[0], grid, k)
        past_wins = ~from_both.valid | (from_past.log_evidence > from_both.log_evidence)
        posterior = from_past.where(from_past.valid & past_wins, from_both)
        scale = scale._replace(last=torch.where(posterior.valid[:, None], posterior.probability, scale.last))
        posteriors.append(posterior)
        if k:
            transition, variance = transitions.steps[k - 1]
            later = later + grid.information.at(k).weighted(posterior.weight)
            later = later.inflated(variance).substituted(transition)
    weight, gain_ratio = _stacked_weights(posteriors[::-1])
    weighted, median = grid.weighted(weight), scale.median()[:, None].expand_as(gain_ratio)
    states = kalman_filter(weighted, transitions, mapped(start.state, lambda x: x[: len(grid.times)]))
    return FilterPass(weighted, transitions, states, weight, gain_ratio, median), recursion


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
    states, posteriors, medians, origins, clearings = [], [], [], [], []
    for k in range(grid.length):
        predicted = state.predicted(*transitions.steps[k - 1]) if k else state
        if not bool(predicted.covariance[filters].isfinite().all()):
            raise overflow_error(k)
        posterior = _scale_posterior(scale.expected(), predicted, grid, k)
        posterior = _with_trust(posterior, torch.cat([nothing, trusted > 0]))
        valid = posterior.valid[filters] & posterior.valid[challengers]
        change = torch.where(valid, posterior.log_evidence[challengers] - posterior.log_evidence[filters], 0.0).detach()
        same = valid & (change.abs() < gaussian.SAME_LOG_ODDS)
        log_odds = log_odds + change.clamp(max=gaussian.MOST_LOG_ODDS_GAIN)
        replaced = log_odds > 0
        ended = replaced | ~(log_odds > gaussian.ABANDONED_LOG_ODDS)
        predicted, scale, posterior = _series_at((predicted, scale, posterior), _origin(replaced, nothing))
        started = (ended | same) & posterior.valid[filters] & (posterior.weight[filters] < gaussian.REJECTED)
        cleared = torch.cat([nothing, nothing])
        log_odds = torch.where(started, gaussian.PRIOR_LOG_ODDS, torch.where(ended, -torch.inf, log_odds))
        if bool(started.any()):
            predicted, scale, posterior = _series_at((predicted, scale, posterior), _origin(nothing, started))
            new = torch.cat([nothing, started])
            # beside its mean the row would lose its digits, as beside a fill value
            cleared = new & (_misfit(predicted, grid, k) > gaussian.NO_DIGITS)
            predicted = predicted._replace(mean=torch.where(cleared[:, None], 0.0, predicted.mean))
            inflation = torch.where(new, _misfit(predicted, grid, k), 1.0)
            predicted = predicted._replace(covariance=predicted.covariance * inflation[:, None, None])
            posterior = _full_weight(scale.expected(), grid, k).where(new, posterior)
        trusted = torch.where(started, 2.0 * determining, (trusted - valid.to(trusted.dtype)).clamp(min=0.0))
        scale = scale.updated(posterior)
        state, gains = _posterior(predicted, grid, k, posterior)
        states.append(FilteredState(predicted, state, gains))
        posteriors.append(posterior)
        medians.append(scale.median()[filters])
        origins.append(_origin(replaced, started))
        clearings.append(cleared)
    weight, gain_ratio = _stacked_weights(posteriors)
    median = torch.stack(medians, dim=1)
    found = FilterPass(grid.weighted(weight), transitions, states, weight, gain_ratio, median, origins, clearings)
    return found, Recursion(state, scale, trusted, log_odds)


def _origin(replaced: Bool[Tensor, " b"], started: Bool[Tensor, " b"]) -> Int[Tensor, " c"]:
    """`(2 b,)`: the series that each filter and each challenger continues."""
    b = len(replaced)
    index = torch.arange(b, device=replaced.device)
    filters, others = index + b * replaced, index + b * ~replaced
    return torch.cat([filters, torch.where(started, filters, others)])


def _series_at(known: T, origin: Int[Tensor, " c"]) -> T:
    """Of the series that each one continues."""
    return mapped(known, lambda x: x[origin])


def _stacked_weights(posteriors: list[ScalePosterior]) -> tuple[Tensor, Tensor]:
    """Weight and gain ratio of each row, `(b, G)`."""
    weights, gain_ratios = zip(*((posterior.weight, posterior.gain_ratio) for posterior in posteriors), strict=True)
    return torch.stack(weights, dim=1), torch.stack(gain_ratios, dim=1)


def _with_trust(posterior: ScalePosterior, trusted: Bool[Tensor, " c"]) -> ScalePosterior:
    """With weight 1 where a row is trusted and would be rejected.

    A challenger's first row may have moved the wrong state: the velocity, where the position has jumped.
    """
    trusted = trusted & (posterior.weight < gaussian.REJECTED)
    weight, gain_ratio = (torch.where(trusted, 1.0, x) for x in (posterior.weight, posterior.gain_ratio))
    scatter = torch.where(trusted[:, None, None], 0.0, posterior.scatter)
    return posterior._replace(weight=weight, gain_ratio=gain_ratio, scatter=scatter)


def _misfit(predicted: Gaussian, grid: ObservationGrid, index: int) -> Float[Tensor, " c"]:
    """`d^2 / m` of a row, at least 1: the factor by which the covariance must grow to expect the row."""
    observation, values = grid.at(index)
    innovation = values - (observation @ predicted.mean[..., None])[..., 0]
    variance = observation @ predicted.covariance @ observation.mT
    variance = variance + identity_like(observation.mT)
    solved, singular = torch.linalg.solve_ex(variance, innovation[..., None])  # singular by rounding: two equal rows
    distance = (innovation * solved[..., 0]).sum(-1).masked_fill(singular > 0, 1.0)
    return (distance / observation.any(-1).sum(-1).clamp(min=1)).clamp(min=1.0)


def _posterior(
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


def without_rounding(transition: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Phi with zeros where two states turn into each other by rounding alone, as after half a period; or stay so.

    The products `Phi_ij Phi_ji` and `Phi_ii Phi_jj` do not depend on the units of states.
    """
    diagonal = transition.diagonal(dim1=-2, dim2=-1)
    turned, stayed = (transition * transition.mT).abs(), (diagonal[..., :, None] * diagonal[..., None, :]).abs()
    gone = torch.diag_embed((stayed < _NO_TURN * turned).any(-1))
    return torch.where(((turned > 0) & (turned < _NO_TURN * stayed)) | gone, 0.0, transition)


class LoopedKernel:
    """The filter of one series without compiled code: as `LinearKernel`, with scalar readings and rows of their own.

    The numbers of a series are, of the filter, then of the challenger, mean, covariance and what is known of the noise;
    how many rows the challenger will still use with weight 1 and its log odds; the time.

    Args:
        model: A and Q.
        robust: whether readings are weighted.
    """

    def __init__(self, model: LinearSDE, robust: bool):
        self.model, self.robust, self.states = model, robust, model.state_size
        self.carried = 2 * (self.states + self.states**2 + 2 * gaussian.SCALES) + 2

    def start(self, means: np.ndarray, covariances: np.ndarray, times: np.ndarray) -> np.ndarray:
        """The numbers `(1, size)` of a series that starts at a time, NaN where at its first reading."""
        mean, covariance = torch.from_numpy(means), torch.from_numpy(covariances)
        first = Recursion.first(Gaussian(mean, covariance, None, mean.new_zeros(1)))
        return np.append(self._packed(first), times[:, None], axis=1)

    @torch.no_grad()
    def run(self, rows: Rows, state: np.ndarray, smooth: bool = False) -> tuple[Found, None]:
        """As `LinearKernel.run`, of one series. A gap over which the state overflows raises `ValueError`."""
        assert rows.observation is not None
        assert rows.noise is not None
        times, row, noise = rows.times[0], rows.observation[0, :, 0], rows.noise[..., 0]
        grid = ObservationGrid.of_numbers(times, rows.readings[0, :, 0], row, noise[..., 0])
        grid = grid.bounded() if self.robust else grid
        before = times[0] if np.isnan(state[0, -1]) else state[0, -1]
        lags, which = torch.unique(torch.from_numpy(np.diff(times, prepend=before))[None], return_inverse=True)
        transition, variance = (x[0] for x in discretize(self.model, lags))
        start = self._recursion(state)
        start = start._replace(state=start.state.predicted(transition[which[:, 0]], variance[which[:, 0]]))
        transitions = Transitions(transition, variance, which[:, 1:])
        if self.robust:
            passed, last = (robust_smoother if smooth else resumed_filter)(grid, transitions, start)
        else:
            passed = kalman_pass(grid, transitions, mapped(start.state, lambda x: x[:1]))
            last = start._replace(
                state=mapped(passed.states[-1].posterior, lambda x: x.repeat(2, *(1,) * (x.dim() - 1)))
            )
        state[...] = np.append(self._packed(last), rows.times[:, -1:], axis=1)
        before_rows = [passed.without_challengers(each.predicted) for each in passed.states]
        (mean, covariance), (predicted, spread) = (
            (x.numpy() for x in moments(states)) for states in (passed.estimates(smooth), before_rows)
        )
        across = ((spread @ row[..., None])[..., 0] * row).sum(-1, keepdims=True).clip(min=0.0)
        weight = np.where(np.isnan(rows.readings), np.nan, passed.weight[:1, :, None].numpy())
        predicted = (row * predicted).sum(-1, keepdims=True)
        unknown = np.full_like(rows.times, np.nan)
        return Found(mean, covariance, weight, across / noise, predicted, across + noise, unknown), None

    def _packed(self, recursion: Recursion) -> Float[np.ndarray, "1 carried"]:
        (mean, covariance, *_), scale, trusted, log_odds = recursion
        each = torch.cat([mean, covariance.flatten(1), *scale], dim=1)
        return torch.cat([*each.chunk(2), trusted[:, None], log_odds[:, None]], dim=1).numpy()

    def _recursion(self, numbers: np.ndarray) -> Recursion:
        n, carried = self.states, torch.from_numpy(numbers[:, : self.carried])
        each = torch.cat(carried[:, :-2].chunk(2, dim=1))
        mean, covariance, counts, last = each.split([n, n * n, gaussian.SCALES, gaussian.SCALES], dim=1)
        state = Gaussian(mean, covariance.unflatten(1, (n, n)), None, mean.new_zeros(2))
        return Recursion(state, NoiseScale(counts, last), carried[:, -2], carried[:, -1])


def moments(states: list[Gaussian]) -> tuple[Tensor, Tensor]:
    """Mean and covariance at each row, `(b, grid, n)` and `(b, grid, n, n)`."""
    mean = torch.stack([state.mean for state in states], dim=1)
    return mean, torch.stack([state.full_covariance() for state in states], dim=1)
