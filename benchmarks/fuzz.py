"""Random calls of the operator, every backend against float64: `python benchmarks/fuzz.py --cases 10000`.

A seed draws shapes, dtypes, times, masks, segments, options, parameters over many orders of magnitude and extreme
states, and once in eight a state that is no number. Outputs, log precision and all gradients are held against the
oracle below, which shares no line with `rfa`. The rule, for the mean and for the largest error of each:

    error <= 2 (of a gradient 3) * error of the dense reference in the same dtype + FLOOR * floor

The floor is what rounding every intermediate number of the oracle once does to the same result: states in the frame,
E, Sigma, r, scores and weights, and the gradients that come back to each of them; the larger one of DRAWS draws, which
the dense reference itself must keep to. Triton rounds states, weights and gradients to half precision where the states
are, once more than the reference, and so does its floor.

Exit status 1 where a case is at fault; `--only SEED` runs one case again and prints its arguments.
"""

import argparse
import collections
import functools
import math
import os
import sys
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before torch imports triton

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from rfa.ops import robust_filter_attention

DRAWS = 3
NOTHING = 1e-11  # of cotangents of order one: what is left where a gradient vanishes
FLOOR = 12  # a number is rounded several times, and the largest of a thousand errors is four standard deviations
TINY = torch.finfo(torch.float32).tiny  # what noises of zero come to, in float64 too
LEAST_OF_EXPONENTIAL = TINY**0.625  # the least Sigma~ whose scores float32 holds
STATES = ("query", "key", "value")
STEEPEST = 1e30  # of the gradients of pairs: beyond it float32 overflows on the way to those of inputs
SINGLE = torch.finfo(torch.float32).eps
PARAMETERS = ("process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")


class Chance:
    """Draws from one generator."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def below(self, n: int) -> int:
        """A whole number below n."""
        return int(torch.randint(n, (), generator=self.generator))

    def once_in(self, n: int) -> bool:
        """True once in n times."""
        return self.below(n) == 0

    def choice(self, *of: Any) -> Any:
        """One of them."""
        return of[self.below(len(of))]

    def normal(self, *shape: int) -> Tensor:
        """Of mean 0 and variance 1."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Between the two."""
        return low + (high - low) * torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def magnitude(self, low: float, high: float, *shape: int, zeros: int = 6) -> Tensor:
        """As many small numbers as large ones, between 10^low and 10^high, and 0 once in `zeros`."""
        drawn = 10.0 ** self.uniform(low, high, *shape)
        return drawn.masked_fill(self.uniform(0, zeros, *shape) < 1, 0.0)


class Case(NamedTuple):
    """Arguments of one call."""

    inputs: dict[str, Tensor]  # states in their dtype, parameters in float32, times
    options: dict[str, Any]
    learned: list[str]  # names whose gradients are asked for
    poison: tuple[str, tuple[int, ...], float] | None  # a state, the place of one number, what stands there


