"""One step of a fitted filter as a graph of ONNX: what `RobustFilter.update` does, without this library.

The matrices of a gap are those of kernels/transitions.cpp: power series over a short lag h, which is doubled.

    Phi(h) = sum_k A^k h^k / k!,    V(h) = sum_k M_k h^(k+1) / (k+1)!,    M_0 = Q, M_k+1 = A M_k + M_k A^T
    V(2h) = V(h) + Phi(h) V(h) Phi(h)^T,    Phi(2h) = Phi(h)^2

A discrete model goes on step by step. The rest is recursive_filter.py for one series and one row. The robust filter and
its challenger are the two entries of the first dimension, c; the Kalman filter is alone there.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from onnx import TensorProto
from onnx.parser import parse_graph

from . import gaussian
from .linear_model import LinearKernel
from .linear_sde import LinearSDE
from .onnx_graph import Graph, Value
from .problem import LARGEST_VALUE
from .readings_problem import ReadingsKernel, ReadingsProblem
from .series_estimate import OUTLIER_GAIN

_NO_CHALLENGER = -1e300  # its log odds, in the place of -inf, which JSON does not have
_TERMS = 18  # of the power series: (2 |A| h)^18 / 18! < 1e-15 for |A| h <= 1/2
_LITTLE_LEFT = 1e8  # variance of a prediction over the noise, above which most digits of P go
_SHORT = 0.5  # |A| h
_TRUE = np.array(True)
_MOST_DOUBLINGS = 2100.0  # of any lag in float64
_DOUBLED = """
doubled (int64 count, bool go, double[g, s, s] phi, double[g, s, s] variance, int64[g, 1, 1] doublings)
    => (bool go_on, double[g, s, s] next_phi, double[g, s, s] next_variance, int64[g, 1, 1] same) {
  go_on = Identity(go)
  same = Identity(doublings)
  longer = Less(count, doublings)
  product = MatMul(phi, variance)
  transposed = Transpose<perm = [0, 2, 1]>(phi)
  moved = MatMul(product, transposed)
  gained = Add(variance, moved)
  next_variance = Where(longer, gained, variance)
  squared = MatMul(phi, phi)
  next_phi = Where(longer, squared, phi)
}
"""
_STEPPED = """
stepped (int64 count, bool go, double[n, n] phi, double[n, n] variance)
    => (bool go_on, double[n, n] next_phi, double[n, n] next_variance) {
  go_on = Identity(go)
  next_phi = MatMul(one_step, phi)
  product = MatMul(one_step, variance)
  transposed = Transpose<perm = [1, 0]>(one_step)
  moved = MatMul(product, transposed)
  next_variance = Add(moved, one_noise)
}
"""


# The step of a filter


class _Reading(NamedTuple):
    """A reading of a sensor, or a component of it that has its own weight: of m components."""

    rows: Value  # C, `(m, n)`
    noise: Value  # R, `(m, m)`
    offset: Any
    known: Any  # `(m,)`. Nothing that its mean needs is missing
    seen: Value  # `(m,)`. Nor is its noise or its value
    whitened_rows: Value  # L^-1 C, and L^-1 of the value without its offset, where R = L L^T: 0 unless seen
    whitened: Value
    present: Value  # `(m,)`: 1 where a component that is seen shows a state, 0 elsewhere
    identity: np.ndarray  # `(m, m)`


@dataclass(frozen=True)
class StepModel:
    """What a step is made of."""

    dynamics: Float[np.ndarray, "n n"]  # A, Q and B; of a discrete model F, Q and B of a step
    diffusion: Float[np.ndarray, "n n"]
    control: Float[np.ndarray, "n inputs"]
    discrete: bool
    robust: bool
    sizes: Sequence[int]  # of the readings that have a weight each
    readings: Callable[[Graph], list[_Reading]]  # adds their inputs
    single: bool = False  # a reading is a number, no vector


class _Filters(NamedTuple):
    """Filter and challenger, or the Kalman filter."""

    mean: Value  # (c, n)
    covariance: Value  # (c, n, n)
    scales: Any = None  # (c, readings, 2, scales): counts and last, as `NoiseScale`. None: the Kalman filter

    def known(self, channel: np.ndarray) -> Value:
        """Of one reading's scales, `(c, 2, scales)`."""
        return self.scales.where(self.scales.graph.constant(channel), 0.0).sum(1)


