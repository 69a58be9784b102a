"""Hold certified windows against float64 on random calls: `python benchmarks/fuzz_certified.py --cases 2000`.

A seed draws a filter with the Riccati prior, or normalised dot products with slopes, forget gates or gains; uniform,
irregular, far or clocked times, masks, segments, slopes from 1e-4 to 10 nats, parameters over many orders of magnitude,
lengths around the edges of tiles, and eps. In half of the cases old keys agree with the queries and new ones do not, or
all are equal: then the sums come near the bound. A row's error and the loss of its log sum must satisfy

    |out - exact| <= 2 eps max |v| + rounding,    log s_exact - log s <= eps + rounding

with `exact` from dense code in float64. The rounding is 4 times the error of the same call with `certified=None`, and
1e-5. Gradients must be finite where those of that call are. The exit status is 1 if a case is at fault.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fuzz_cases import Chance
from torch import Tensor

from rfa.ops.cumulative import clocked
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.positions import Positions, checked_positions
from rfa.ops.problem import Options, Parameters, Problem

EDGES = (1, 2, 12, 96, 128, 192, 256, 384)  # around these lengths, and up to twice the longest
ROUNDING = 1e-5


class Case(NamedTuple):
    """A call: the states `(batch, heads, length, channels)`, and the operator as a function of them."""

    states: tuple[Tensor, Tensor, Tensor]
    attend: Callable[..., tuple[Tensor, Tensor | None]]  # (*states, certified=, backend=) in the dtype of the states
    eps: float
    words: str


def draw(seed: int) -> Case:
    """The case of a seed."""
    chance = Chance(seed)
    batch, heads, modes = chance.choice(1, 2, 3), chance.choice(1, 2, 3), chance.choice(1, 2, 4, 9, 16)
    keys = max(1, chance.choice(*EDGES) + chance.below(3) - 1) + chance.choice(0, 0, 128, 300)
    positions, queries, words = _positions(chance, batch, heads, keys)
    states = _states(chance, batch, heads, queries, keys, modes)
    eps = chance.choice(2.0**-24, 1e-5, 2.0**-12, 1e-3, 1e-2, 0.3)
    make = _products if chance.once_in(3) else _filter
    attend, more = make(chance, heads, modes, keys, positions, batch)
    return Case(
        states, attend, eps, f"batch {batch}, heads {heads}, modes {modes}, {queries} of {keys}, {words}, {more}"
    )


def _positions(chance: Chance, batch: int, heads: int, keys: int) -> tuple[Positions, int, str]:
    kind = chance.choice("uniform", "uniform", "irregular", "far", "clock")
    marks: dict[str, Any] = {"key_mask": None, "segment_ids": None}
    if chance.once_in(3):
        holes = chance.uniform(0, 1, batch, keys) < chance.choice(0.3, 0.9)
        padding = torch.arange(keys) >= torch.randint(keys, (batch, 1), generator=chance.generator)
        marks["key_mask"] = chance.choice(holes, padding)
    if kind != "far" and chance.once_in(3):
        ids = torch.randint(0, chance.choice(2, 5, 40), (batch, keys), generator=chance.generator)
        marks["segment_ids"] = chance.choice(ids, ids.sort(-1).values)
    queries, times, query_times = keys, None, None
    if kind == "uniform":
        queries = chance.choice(keys, keys, 1 + chance.below(keys))
    else:
        lead = chance.choice((), (batch,))
        times = (10.0 ** chance.uniform(-1, 1, *lead, keys) * 10.0 ** chance.choice(-1, 0, 0, 2)).cumsum(-1)
    if kind == "far":
        queries = chance.choice(1, 13, keys)
        query_times = chance.uniform(-0.1, chance.choice(1.0, 2.0), queries) * float(times.max())
    positions = checked_positions(batch, queries, keys, torch.device("cpu"), times, query_times, **marks)
    if kind == "clock":
        positions = clocked(positions, 10.0 ** chance.uniform(-2, 0.5, batch, heads, keys))
    given = [name for name, mark in marks.items() if mark is not None]
    return positions, queries, " ".join([kind, *given])


def _states(
    chance: Chance, batch: int, heads: int, queries: int, keys: int, modes: int
) -> tuple[Tensor, Tensor, Tensor]:
    query = chance.normal(batch, heads, queries, 2 * modes)
    key, value = (chance.normal(batch, heads, keys, 2 * modes) for _ in range(2))
    kind, border = chance.choice("random", "random", "equal", "old keys agree"), chance.below(keys)
    if kind != "random":
        query, key = torch.ones_like(query), torch.ones_like(key)
        key[:, :, border:] *= 1.0 if kind == "equal" else -chance.choice(1.0, 3.0, 30.0)
        value = torch.where(torch.arange(keys) < border, 1.0, -1.0)[:, None] * value.abs()
    return query, key, chance.choice(1.0, 1e-3, 1e3) * value


def _slopes(chance: Chance, heads: int) -> Tensor:
    return 10.0 ** chance.uniform(chance.choice(-2, -4), chance.choice(0, 1), heads)


def _filter(
    chance: Chance, heads: int, modes: int, keys: int, positions: Positions, batch: int
) -> tuple[Callable[..., Any], str]:
    decay = chance.magnitude(-4, 0.5, heads)
    noises = [chance.magnitude(-3, 1, heads, zeros=20) for _ in range(3)]
    noises[2] += 1e-3  # of the floor
    if extreme := chance.once_in(4):
        noises = [chance.magnitude(-30, 8, heads) for _ in range(3)]
        process_noise = chance.magnitude(-30, 8, heads)
    else:  # by which weights fall by these slopes each step
        key_noise, gain = noises[0] + noises[2], -torch.expm1(-_slopes(chance, heads))
        ahead, left = gain * key_noise / (1 - gain), torch.exp(-2 * decay)
        grown = torch.where(decay > 0, (1 - left) / (2 * decay).clamp(min=1e-30), 1.0)
        process_noise = (ahead**2 + ahead * key_noise * (1 - left)) / (ahead + key_noise) / grown
    frequency = chance.normal(heads, modes) * chance.choice(0.0, 1.0)
    robustness, temperature = 10.0 ** chance.uniform(-1, 2, heads), 10.0 ** chance.uniform(-1, 1, heads)
    horizon = chance.magnitude(-2, 1, heads) if chance.once_in(4) else None
    numbers = (decay, frequency, process_noise, *noises, robustness, temperature, horizon)
    rounded = [x if x is None else x.clamp(max=1e30).float() for x in numbers]
    weight = chance.choice("student_t", "exponential")
    fixed = Options(True, weight, not chance.once_in(3), "riccati", not chance.once_in(4), log_precision=True)

    def attend(*states: Tensor, certified: float | None, backend: str) -> tuple[Tensor, Tensor]:
        parameters = Parameters(*(x if x is None else x.to(states[0].dtype) for x in rounded), None)
        problem = Problem(parameters, positions, fixed._replace(certified=certified))
        return located_filter_attention(*states, problem, backend=backend)

    return attend, f"filter, {weight}, extreme {extreme}"


def _products(
    chance: Chance, heads: int, modes: int, keys: int, positions: Positions, batch: int
) -> tuple[Callable[..., Any], str]:
    own = (positions.query_times.shape[-1] == keys and positions.query_groups is None) or positions.uniform
    kind = chance.choice("slopes", "gates", "gains") if own or positions.query_groups is not None else "slopes"
    slopes, scale = _slopes(chance, heads), 10.0 ** chance.uniform(-1, 0.5, heads)
    log_gate = None if kind == "slopes" else -(10.0 ** chance.uniform(-3, 1, batch, heads, keys))
    given: dict[str, Any] = {"positions": positions, "slopes": slopes.float() if log_gate is None else None}
    given |= {"log_gate": None if log_gate is None else log_gate.float(), "gains": kind == "gains"}
    given |= {"decay": chance.magnitude(-3, 0, heads).float(), "sink": chance.once_in(3)}
    given["frequency"] = chance.normal(heads, modes).float() if chance.once_in(2) else None
    given["rotate_values"] = given["frequency"] is not None and chance.once_in(2)
    largest = (1.01 * (2 * modes) ** 0.5 * scale.square()).float()

    def attend(*states: Tensor, certified: float | None, backend: str) -> tuple[Tensor, None]:
        query, key, value = states
        turned = (scale[:, None, None].to(x) * (2 * modes) ** 0.5 * F.normalize(x, dim=-1) for x in (query, key))
        options = {"certified": certified, "largest": largest, "backend": backend, **given}
        return decayed_dot_product_attention(*turned, value, **options), None

    return attend, f"products, {kind}"


class Outcome(NamedTuple):
    """What a case came to: its faults, and the largest error over its bound without the rounding."""

    faults: list[str]
    ratio: float


def judge(case: Case) -> Outcome:
    """Both backends' estimates and log sums against the bound, and gradients of the compiled one."""
    wrong, ratio, eps = [], 0.0, case.eps
    states = tuple(x.float() for x in case.states)
    exact, log_exact = case.attend(*(x.double() for x in states), certified=None, backend="reference")
    largest = states[2].double().norm(dim=-1).amax()

    def compared(backend: str, dtype: torch.dtype) -> list[Any]:
        """Errors of rows, losses of log sums and gradients, with an eps and without."""
        found = []
        for certified in (eps, None):
            leaves = [x.to(dtype).requires_grad_() for x in states]
            out, log_sum = case.attend(*leaves, certified=certified, backend=backend)
            grads = torch.autograd.grad((out * exact.sign().to(dtype)).sum(), leaves)
            loss = torch.zeros(()) if log_sum is None else (log_exact - log_sum.double())[log_exact > -torch.inf]
            found.append(((out.detach().double() - exact).norm(dim=-1), loss.detach(), grads))
        return found

    for backend, dtype in (("reference", torch.float64), ("cpu", torch.float32)):
        (error, loss, grads), (base, base_loss, base_grads) = compared(backend, dtype)
        allowed = 4 * base + ROUNDING * largest
        over = (error - allowed).clamp(min=0) / (2 * eps * largest)
        ratio = max(ratio, float(over.max()) if over.numel() else 0.0)
        if not bool((error <= 2 * eps * largest + allowed).all()):
            wrong.append(f"{backend}: error {float(error.max()):.2e}, allowed {float(2 * eps * largest):.2e}")
        if loss.numel() and not bool((loss <= eps + 4 * base_loss.abs() + ROUNDING).all()):
            wrong.append(f"{backend}: log sum {float(loss.max()):.2e} below, allowed {eps:.2e}")
        if any(bool((x.isfinite() < other.isfinite()).any()) for x, other in zip(grads, base_grads, strict=True)):
            wrong.append(f"{backend}: a gradient is not finite")
    return Outcome(wrong, ratio)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--only", type=int, help="this case alone")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.cases) if options.only is None else [options.only]
    faulty, worst = [], (0.0, -1)
    for seed in seeds:
        case = draw(seed)
        outcome = judge(case)
        worst = max(worst, (outcome.ratio, seed))
        if outcome.faults or options.only is not None:
            print(f"--only {seed}: {case.words}, eps {case.eps:.1e}: {outcome}", flush=True)
        faulty += [seed] * bool(outcome.faults)
    print(f"{len(seeds):,} cases, {len(faulty)} faults, largest error {worst[0]:.3f} of the bound (seed {worst[1]})")
    return int(bool(faulty))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