def draw(seed: int, for_triton: bool = False) -> Case:
    """The case of a seed; for Triton's interpreter, which is slow, with few pairs and head sizes that it takes."""
    chance = Chance(seed)
    batch, heads = chance.choice(1, 1, 2, 3), chance.choice(1, 1, 2, 3)
    keys = chance.choice(
        0, 1, 2, 3 + chance.below(10), 3 + chance.below(10), 1 + chance.below(40), 97 + chance.below(60)
    )
    if for_triton:
        batch, keys = 1, min(keys, 35)
    modes = (
        chance.choice(8, 8, 16) if for_triton else chance.choice(1, 2, 1 + chance.below(8), 16, 1 + chance.below(40))
    )
    inputs, queries = _times(chance, batch, keys)
    options: dict[str, Any] = {
        "causal": not chance.once_in(3),
        "weight": chance.choice("student_t", "exponential"),
        "prior": chance.choice("lyapunov", "riccati"),
        "gate": not chance.once_in(4),
        "rotate_values": not chance.once_in(3),
    }
    options["query_noise_in_bias"] = options["prior"] == "lyapunov" and chance.once_in(4)
    if chance.once_in(3):
        options["key_mask"] = chance.uniform(0, 1, batch, keys) < chance.choice(0.1, 0.5, 0.95)
    if chance.once_in(4) and queries <= keys:
        ids = torch.randint(0, chance.choice(2, 8), (batch, keys), generator=chance.generator)
        options["segment_ids"] = ids if chance.once_in(2) else ids.sort(-1).values
    value_modes = modes
    if not options["rotate_values"]:
        value_modes = chance.choice(8, 16) if for_triton else chance.choice(modes, 1 + chance.below(20))
    inputs |= _states(chance, batch, heads, queries, keys, modes, value_modes)
    wide = chance.once_in(4)  # noises as far from one as float32 reaches
    low, high = (-36, 8) if wide else (-4, 2)
    noises = {name: chance.magnitude(low, high, heads) for name in PARAMETERS[:4]}
    if wide and chance.once_in(2):  # all of one size, so that none hides another
        size = chance.magnitude(-36, 8, 1, zeros=10**6)
        noises = {name: size * chance.magnitude(-1, 1, heads) for name in noises}
    rest = {
        "decay": chance.magnitude(-8, 1, heads),
        "frequency": chance.normal(heads, modes) * chance.magnitude(-3, 0.7, heads, modes),
        "robustness": 10.0 ** chance.uniform(-2, chance.choice(1, 1, 6), heads),
        "inverse_temperature": 10.0 ** chance.uniform(-3, chance.choice(0, 0, 2), heads),
    }
    if chance.once_in(4):
        rest["horizon"] = chance.magnitude(-2, 1, heads)
    inputs |= {name: x.clamp(max=1e30).float() for name, x in {**noises, **rest}.items()}
    learned = [n for n in inputs if n not in ("times", "query_times")]
    if chance.once_in(2):
        learned.remove("frequency")  # then the kernel turns the states, and else autograd
    elif not for_triton:
        learned += [n for n in ("times", "query_times") if n in inputs and inputs[n].dtype == torch.float64]
    dtype = chance.choice(torch.float32, torch.float32, torch.bfloat16, torch.float16)
    for name in STATES:
        inputs[name] = inputs[name].clamp(-6e4, 6e4).to(dtype)
    poison = None
    if chance.once_in(8) and keys and queries:
        name = chance.choice(*STATES)
        place = tuple(chance.below(n) for n in inputs[name].shape)
        poison = name, place, chance.choice(math.nan, math.inf, -math.inf)
    return Case(inputs, options, learned, poison)


def _times(chance: Chance, batch: int, keys: int) -> tuple[dict[str, Tensor], int]:
    """Uniform, or irregular, of all samples or of each; queries at the last keys, or anywhere, or none."""
    kind = chance.choice("uniform", "irregular", "queried")
    queries = chance.choice(keys, keys, chance.below(keys + 1))
    if kind == "uniform":
        return {}, queries
    lead = chance.choice((), (batch,))
    scale = 10.0 ** chance.choice(-6, -1, 0, 0, 1, 6)
    steps = chance.uniform(0.1, 2.0, *lead, keys) * 10.0 ** (chance.uniform(0, chance.choice(0, 0, 3), *lead, keys))
    origin = chance.choice(0.0, 0.0, -3.0, 1e6 * scale, 1e9 * scale)
    times = {"times": origin + scale * steps.cumsum(-1)}
    if kind == "queried":  # between the keys, before the first and far beyond the last, in no order
        queries, lead = chance.choice(1, 3 + chance.below(20), keys), chance.choice((), (batch,))
        end = float(times["times"].max() - origin) if keys else 1.0
        times["query_times"] = origin + chance.uniform(-0.2 * end, chance.choice(1.2, 3.0) * end, *lead, queries)
    if scale >= 1 and chance.once_in(6):
        whole = {name: (t * 1000).round().long() for name, t in times.items()}
        if bool((whole["times"].diff(dim=-1) > 0).all()):
            return whole, queries
    return times, queries