class _ReadingScale(NamedTuple):
    """As `ScalePosterior`."""

    weight: Value  # (c,)
    spread: Value  # (c,): the mean variance of the prediction, in units of the noise
    scatter: Value  # (c, m, m)
    probability: Value  # (c, scales)
    evidence: Value  # (c,)
    valid: Value  # (c,)


def series_step(
    problem: ReadingsProblem,
    sde: LinearSDE,
    shown: Sequence[float],
    kernel: ReadingsKernel,
    start: Float[np.ndarray, " numbers"],
    last: Float[np.ndarray, " numbers"],
) -> tuple[StepModel, dict[str, Any]]:
    """The step of a fitted series. And what its file says: names, and the states before and after all readings."""
    readings = problem.table.readings
    given = {name for name in ("offset", "noise") if np.any(getattr(readings, name) != 0)}
    given |= set() if readings.observation is None else {"observation"}
    noises, regressors = problem.sensor_noise[0].numpy(), len(readings.regressors)

    def inputs(graph: Graph) -> list[_Reading]:
        return [_series_reading(graph, shown, noises, regressors, given)]

    matrices = sde.dynamics.numpy(), sde.diffusion.numpy(), np.zeros((kernel.states, 0))
    known: dict[str, Any] = {"states": problem.names, "sensors": readings.sensors, "regressors": readings.regressors}
    return StepModel(*matrices, False, kernel.robust, [1], inputs, single=True), known | _carried(kernel, start, last)


def matrices_step(kernel: LinearKernel, start: np.ndarray | None, last: np.ndarray) -> tuple[StepModel, dict[str, Any]]:
    """The same of a model's matrices. `start` and `last` are what the compiled filter carries."""
    n, blocks, sizes = kernel.states, kernel.blocks, kernel.sizes.tolist()
    known: dict[str, Any] = {"states": kernel.names, "sensors": dict(zip(kernel.sensors, sizes, strict=True))}
    if kernel.by_component:
        blocks, sizes = [*kernel.noise[:, None, None]], [1] * len(kernel.noise)
    given = list(zip(np.split(kernel.observation, np.cumsum(sizes)[:-1]), blocks, strict=True))

    def inputs(graph: Graph) -> list[_Reading]:
        values = graph.input("reading", sum(sizes)).split(*sizes)
        parts = [(z, graph.constant(c), graph.constant(r), len(c)) for z, (c, r) in zip(values, given, strict=True)]
        return [_reading(*part, n) for part in parts]

    matrices = kernel.dynamics, kernel.diffusion, kernel.control
    return StepModel(*matrices, kernel.step > 0, kernel.robust, sizes, inputs), known | _carried(kernel, start, last)


def _carried(kernel: ReadingsKernel, start: np.ndarray | None, last: np.ndarray) -> dict[str, np.ndarray]:
    """What a step needs of the states before and after all readings, by its name in the file."""
    count = kernel.carried if kernel.robust else kernel.states + kernel.states**2
    return {name: x[:count] for name, x in (("start", start), ("state", last)) if x is not None}


def step_file(step: StepModel, known: dict[str, Any]) -> bytes:
    """The file of a step. Its metadata are texts, and anything else as JSON."""
    plain = {name: x.clip(_NO_CHALLENGER).tolist() if isinstance(x, np.ndarray) else x for name, x in known.items()}
    metadata = {name: x if isinstance(x, str) else json.dumps(x) for name, x in plain.items()}
    found = step_graph(step).model("robust filter" if step.robust else "Kalman filter", metadata)
    return bytes(found.SerializeToString())


