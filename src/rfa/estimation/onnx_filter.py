"""One step of a fitted filter as a graph of ONNX: what `RobustFilter.update` does, without this library.

The matrices of a gap are those of kernels/transitions.cpp: power series over a short lag h, which is doubled.

    Phi(h) = sum_k A^k h^k / k!,    V(h) = sum_k M_k h^(k+1) / (k+1)!,    M_0 = Q, M_k+1 = A M_k + M_k A^T
    V(2h) = V(h) + Phi(h) V(h) Phi(h)^T,    Phi(2h) = Phi(h)^2

The rest is recursive_filter.py for one series and one reading. The robust filter and its challenger are the two entries
of the first dimension, c; the Kalman filter is alone there.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from jaxtyping import Float
from onnx import TensorProto, helper
from onnx.parser import parse_graph

from .gaussian import (
    ABANDONED_LOG_ODDS,
    LARGEST_VARIANCE,
    MOST_LOG_ODDS_GAIN,
    NO_DIGITS,
    PERSISTENCE,
    PRIOR_LOG_ODDS,
    REJECTED,
    SAME_LOG_ODDS,
    SCALES,
)
from .linear_sde import LinearSDE
from .problem import LARGEST_VALUE
from .readings_problem import ReadingsProblem
from .series_estimate import OUTLIER_GAIN

OPSET = 18
IR_VERSION = 8  # runtimes from 2022 on read both
_NO_CHALLENGER = -1e300  # its log odds, in the place of -inf, which JSON does not have
_TERMS = 18  # of the power series: (2 |A| h)^18 / 18! < 1e-15 for |A| h <= 1/2
_LITTLE_LEFT = 1e8  # variance of a prediction over the noise, above which most digits of P go
_SHORT = 0.5  # |A| h
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


# Graphs of ONNX, written as arithmetic of their values


def _operator(kind: str) -> Callable[["Value", Any], "Value"]:
    """A method that adds a node of two values to their graph."""
    return lambda one, other: one.graph.add(kind, one, other)


class Value:
    """A tensor of a graph. Operators add nodes to the graph; numbers beside it become constants in float64."""

    def __init__(self, graph: "Graph", name: str):
        self.graph, self.name = graph, name

    __add__, __sub__, __mul__, __truediv__ = map(_operator, ("Add", "Sub", "Mul", "Div"))
    __matmul__, __lt__, __gt__, __and__, __or__ = map(_operator, ("MatMul", "Less", "Greater", "And", "Or"))

    def __neg__(self) -> "Value":
        return self("Neg")

    def __invert__(self) -> "Value":
        return self("Not")

    def __getitem__(self, index: "int | Value") -> "Value":
        """Along the first dimension."""
        return self("Gather", index if isinstance(index, Value) else np.array(index))

    def __call__(self, kind: str, *others: Any, **attributes: Any) -> Any:
        """An operator of this value and others by its name, such as "Sqrt"."""
        return self.graph.add(kind, self, *others, **attributes)

    @property
    def mT(self) -> "Value":
        """Each of several matrices transposed, `(c, n, m)`."""
        return self("Transpose", perm=[0, 2, 1])

    def widened(self, *axes: int) -> "Value":
        """With further dimensions of 1."""
        return self("Unsqueeze", np.array(axes))

    def reshape(self, *shape: int) -> "Value":
        """The same entries in another shape."""
        return self("Reshape", np.array(shape))

    def sum(self, axis: int = -1) -> "Value":
        """Along a dimension, which goes."""
        return self("ReduceSum", np.array([axis]), keepdims=0)

    def where(self, condition: "Value", other: Any) -> "Value":
        """Itself where a condition holds, something else elsewhere."""
        return self.graph.add("Where", condition, self, other)

    def split(self, *sizes: int) -> list["Value"]:
        """Parts along the last dimension."""
        return self("Split", np.array(sizes), axis=-1, outputs=len(sizes))


class Graph:
    """Nodes in the order in which they are added, with inputs, constants and outputs."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: list[Any] = []

    def input(self, name: str, *shape: int, kind: str = "DOUBLE") -> Value:
        """What is given at each run."""
        self._inputs.append(_value_info(name, shape, kind))
        return Value(self, name)

    def output(self, name: str, value: Value, *shape: int, kind: str = "DOUBLE") -> None:
        """What each run gives."""
        self._nodes.append(helper.make_node("Identity", [value.name], [name]))
        self._outputs.append(_value_info(name, shape, kind))

    def constant(self, value: Any, name: str = "") -> Value:
        """A tensor that stays. Numbers are float64, but in arrays of another kind."""
        array = value if isinstance(value, np.ndarray) else np.array(value, dtype=np.float64)
        name = name or f"constant.{len(self._constants)}"
        self._constants.append(onnx.numpy_helper.from_array(array, name))
        return Value(self, name)

    def add(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """A node: its value, or a list of several."""
        given = [(x if isinstance(x, Value) else self.constant(x)).name for x in inputs]
        names = [f"{kind}.{len(self._nodes)}.{k}" for k in range(outputs)]
        self._nodes.append(helper.make_node(kind, given, names, **attributes))
        values = [Value(self, name) for name in names]
        return values[0] if outputs == 1 else values

    def model(self, name: str, metadata: dict[str, str]) -> Any:
        """The checked model, a protobuf message."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._constants)
        opsets = [helper.make_opsetid("", OPSET)]
        found = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="rfa")
        helper.set_model_props(found, metadata)
        onnx.checker.check_model(found)
        return found


def _value_info(name: str, shape: tuple[int, ...], kind: str) -> Any:
    return helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape)


# The step of a filter


@dataclass(frozen=True)
class StepModel:
    """What a step is made of."""

    sde: LinearSDE
    shown: Sequence[float]  # C of the components' states
    sensor_noise: Float[np.ndarray, " sensors"]  # the variance of each sensor's errors
    regressors: int  # their coefficients are the last states
    robust: bool
    given: frozenset[str]  # which of "offset", "noise" and "observation" readings have


class _Reading(NamedTuple):
    """One reading. `known`: nothing that its mean needs is missing. `seen`: nor is its noise or its value."""

    row: Value  # C, `(n,)`
    noise: Value  # R
    offset: Value
    known: Value
    seen: Value
    whitened_row: Value  # C and the value without its offset, over sqrt(R), 0 unless seen
    whitened: Value


class _Filters(NamedTuple):
    """Filter and challenger, or the Kalman filter."""

    mean: Value  # (c, n)
    covariance: Value  # (c, n, n)
    counts: Any = None  # as `NoiseScale`, `(c, scales)` each. None: the Kalman filter
    last: Any = None


class _ReadingScale(NamedTuple):
    """As `ScalePosterior`."""

    weight: Value  # (c,)
    scatter: Value  # (c,)
    probability: Value  # (c, scales)
    evidence: Value  # (c,)
    valid: Value  # (c,)


def filter_model(
    problem: ReadingsProblem,
    sde: LinearSDE,
    shown: Sequence[float],
    robust: bool,
    start: Float[np.ndarray, "1 numbers"],
    last: Float[np.ndarray, "1 numbers"],
    metadata: dict[str, str],
) -> Any:
    """The model of ONNX of a fitted filter: its state before the first reading and after the last one, names and
    `metadata` are its metadata.
    """
    readings = problem.table.readings
    given = {name for name in ("offset", "noise") if np.any(getattr(readings, name) != 0)}
    given |= set() if readings.observation is None else {"observation"}
    noise, n = problem.sensor_noise[0].numpy(), sde.state_size
    model = StepModel(sde, shown, noise, len(readings.regressors), robust, frozenset(given))
    count = 2 * (n + n * n + 2 * SCALES) + 2 if robust else n + n * n
    named: dict[str, Any] = {"states": problem.names, "sensors": readings.sensors, "regressors": readings.regressors}
    named |= {
        name: np.maximum(x[0, :count], _NO_CHALLENGER).tolist() for name, x in (("start", start), ("state", last))
    }
    metadata = metadata | {name: json.dumps(x) for name, x in named.items()}
    return step_graph(model).model("robust filter" if robust else "Kalman filter", metadata)


def step_graph(model: StepModel) -> Graph:
    """The graph of a step. Its inputs and outputs are those that `RobustFilter.export` names."""
    graph, n, c = Graph(), model.sde.state_size, 1 + model.robust
    sizes = [n, n * n, SCALES, SCALES] if model.robust else [n, n * n]
    count = c * sum(sizes) + 2 * model.robust
    state, gap = graph.input("state", count), graph.input("gap")
    reading = _reading(graph, model)
    filters, contest = state.split(count - 2, 2) if model.robust else (state, state)
    mean, covariance, *scales = filters.reshape(c, sum(sizes)).split(*sizes)
    states = _Filters(mean, covariance.reshape(c, n, n), *scales)
    states = _prediction(states, *_transition_and_variance(graph, model.sde, gap))
    if model.robust:
        states, scale, contest = _with_challenger(graph, states, reading, contest, n)
    else:
        ones = graph.constant([1.0])
        scale = _ReadingScale(ones, ones - 1.0, ones, ones, ones > 2.0)
    expected = _variance(states, reading)
    states = _posterior(states, scale, reading, n)

    def of_reading(x: Value) -> Value:
        return x.where(reading.known, math.nan)

    weight, noise, own_mean = scale.weight[0], reading.noise, states.mean[0]
    gain_ratio = expected / (expected + noise / weight - noise)
    graph.output("mean", of_reading((reading.row * own_mean).sum() + reading.offset))
    graph.output("standard_error", of_reading(_variance(states, reading)("Sqrt")))
    graph.output("weight", weight.where(reading.seen, math.nan))
    graph.output("outlier", (gain_ratio < OUTLIER_GAIN) & reading.seen, kind="BOOL")
    graph.output("states", own_mean, n)
    diagonal = (states.covariance[0] * np.eye(n)).sum()
    graph.output("state_errors", diagonal("Clip", 0.0, math.inf)("Sqrt"), n)
    carried = [states.mean, states.covariance.reshape(c, n * n), states.counts, states.last][: len(sizes)]
    packed = graph.add("Concat", *carried, axis=1).reshape(c * sum(sizes))
    graph.output("new_state", graph.add("Concat", packed, contest, axis=0) if model.robust else packed, count)
    return graph


def _reading(graph: Graph, model: StepModel) -> _Reading:
    """What is given of a reading, in units of its noise too."""
    value, noise = graph.input("value"), graph.constant(model.sensor_noise, "sensor_noise")
    noise = noise[graph.input("sensor", kind="INT64") if len(model.sensor_noise) > 1 else 0]
    own = model.sde.state_size - model.regressors
    shown = "observation" in model.given
    parts = [graph.input("observation", own) if shown else graph.constant(np.array(model.shown), "observation_row")]
    parts += [graph.input("exog", model.regressors)] if model.regressors else []
    row = graph.add("Concat", *parts, axis=0)
    offset = graph.input("offset") if "offset" in model.given else graph.constant(0.0)
    known = ~(row.sum() + offset)("IsNaN")
    seen = known & ~value("IsNaN")
    if "noise" in model.given:
        more = graph.input("noise")
        seen, noise = seen & ~more("IsNaN"), noise + more.where(~more("IsNaN"), 0.0)
    row = row.where(~row("IsNaN"), 0.0)
    root = noise("Clip", np.finfo(float).tiny, math.inf)("Sqrt")
    whitened = ((value - offset) / root)("Clip", -LARGEST_VALUE, LARGEST_VALUE)
    return _Reading(row, noise, offset, known, seen, (row / root).where(seen, 0.0), whitened.where(seen, 0.0))


def _transition_and_variance(graph: Graph, sde: LinearSDE, gap: Value) -> tuple[Value, Value]:
    """Phi and V of a gap, `(n, n)`, by the groups of states that A or Q joins, each padded to s states."""
    dynamics, diffusion = sde.dynamics.numpy(), sde.diffusion.numpy()
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
    phi, variance = (x[graph.constant(place)] for x in flat)
    return phi, variance


def _symmetric(x: Value) -> Value:
    return (x + x.mT) * 0.5


def _prediction(states: _Filters, transition: Value, variance: Value) -> _Filters:
    """Over a gap."""
    transposed = transition.widened(0).mT[0]
    covariance = _symmetric(transition @ states.covariance @ transposed + variance)
    return states._replace(mean=states.mean @ transposed, covariance=covariance)


def _innovation(states: _Filters, reading: _Reading) -> tuple[Value, Value, Value]:
    """Of the reading in units of its noise: the innovation `(c,)`, `P H^T` `(c, n)`, and its variance `(c,)`."""
    row = reading.whitened_row
    across = states.covariance @ row
    return reading.whitened - states.mean @ row, across, across @ row


def _variance(states: _Filters, reading: _Reading) -> Value:
    """Of the reading by the filter, with its noise."""
    return ((states.covariance[0] @ reading.row) * reading.row).sum()("Clip", 0.0, math.inf) + reading.noise


def _reading_scale(graph: Graph, states: _Filters, reading: _Reading) -> _ReadingScale:
    """The scale of the reading's noise, as `infer_scale`."""
    innovation, _, variance = _innovation(states, reading)
    valid = reading.seen & ~((innovation + variance) * 0.0)("IsNaN")
    variance = variance.where(variance > -1.0, -variance)  # by rounding
    learned = states.counts / states.counts.sum().widened(-1)
    prior = learned * (1 - PERSISTENCE) + states.last * PERSISTENCE
    square = innovation * innovation
    above = square.widened(-1) * np.eye(SCALES)[-1]  # so that no reading lies above all scales
    scale = graph.add("Max", above, 10.0 ** (np.arange(SCALES) / 2))
    total = variance.widened(-1) + scale
    exponent = square.widened(-1) / total * -0.5
    most = graph.add("ReduceMax", exponent, np.array([-1]), keepdims=1)
    density = prior * (exponent - most)("Exp") / total("Sqrt")
    evidence = most.reshape(2) + density.sum()("Log")
    probability = density / density.sum().widened(-1)
    bounded = variance("Clip", -math.inf, LARGEST_VARIANCE)
    ratio = probability / (bounded.widened(-1) + scale)
    weight = ratio.sum() / (ratio * scale).sum()
    correction = innovation.widened(-1) / total
    deviation = correction - (probability * correction).sum().widened(-1)
    reduction = (bounded / variance).where(variance > LARGEST_VARIANCE, 1.0)
    scatter = (probability * deviation * deviation).sum() * reduction * reduction
    return _ReadingScale(
        weight.where(valid, 1.0), scatter.where(valid, 0.0), probability, evidence.where(valid, 0.0), valid
    )


def _with_challenger(
    graph: Graph, states: _Filters, reading: _Reading, contest: Value, n: int
) -> tuple[_Filters, _ReadingScale, Value]:
    """Filter and challenger before the reading is used, where the challenger takes over or a new one starts.

    `contest`: how many readings the challenger will still use with weight 1, and its log odds.
    """
    trusted, log_odds = contest.split(1, 1)
    scale, one, no = _reading_scale(graph, states, reading), np.array([1]), np.array([False])
    believed = graph.add("Concat", graph.constant(no), trusted > 0.0, axis=0) & (scale.weight < REJECTED)
    trusting = ~believed
    scale = scale._replace(weight=scale.weight.where(trusting, 1.0), scatter=scale.scatter.where(trusting, 0.0))
    valid = scale.valid[0] & scale.valid[1]
    change = (scale.evidence[1] - scale.evidence[0]).where(valid, 0.0)
    same = valid & (change("Abs") < SAME_LOG_ODDS)
    log_odds = log_odds + change("Clip", -math.inf, MOST_LOG_ODDS_GAIN)
    replaced = log_odds > 0.0
    ended = replaced | ~(log_odds > ABANDONED_LOG_ODDS)
    first = replaced("Cast", to=TensorProto.INT64)
    rejected = (scale.valid & (scale.weight < REJECTED))[first]
    started = (ended | same) & rejected
    origin = graph.add("Concat", first, first.where(started, one), axis=0)
    states, scale = _Filters(*(x[origin] for x in states)), _ReadingScale(*(x[origin] for x in scale))
    new = graph.add("Concat", graph.constant(no), started, axis=0)
    cleared = new & (_misfit(states, reading) > NO_DIGITS)  # the reading would lose its digits beside the mean
    states = states._replace(mean=states.mean.where(~cleared.widened(-1), 0.0))
    inflation = _misfit(states, reading).where(new, 1.0)
    states = states._replace(covariance=states.covariance * inflation.widened(1, 2))
    old = ~new
    weight, scatter = scale.weight.where(old, 1.0), scale.scatter.where(old, 0.0)
    scale = scale._replace(weight=weight, scatter=scatter, valid=scale.valid & old)
    none, unused = graph.constant([_NO_CHALLENGER]), valid("Cast", to=TensorProto.DOUBLE)
    log_odds = graph.constant([PRIOR_LOG_ODDS]).where(started, none.where(ended, log_odds))
    trusted = graph.constant([2.0 * (n - 1)]).where(started, (trusted - unused)("Clip", 0.0, math.inf))
    return states, scale, graph.add("Concat", trusted, log_odds, axis=0)


def _misfit(states: _Filters, reading: _Reading) -> Value:
    """The factor, at least 1, by which a covariance must grow to expect the reading."""
    innovation, _, variance = _innovation(states, reading)
    distance = innovation * innovation / (variance + 1.0)
    return distance.where(distance > 1.0, 1.0)  # NaN too


def _posterior(states: _Filters, scale: _ReadingScale, reading: _Reading, n: int) -> _Filters:
    """After the reading with its weight."""
    innovation, across, variance = _innovation(states, reading)
    root, certainty = scale.weight("Sqrt").widened(-1), variance * scale.weight
    row, spread = root * reading.whitened_row, across * root
    gain = spread / (certainty + 1.0).widened(-1)
    mean = states.mean + gain * root * innovation.widened(-1)
    # Joseph's form, as kernels/gaussian.h has it: other orders of the same sums lose the digits of a diffuse start
    little = (certainty > _LITTLE_LEFT).widened(-1)
    kept = -(gain.widened(-1) * row.widened(1)) + np.eye(n)
    reduced = states.covariance - gain.widened(-1) * spread.widened(1)
    reduced = (kept @ states.covariance @ kept.mT).where(little.widened(-1), reduced)
    rest = gain - (reduced @ row.widened(-1)).sum().where(~little, 0.0)
    covariance = _symmetric(reduced + rest.widened(-1) * gain.widened(1))
    covariance = covariance + across.widened(-1) * scale.scatter.widened(1, 2) * across.widened(1)
    found = states._replace(mean=mean, covariance=covariance)
    if states.counts is None:
        return found
    valid = scale.valid.widened(-1)
    counts = states.counts + scale.probability.where(valid, 0.0)
    return found._replace(counts=counts, last=scale.probability.where(valid, states.last))