def _states(
    chance: Chance, batch: int, heads: int, queries: int, keys: int, modes: int, value_modes: int
) -> dict[str, Tensor]:
    size = 10.0 ** chance.choice(0, 0, 0, 0, 1, 3, -3)
    query = size * chance.normal(batch, heads, queries, 2 * modes)
    key = size * chance.normal(batch, heads, keys, 2 * modes)
    value = chance.choice(1.0, size) * chance.normal(batch, heads, keys, 2 * value_modes)
    kind = chance.choice("random", "random", "random", "random", "near", "zero", "outlier", "unequal")
    if kind == "near":  # nearly equal, or equal
        both = min(queries, keys)
        query[:, :, queries - both :] = key[:, :, keys - both :] * (1 + chance.choice(0, 1e-6, 1e-3) * chance.normal(1))
    elif kind == "zero":
        for x in (query, key, value):
            x.mul_(chance.below(2))
    elif kind == "outlier" and keys:
        key[:, :, chance.below(keys)] *= 1e3
        value[:, :, chance.below(keys)] *= 1e3
    elif kind == "unequal":
        query.mul_(1e3)
    return {"query": query, "key": key, "value": value}


class _Rounded(torch.autograd.Function):
    """x and, on the way back, its gradient, each times `1 + eps n` with normal n."""

    @staticmethod
    def forward(ctx, x, eps, generator):
        ctx.rest = eps, generator
        return x * (1 + eps * torch.randn(x.shape, generator=generator, dtype=x.dtype))

    @staticmethod
    def backward(ctx, grad):
        eps, generator = ctx.rest
        return grad * (1 + eps * torch.randn(grad.shape, generator=generator, dtype=grad.dtype)), None, None