def step_graph(model: StepModel) -> Graph:
    """The graph of a step. Its inputs and outputs are those that `RobustFilter.export` names."""
    graph, n, c, channels = Graph(), len(model.dynamics), 1 + model.robust, len(model.sizes)
    sizes = [n, n * n, channels * 2 * gaussian.SCALES][: 2 + model.robust]
    count = c * sum(sizes) + 2 * model.robust
    state = graph.input("state", count)
    moves = _moves(graph, model)
    readings = model.readings(graph)
    filters, contest = state.split(count - 2, 2) if model.robust else (state, state)
    mean, covariance, *scales = filters.reshape(c, sum(sizes)).split(*sizes)
    scales = [x.reshape(c, channels, 2, gaussian.SCALES) for x in scales]
    states = _prediction(_Filters(mean, covariance.reshape(c, n, n), *scales), *moves)
    trusting = 2.0 * (-(-n // max(model.sizes)) - 1)
    found: dict[str, list[Value]] = {name: [] for name in ("mean", "standard_error", "weight", "outlier")}
    for channel, reading in zip(np.eye(channels, dtype=bool)[..., None, None], readings, strict=True):
        if model.robust:
            states, scale, contest = _with_challenger(graph, states, reading, channel, contest, trusting)
        else:
            one, zero = graph.constant([1.0]), graph.constant([0.0])
            scale = _ReadingScale(one, zero, zero, zero, zero, zero > one)
        seen, weight, spread = reading.seen("Cast", to=TensorProto.DOUBLE).sum() > 0.0, scale.weight[0], scale.spread[0]
        outlier = ((spread + 1.0) / (spread + weight("Reciprocal")) < OUTLIER_GAIN) & seen
        found["weight"].append(weight.where(seen, math.nan).reshape(1))
        found["outlier"].append(outlier.reshape(1))
        states = _posterior(states, scale, reading, channel, n)
    mean, covariance = states.mean[0], states.covariance[0]
    for x in readings:
        variance = ((x.rows @ covariance) * x.rows).sum()("Clip", 0.0, math.inf) + (x.noise * x.identity).sum()
        found["mean"].append((x.rows @ mean + x.offset).where(x.known, math.nan))
        found["standard_error"].append(variance("Sqrt").where(x.known, math.nan))
    for name, parts in found.items():
        width = () if model.single else (channels if name in ("weight", "outlier") else sum(model.sizes),)
        kind = "BOOL" if name == "outlier" else "DOUBLE"
        graph.output(name, graph.add("Concat", *parts, axis=0).reshape(*width), *width, kind=kind)
    graph.output("states", mean, n)
    graph.output("state_errors", (covariance * np.eye(n)).sum()("Clip", 0.0, math.inf)("Sqrt"), n)
    carried = [x.reshape(c, size) for x, size in zip(states, sizes, strict=False)]
    packed = graph.add("Concat", *carried, axis=1).reshape(c * sum(sizes))
    graph.output("new_state", graph.add("Concat", packed, contest, axis=0) if model.robust else packed, count)
    return graph


def _series_reading(
    graph: Graph, shown: Sequence[float], noises: np.ndarray, regressors: int, given: set[str]
) -> _Reading:
    """What is given of a reading of a series."""
    value, noise = graph.input("value").reshape(1), graph.constant(noises, "sensor_noise")
    noise = noise[graph.input("sensor", kind="INT64") if len(noises) > 1 else 0]
    own = graph.input("observation", len(shown)) if "observation" in given else graph.constant(np.array(shown))
    row = graph.add("Concat", own, graph.input("exog", regressors), axis=0) if regressors else own
    offset = graph.input("offset") if "offset" in given else graph.constant(0.0)
    known = usable = ~(row.sum() + offset)("IsNaN").reshape(1)
    if "noise" in given:
        more = graph.input("noise")
        usable, noise = known & ~more("IsNaN"), noise + more.where(~more("IsNaN"), 0.0)
    row, noise = row.where(~row("IsNaN"), 0.0), noise("Clip", np.finfo(float).tiny, math.inf)
    size = len(shown) + regressors
    return _reading(value, row.widened(0), noise.reshape(1, 1), 1, size, offset, known, usable)


def _reading(
    value: Value, rows: Value, noise: Value, m: int, n: int, offset: Any = 0.0, known: Any = _TRUE, usable: Any = _TRUE
) -> _Reading:
    """A reading, in units of its noise too. A missing component has a row of zeros, and noise of its own."""
    seen, identity = ~value("IsNaN") & usable, np.eye(m)
    parts = noise.where(seen.widened(0) & seen.widened(1), identity), rows.where(seen.widened(1), 0.0)
    table = value.graph.add("Concat", *parts, (value - offset).where(seen, 0.0).widened(1), axis=1)
    _, whitened_rows, whitened = _factored(table, m).split(m, n, 1)
    whitened = whitened.reshape(m)("Clip", -LARGEST_VALUE, LARGEST_VALUE)
    present = (whitened_rows("Abs").sum() > 0.0)("Cast", to=TensorProto.DOUBLE)
    return _Reading(rows, noise, offset, known, seen, whitened_rows, whitened, present, identity)


def _factored(table: Value, m: int) -> Value:
    """`[L^T, L^-1 B]` of `[R, B]`, `(..., m, m + k)`, where R = L L^T: NaN unless R is positive definite."""
    rows = list[Value]()
    for k in range(m):
        row, column = (table("Gather", np.array([k]), axis=axis) for axis in (-2, -1))
        root = row("Gather", np.array([k]), axis=-1)("Sqrt")
        rows.append(row / root)
        table = table - column / root * rows[-1]
    return table.graph.add("Concat", *rows, axis=-2)


def _moves(graph: Graph, model: StepModel) -> tuple[Value, ...]:
    """Phi and V, and what the input adds: of [x, u] with A = [[A, B], [0, 0]]."""
    n, inputs = model.control.shape
    dynamics, diffusion = (np.zeros((n + inputs, n + inputs)) for _ in range(2))
    dynamics[:n, :n], dynamics[:n, n:], diffusion[:n, :n] = model.dynamics, model.control, model.diffusion
    if model.discrete:
        dynamics[n:, n:] = np.eye(inputs)
        graph.constant(dynamics, "one_step")
        graph.constant(diffusion, "one_noise")
        given = graph.input("steps", kind="INT64"), np.array(True), np.eye(n + inputs), np.zeros_like(dynamics)
        found = graph.add("Loop", *given, outputs=2, body=parse_graph(_STEPPED))
    else:
        found = _transition_and_variance(graph, dynamics, diffusion, graph.input("gap"))
    if not inputs:
        return tuple(found)
    (transition, by_input), (variance, _) = (x[graph.constant(np.arange(n))].split(n, inputs) for x in found)
    return transition, variance, by_input @ graph.input("control", inputs)


def _transition_and_variance(graph: Graph, dynamics: np.ndarray, diffusion: np.ndarray, gap: Value) -> list[Value]:
    """Phi and V of a gap, `(n, n)`, by the groups of states that A or Q joins, each padded to s states."""
    n = len(dynamics)
    joined = (dynamics != 0) | (diffusion != 0) | np.eye(n, dtype=bool)
    joined |= joined.T
    for _ in range(n.bit_length()):
        joined = joined @ joined
    groups = [list(group) for group in sorted({tuple(np.flatnonzero(row)) for row in joined})]
    g, s = len(groups), max(map(len, groups))
    place = np.full((n, n), g * s * s)  # of each entry among those of all groups, followed by a 0
    terms, moments, norms = np.zeros((_TERMS + 1, g, s, s)), np.zeros((_TERMS + 1, g, s, s)), np.ones(g)
    for k, group in enumerate(groups):
        size, within = len(group), np.ix_(group, group)
        place[within] = k * s * s + np.arange(s * s).reshape(s, s)[:size, :size]
        norms[k] = np.abs(dynamics[within]).sum(0).max() or 1.0
        a, power, moment = dynamics[within] / norms[k], np.eye(size), diffusion[within] / norms[k]
        for order in range(_TERMS + 1):
            terms[order, k, :size, :size] = power / math.factorial(order)
            moments[order, k, :size, :size] = moment / math.factorial(order + 1)
            power, moment = a @ power, a @ moment + moment @ a.T
    whole = gap * graph.constant(norms, "norms")  # |A| dt
    doublings = ((whole("Abs") / _SHORT)("Log") / math.log(2))("Ceil")("Clip", 0.0, _MOST_DOUBLINGS)
    short = whole / graph.add("Pow", graph.constant(2.0), doublings)
    powers = graph.add("Pow", short, np.arange(_TERMS + 1.0)[:, None])  # (terms, g)
    phi = (powers.widened(2, 3) * graph.constant(terms, "transition_terms")).sum(0)
    variance = ((powers * short).widened(2, 3) * graph.constant(moments, "variance_terms")).sum(0)
    count = doublings("Cast", to=TensorProto.INT64)  # of each group: more than it needs would cost digits
    most, go, body = graph.add("ReduceMax", count, keepdims=0), np.array(True), parse_graph(_DOUBLED)
    phi, variance, _ = graph.add("Loop", most, go, phi, variance, count.widened(1, 2), outputs=3, body=body)
    flat = (graph.add("Concat", x.reshape(g * s * s), np.zeros(1), axis=0) for x in (phi, variance))
    return [x[graph.constant(place)] for x in flat]


def _symmetric(x: Value) -> Value:
    return (x + x.mT) * 0.5


def _prediction(states: _Filters, transition: Value, variance: Value, moved: Any = 0.0) -> _Filters:
    """Over a gap."""
    transposed = transition("Transpose", perm=[1, 0])
    covariance = _symmetric(transition @ states.covariance @ transposed + variance)
    return states._replace(mean=states.mean @ transposed + moved, covariance=covariance)


def _innovation(states: _Filters, reading: _Reading) -> tuple[Value, Value, Value]:
    """Of the reading in units of its noise: innovation `(c, m)`, `H P` `(c, m, n)`, variance `(c, m, m)`."""
    transposed = reading.whitened_rows("Transpose", perm=[1, 0])
    across = reading.whitened_rows @ states.covariance
    return reading.whitened - states.mean @ transposed, across, across @ transposed


def _reading_scale(graph: Graph, states: _Filters, reading: _Reading, channel: np.ndarray) -> _ReadingScale:
    """The scale of the reading's noise, as `infer_scale`."""
    innovation, _, variance = _innovation(states, reading)
    identity, m = reading.identity, len(reading.identity)
    finite = ~((innovation * 0.0).sum() + (variance * 0.0).sum().sum())("IsNaN")
    valid = (reading.present.sum() > 0.0) & finite
    diagonal = (variance * identity)("Abs")
    rounded = _factored(variance + identity, m).sum().sum()("IsNaN")  # not positive definite, by rounding
    variance = diagonal.where(rounded.widened(1, 2), variance)
    counts, last = (states.known(channel)("Gather", np.array(k), axis=1) for k in (0, 1))
    prior = counts / counts.sum().widened(-1) * (1 - gaussian.PERSISTENCE) + last * gaussian.PERSISTENCE
    observed = reading.present.sum()("Clip", 1.0, math.inf)
    square = (innovation * innovation).sum() / observed
    above = square.widened(-1) * np.eye(gaussian.SCALES)[-1]  # so that no reading lies above all scales
    scale = graph.add("Max", above, 10.0 ** (np.arange(gaussian.SCALES) / 2))
    each = reading.present * identity
    matrix = variance.widened(1) + scale.widened(2, 3) * each + (-each + identity)
    errors = innovation.widened(1, 3) + np.zeros((gaussian.SCALES, 1, 1))
    identities = np.tile(identity, (2, gaussian.SCALES, 1, 1))
    table = graph.add("Concat", matrix, errors, identities, axis=-1)
    factor, error, inverse = _factored(table, m).split(m, 1, m)
    correction = (inverse * error).sum(-2)  # (c, scales, m)
    log_density = (error * error).sum().sum() * -0.5 - (factor * identity).sum()("Log").sum()
    most = graph.add("ReduceMax", log_density, np.array([-1]), keepdims=1)
    density = prior * (log_density - most)("Exp")
    evidence = most.reshape(2) + density.sum()("Log")
    probability = density / density.sum().widened(-1)
    spread = (variance * identity).sum().sum() / observed
    bounded = spread("Clip", -math.inf, gaussian.LARGEST_VARIANCE)
    ratio = probability / (bounded.widened(-1) + scale)
    weight = ratio.sum() / (ratio * scale).sum()
    deviation = correction - (probability.widened(-1) * correction).sum(1).widened(1)
    reduction = (bounded / spread).where(spread > gaussian.LARGEST_VARIANCE, 1.0)
    scatter = (probability.widened(-1) * deviation).mT @ deviation * (reduction * reduction).widened(1, 2)
    return _ReadingScale(
        weight.where(valid, 1.0), spread.where(valid, 0.0), scatter.where(valid.widened(1, 2), 0.0), probability,
        evidence.where(valid, 0.0), valid,
    )  # fmt: skip


def _with_challenger(
    graph: Graph, states: _Filters, reading: _Reading, channel: np.ndarray, contest: Value, trusting: float
) -> tuple[_Filters, _ReadingScale, Value]:
    """Filter and challenger before the reading is used, where the challenger takes over or a new one starts.

    `contest`: how many readings the challenger will still use with weight 1, at first `trusting`, and its log odds.
    """
    trusted, log_odds = contest.split(1, 1)
    scale, one, no = _reading_scale(graph, states, reading, channel), np.array([1]), np.array([False])
    believed = graph.add("Concat", graph.constant(no), trusted > 0.0, axis=0) & (scale.weight < gaussian.REJECTED)
    scale = _full_weight(scale, believed)
    valid = scale.valid[0] & scale.valid[1]
    change = (scale.evidence[1] - scale.evidence[0]).where(valid, 0.0)
    same = valid & (change("Abs") < gaussian.SAME_LOG_ODDS)
    log_odds = log_odds + change("Clip", -math.inf, gaussian.MOST_LOG_ODDS_GAIN)
    replaced = log_odds > 0.0
    ended = replaced | ~(log_odds > gaussian.ABANDONED_LOG_ODDS)
    first = replaced("Cast", to=TensorProto.INT64)
    rejected = (scale.valid & (scale.weight < gaussian.REJECTED))[first]
    started = (ended | same) & rejected
    origin = graph.add("Concat", first, first.where(started, one), axis=0)
    states, scale = _Filters(*(x[origin] for x in states)), _ReadingScale(*(x[origin] for x in scale))
    new = graph.add("Concat", graph.constant(no), started, axis=0)
    cleared = new & (_misfit(states, reading) > gaussian.NO_DIGITS)  # the reading would lose its digits beside the mean
    states = states._replace(mean=states.mean.where(~cleared.widened(-1), 0.0))
    inflation = _misfit(states, reading).where(new, 1.0)
    states = states._replace(covariance=states.covariance * inflation.widened(1, 2))
    scale = _full_weight(scale, new)
    scale = scale._replace(valid=scale.valid & ~new)
    none, unused = graph.constant([_NO_CHALLENGER]), valid("Cast", to=TensorProto.DOUBLE)
    log_odds = graph.constant([gaussian.PRIOR_LOG_ODDS]).where(started, none.where(ended, log_odds))
    trusted = graph.constant([trusting]).where(started, (trusted - unused)("Clip", 0.0, math.inf))
    return states, scale, graph.add("Concat", trusted, log_odds, axis=0)


def _full_weight(scale: _ReadingScale, trusting: Value) -> _ReadingScale:
    """Weight 1 where a filter trusts the reading."""
    weight, scatter = scale.weight.where(~trusting, 1.0), scale.scatter.where(~trusting.widened(1, 2), 0.0)
    return scale._replace(weight=weight, scatter=scatter)


def _misfit(states: _Filters, reading: _Reading) -> Value:
    """The factor, at least 1, by which a covariance must grow to expect the reading."""
    innovation, _, variance = _innovation(states, reading)
    m, observed = len(reading.identity), reading.present.sum()("Clip", 1.0, math.inf)
    table = variance.graph.add("Concat", variance + reading.identity, innovation.widened(-1), axis=-1)
    _, error = _factored(table, m).split(m, 1)
    distance = (error * error).sum().sum() / observed
    return distance.where(distance > 1.0, 1.0)  # NaN too


def _posterior(states: _Filters, scale: _ReadingScale, reading: _Reading, channel: np.ndarray, n: int) -> _Filters:
    """After the reading with its weight, one component after another."""
    _, across, _ = _innovation(states, reading)
    root, (mean, covariance, scales) = scale.weight("Sqrt").widened(-1), states
    for k in range(len(reading.identity)):
        row = root * reading.whitened_rows[k]
        spread = (covariance @ row.widened(-1)).sum()
        certainty = (row * spread).sum()
        gain = spread / (certainty + 1.0).widened(-1)
        error = root * reading.whitened[k] - (row * mean).sum().widened(-1)
        mean = mean + gain * error
        # Joseph's form, as kernels/gaussian.h has it: other orders of the same sums lose the digits of a diffuse start
        little = (certainty > _LITTLE_LEFT).widened(-1)
        kept = -(gain.widened(-1) * row.widened(1)) + np.eye(n)
        reduced = covariance - gain.widened(-1) * spread.widened(1)
        reduced = (kept @ covariance @ kept.mT).where(little.widened(-1), reduced)
        rest = gain - (reduced @ row.widened(-1)).sum().where(~little, 0.0)
        covariance = _symmetric(reduced + rest.widened(-1) * gain.widened(1))
    if scales is None:
        return _Filters(mean, covariance)
    covariance = covariance + across.mT @ scale.scatter @ across
    following = states.known(channel) * np.array([[1.0], [0.0]]) + scale.probability.widened(1)
    valid = scale.valid.widened(1, 2, 3) & scales.graph.constant(channel)
    return _Filters(mean, covariance, following.widened(1).where(valid, scales))