class Oracle:
    """The operator from its formulas, in float64; `eps` > 0 rounds every intermediate number at random.

    `half`: that of what is rounded to half precision.
    """

    def __init__(self, eps: float = 0.0, half: float = 0.0, seed: int = 0):
        self.eps, self.half, self.generator = eps, max(half, eps), torch.Generator().manual_seed(seed)
        self.grads: dict[str, Tensor] = {}  # of each pair's E, Sigma and r

    def rounded(self, x: Tensor, eps: float | None = None) -> Tensor:
        """x, rounded at random, and its gradient."""
        return _Rounded.apply(x, eps or self.eps, self.generator) if self.eps else x

    def watched(self, name: str, x: Tensor) -> Tensor:
        """x, whose gradient `grads` will hold."""
        if x.requires_grad:
            x.register_hook(lambda grad: self.grads.update({name: grad.abs()}))
        return x

    def turned(self, x: Tensor, phase: Tensor | None) -> Tensor:
        """Real parts first; as it is without a phase."""
        if phase is not None:
            real, imaginary = x.chunk(2, dim=-1)
            if self.eps:  # phases are formed in float64
                phase = phase + 2.0**-51 * phase * torch.randn(phase.shape, generator=self.generator, dtype=phase.dtype)
            turned = torch.complex(real, imaginary) * torch.exp(1j * phase)
            x = torch.cat([turned.real, turned.imag], dim=-1)
        return self.rounded(x, self.half)

    def __call__(self, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Estimate, log precision, and `(batch, queries, keys)`: who sees whom."""
        query, key, value = (given[name] for name in STATES)
        at_keys, at_queries, visible = positions(given)
        p = {name: given[name][:, None, None] for name in ("decay", *PARAMETERS)}
        frequency, seen = given["frequency"][:, None], visible[:, None]
        ahead = given.get("horizon", torch.zeros_like(given["decay"]))[:, None, None]
        key_phase, query_phase = (frequency * t[:, None, :, None] for t in (at_keys, at_queries))
        turns = given["rotate_values"]
        q, k = self.turned(query, -query_phase), self.turned(key, -key_phase)
        v = self.turned(value, -key_phase if turns else None)

        lag = (at_queries[:, :, None] - at_keys[:, None, :]).abs().masked_fill(~visible, 0.0)[:, None] + ahead
        decay = self.rounded(self.watched("decay", torch.exp(-p["decay"] * lag)))
        grown = p["process_noise"] * _grown(p["decay"], lag)
        sigma = self.watched("variance", grown + p["key_noise"] * decay.square() + p["noise_floor"])
        sigma = self.rounded(sigma)
        student = given["weight"] == "student_t"
        total = self.rounded((sigma + p["query_noise"]).clamp(min=TINY))
        judged = total if student else total.clamp(min=LEAST_OF_EXPONENTIAL)
        if self.eps:  # every backend expands the square
            squares = (self.rounded(x).square().sum(-1) for x in (q, k))
            own, other = next(squares)[..., None], decay.square() * next(squares)[..., None, :]
            both = self.rounded(2 * decay * (self.rounded(q) @ self.rounded(k).mT))
            apart = (self.rounded(own.expand_as(both)) + self.rounded(other) - both).clamp(min=0)
        else:
            apart = self.watched("distance", (q[..., None, :] - decay[..., None] * k[..., None, :, :]).square().sum(-1))
        distance = self.rounded(apart / (p["robustness"] * (q.shape[-1] // 2) * (judged if given["gate"] else 1.0)))
        if given["prior"] == "riccati":
            prior = self.log_weights(given, at_keys, at_queries)
        else:
            prior = -torch.log(total if given["query_noise_in_bias"] else sigma.clamp(min=TINY))
        evidence = (p["robustness"] + 1) * torch.log1p(distance) if student else distance
        score = self.rounded(p["inverse_temperature"] * (self.rounded(prior) - self.rounded(evidence)))
        empty = ~seen.any(-1, keepdim=True)
        score = score.masked_fill(~seen & ~empty, -torch.inf)
        attention = self.rounded(self.rounded(score.softmax(-1)) * decay, self.half)
        estimate = self.turned(attention @ v, query_phase + frequency * ahead if turns else None)
        log_precision = self.rounded(score.logsumexp(-1))
        return estimate.masked_fill(empty, 0.0), log_precision.masked_fill(empty[..., 0], -torch.inf), visible

    def log_weights(self, given: dict[str, Any], at_keys: Tensor, at_queries: Tensor) -> Tensor:
        """`log K_j - |C_i - C_j|` of the keys that take part, segment by segment; noises of zero come to TINY."""
        batch, queries, keys = len(at_keys), at_queries.shape[1], at_keys.shape[1]
        present = given.get("key_mask", torch.ones(batch, keys, dtype=torch.bool))
        segments = given.get("segment_ids", torch.zeros(batch, keys, dtype=torch.long))
        of_query = segments[:, keys - queries :] if "segment_ids" in given else torch.zeros(batch, queries)
        decay, q = given["decay"][:, None], given["process_noise"].clamp(min=TINY)[:, None]
        r = (given["key_noise"] + given["noise_floor"]).clamp(min=TINY)[:, None]
        rows = []
        for b in range(batch):
            weights = torch.zeros(len(decay), queries, keys, dtype=torch.float64)
            for segment in segments[b].unique() if keys else ():
                at = (present[b] & (segments[b] == segment)).nonzero()[:, 0]
                of = (of_query[b] == segment).nonzero()[:, 0]
                if not len(at) or not len(of):
                    continue
                times = at_keys[b, at]
                gain = torch.zeros(len(decay), 1, dtype=torch.float64)  # log K of a lone key
                steps = torch.zeros(len(decay), 1, dtype=torch.float64)
                if len(at) > 1:
                    step = times.diff()
                    grown = self.rounded(q * _grown(decay, step))
                    lost = self.rounded(
                        -torch.expm1(-2 * decay * step)
                    )  # x = K / (1 - K) solves x^2 + x (1 - F^2 - g) - g = 0
                    b_ = lost - grown / r
                    root = torch.sqrt(b_.square() + 4 * grown / r)
                    positive = b_ > 0
                    x = torch.where(
                        positive, 2 * grown / r / (b_ + root).where(positive, torch.ones(())), (root - b_) / 2
                    )
                    log_rest = self.rounded(-torch.log1p(x))
                    log_gain = self.rounded(torch.log(x)) + log_rest
                    gain = torch.cat([log_gain[:, :1], log_gain], -1)
                    steps = torch.cat([steps, log_rest.cumsum(-1)], -1)
                last = (torch.searchsorted(times.detach(), at_queries[b, of].detach(), right=True) - 1).clamp(min=0)
                found = gain[:, None] - (steps[:, last, None] - steps[:, None]).abs()
                weights = weights.index_put((torch.arange(len(decay))[:, None, None], of[None, :, None], at), found)
            rows.append(weights)
        return torch.stack(rows) if rows else torch.zeros(0, len(decay), queries, keys, dtype=torch.float64)


def _grown(decay: Tensor, lag: Tensor) -> Tensor:
    """`(1 - exp(-2 mu tau)) / (2 mu)`; a series to x^3 / 24 where x = 2 mu tau is small, which leaves 1e-17."""
    x = 2 * decay * lag
    small = x < 1e-4
    series = lag * (1 - x / 2 * (1 - x / 3 * (1 - x / 4)))
    return torch.where(small, series, -torch.expm1(-x) / torch.where(small, 1.0, 2 * decay))


def positions(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Times of keys and queries from the first key on, and who sees whom, `(b, ...)` each."""
    queries, (batch, _, keys, _) = given["query"].shape[2], given["key"].shape
    at_keys = torch.atleast_2d(given.get("times", torch.arange(keys)))
    at_queries = given.get("query_times", at_keys[:, keys - queries :])
    origin = at_keys[:, :1].detach() if keys else 0
    at_keys, at_queries = ((t - origin).double().expand(batch, -1) for t in (at_keys, torch.atleast_2d(at_queries)))
    visible = torch.ones(batch, queries, keys, dtype=torch.bool)
    if given["causal"]:
        visible = at_queries[:, :, None] >= at_keys[:, None, :]
    if "key_mask" in given:
        visible = visible & given["key_mask"][:, None, :]
    if "segment_ids" in given:
        segments = given["segment_ids"]
        visible = visible & (segments[:, keys - queries :, None] == segments[:, None, :])
    return at_keys, at_queries, visible


def results(case: Case, given: dict[str, Any], call: Any) -> dict[str, Tensor] | None:
    """Estimate, log precision and gradients by name, in float64, of the rows that see no poison; None if all do."""
    given = {n: x.detach().clone().requires_grad_() if n in case.learned else x for n, x in given.items()}
    estimate, log_precision = call(given)
    g = torch.Generator().manual_seed(1)
    left = torch.randn(estimate.shape, generator=g).to(case.inputs["query"].dtype).double()
    right = torch.randn(log_precision.shape, generator=g).double()
    clean = ~poisoned(case)
    estimate, log_precision, left, right = (x[clean] for x in (estimate.double(), log_precision.double(), left, right))
    seen = log_precision > -torch.inf
    total = (left * estimate).sum() + (right * log_precision)[seen].sum()
    leaves = [given[n] for n in case.learned]
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    found = {"estimate": estimate, "log_precision": log_precision, **dict(zip(case.learned, gradients, strict=True))}
    return {n: x.detach().double() for n, x in found.items()}


def poisoned(case: Case) -> Tensor:
    """`(batch, heads, queries)`: the rows that see the poison."""
    query = case.inputs["query"]
    rows = torch.zeros(query.shape[:3], dtype=torch.bool)
    if case.poison is not None:
        name, (b, h, at, _), _ = case.poison
        visible = positions({**case.inputs, **case.options})[2][b]
        rows[b, h] = visible[:, at] if name != "query" else torch.arange(query.shape[2]) == at
    return rows


class Held(NamedTuple):
    """The largest and the mean of errors."""

    largest: float
    mean: float


def held(errors: Tensor) -> Held:
    return Held(float(errors.max()), float(errors.mean())) if errors.numel() else Held(0.0, 0.0)


def of_paths(exact: dict[str, Any], grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """What sums over u and M of all keys and queries lose in float64, where what is left are differences over lags."""
    names = [name for name in ("process_noise", "decay", "times", "query_times") if name in exact]
    given = exact | {n: exact[n].clone().requires_grad_() for n in names if exact[n].is_floating_point()}
    at_keys, at_queries, _ = positions(given)
    earliest = torch.cat([at_keys, at_queries], -1).detach().amin(-1, keepdim=True)
    decay = given["decay"][:, None]
    u_key, u_query = (
        given["process_noise"][:, None] * _grown(decay, (t - earliest)[:, None]) for t in (at_keys, at_queries)
    )
    m_key, m_query = (decay * (t - earliest)[:, None] for t in (at_keys, at_queries))
    through = torch.maximum(u_query[..., None], u_key[..., None, :]).detach() + exact["key_noise"][:, None, None]
    through = 2 * grads["variance"] * through + grads["decay"]  # E <= 1
    total = (grads["variance"] * (u_query[..., None] + u_key[..., None, :])).sum()
    total = total + (through * (m_query[..., None] + m_key[..., None, :])).sum()
    leaves = {n: given[n] for n in names if given[n].requires_grad}
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {n: 2.0**-51 * x.abs() for n, x in zip(leaves, found, strict=True)}


def floor(case: Case, name: str, wanted: Tensor, draws: list[Tensor], path: Tensor) -> Held:
    """What rounding does to a result: in the oracle, to the result itself, and where numbers end."""
    dtype = torch.float64 if "times" in name else torch.float32
    if name == "estimate" or name in STATES:
        dtype = case.inputs["query"].dtype
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps + NOTHING * (1 + held(case.inputs["value"].double().abs()).largest)
    drawn = [held((x - wanted).abs()) for x in draws]
    own = held(info.eps / 2 * (wanted.abs() + (name == "log_precision")))  # log s holds a rounding of s
    return Held(*(max(d[i] for d in drawn) + own[i] + least + held(path)[i] for i in (0, 1)))


def faults(case: Case, backends: tuple[str, ...]) -> list[str]:
    """What is wrong with a case, a line each."""
    given = {**case.inputs, **case.options}
    low = dict(given)
    if "key_mask" in given:  # what takes no part may hold anything
        for name in ("key", "value"):
            low[name] = given[name].masked_fill(~given["key_mask"][:, None, :, None], math.nan)
    if case.poison is not None:
        name, place, number = case.poison
        low[name], given[name] = low[name].clone(), given[name].clone()
        low[name][place], given[name][place] = number, 0.0
    exact = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()}

    def rounding(*how: float) -> dict[str, Tensor]:
        return results(case, exact, lambda given: Oracle(*how)(given)[:2])

    oracle = Oracle()
    expected, dense, wrong = results(case, exact, lambda given: oracle(given)[:2]), {}, []
    if any(held(grad).largest > STEEPEST for grad in oracle.grads.values()):
        expected = {name: expected[name] for name in ("estimate", "log_precision")}
    paths = of_paths(exact, oracle.grads) if "variance" in oracle.grads and exact["query"].shape[2] else {}
    floors: dict[float, dict[str, list[Tensor]]] = {}
    dtype = case.inputs["query"].dtype
    for backend in ("reference", *backends):
        half = torch.finfo(dtype).eps / 2 if backend == "triton" and dtype != torch.float32 else 0.0
        if half not in floors:
            drawn = [rounding(SINGLE, half, 1 + n) for n in range(DRAWS)]
            floors[half] = {name: [d[name] for d in drawn] for name in expected}
        call = functools.partial(robust_filter_attention, return_log_precision=True, backend=backend)
        try:
            found = results(case, low, lambda given, call=call: call(**given))
        except Exception as error:
            wrong.append(f"{backend}: {type(error).__name__}: {error}")
            continue
        for name, wanted in expected.items():
            largest = torch.finfo(
                low[name].dtype if name in low else dtype if name == "estimate" else torch.float32
            ).max
            known = wanted.abs() < 0.5 * largest
            unseen = wanted == -torch.inf
            agreed = torch.equal(found[name][unseen], wanted[unseen])
            actual, wanted = found[name][known], wanted[known]
            actual = actual.clamp(-largest, largest)
            if not agreed or not bool(actual.isfinite().all()):
                wrong.append(f"{backend} {name}: {int((~actual.isfinite()).sum())} of {len(actual)} numbers not finite")
                continue
            error, least = (
                held((actual - wanted).abs()),
                floor(case, name, wanted, [d[known] for d in floors[half][name]], paths.get(name, wanted.new_zeros(0))),
            )
            dense.setdefault(name, Held(0.0, 0.0) if backend == "reference" else error)
            times = 2 if name in ("estimate", "log_precision") else 3
            for kind, got, base, small in zip(Held._fields, error, dense[name], least, strict=True):
                if not got <= times * base + FLOOR * (10 if backend == "reference" else 1) * small:
                    size = getattr(held(wanted.abs()), kind)
                    wrong.append(
                        f"{backend} {name}: {kind} {size:.1e}, error {got:.1e}, dense {base:.1e}, floor {small:.1e}"
                    )
            if backend == "reference":
                dense[name] = error
    return wrong


def describe(case: Case) -> str:
    """The arguments of a case in a few lines."""
    lines = []
    for name, x in case.inputs.items():
        numbers = x.tolist() if x.numel() <= 8 else f"+-{float(x.abs().max()):.3g}"
        lines.append(f"{name}: {x.dtype} {tuple(x.shape)} {numbers}")
    chosen = {n: tuple(x.shape) if isinstance(x, Tensor) else x for n, x in case.options.items()}
    return "\n".join([*lines, str(chosen), f"learned: {case.learned}", f"poison: {case.poison}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--triton-cases", type=int, default=100, help="more, under Triton's interpreter")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--only", type=int, help="this case alone")
    options = parser.parse_args(arguments)
    runs = [(seed, ("cpu",)) for seed in range(options.seed, options.seed + options.cases)]
    runs += [(-1 - seed, ("triton",)) for seed in range(options.seed, options.seed + options.triton_cases)]
    if options.only is not None:
        runs = [(options.only, ("cpu",) if options.only >= 0 else ("triton",))]
        print(describe(draw(options.only if options.only >= 0 else -options.only, options.only < 0)))
    counts, faulty = collections.Counter(), {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("fuzzing", total=len(runs))
        for seed, backends in runs:
            case = draw(abs(seed), seed < 0)
            wrong = faults(case, backends)
            counts.update(("cases", str(case.inputs["query"].dtype), *("reference", *backends)))
            counts["numbers"] += sum(x.numel() for x in case.inputs.values())
            if wrong:
                faulty[seed] = wrong
                lines = wrong if options.only is not None else [f"{wrong[0]}; {len(wrong)} in all"]
                for line in lines:
                    progress.console.print(f"--only {seed}: {line}", highlight=False, soft_wrap=True)
            progress.advance(bar)
    print(", ".join(f"{name} {count:,}" for name, count in counts.items()))
    print(f"{len(runs):,} cases, {len(faulty):,} faults" + (f": --only {' '.join(map(str, faulty))}" if faulty else ""))
    return 1 if faulty else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
