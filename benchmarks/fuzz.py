"""Compare every backend with float64 on random calls of the operator: `python benchmarks/fuzz.py --cases 10000`.

A seed draws shapes, dtypes, times, masks, segments, options, extreme states, and parameters over many orders of
magnitude. One case in eight has a NaN or an infinity in a state ("poison"). The estimate, the log precision and all
gradients are compared with `fuzz_oracle.py`, which shares no code with `rfa`. The mean and the largest error of each
must satisfy this rule (with 3 instead of 2 for gradients):

    error <= 2 * error of the dense reference in the same dtype + FLOOR * floor

The floor is the effect of rounding every intermediate number of the oracle once:
- It rounds rotated states, E, Sigma, r, scores, weights, and the gradient of each of them.
- It rounds the estimate too, because the backward pass subtracts the product of the estimate and its gradient from
  every score of a row. Only Triton's is rounded if one weight is nearly 1: it has no second pass over the scores.
- The largest of DRAWS draws counts. One draw rounds to nearest, so that scores can tie. The others round at random,
  with squared distances shifted down, not shifted, or shifted up by their rounding error.
- A case that fails is tested again with MORE_DRAWS draws.
- Numbers that are computed in float64 from times far from the origin are rounded in float64: phases, dampings, and sums
  along a series and of its gradients.
- Triton sums the gradients of scalars in float32, so their cancellation is lost at that precision. With states in half
  precision it rounds states, weights and gradients once more than the reference, and for whole problems weights before
  their sum, and keys and values twice. Its floor does the same.

This rule does not test the dense reference. Its errors may be at most 120 floors (10 * FLOOR). Its gradients of
parameters and times are sums over all pairs that cancel; they may be off by another 1 % of the oracle's mean or largest
number. An error beyond 120 floors does not loosen the rule of the other backends.

Further allowances and exclusions:
- NOTHING, for cotangents of order one, where a gradient vanishes.
- `of_paths`: gradients of noises, dampings and times are sums over keys and queries that cancel. Their float64 rounding
  is allowed.
- The gradients of a case are not compared if the gradient of a pair or a step exceeds STEEPEST, also in a rounded draw.
- Numbers above half of the dtype's largest number are not compared.
- Rows that see poison are tested separately. Their estimate must not be finite, and neither must their log precision
  if a query or a key is poisoned. They have no gradient.

The exit status is 1 if a case is at fault. `--only SEED` runs one case again and prints its arguments.

With `--device cuda` Triton's cases run on a GPU. Up to 35 keys they are those of the interpreter, seed by seed;
`--triton-keys 160` has more keys, and so several blocks. `--json FILE` keeps what is done after each case, and goes on
from there.
"""

import argparse
import collections
import functools
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and not any(argument.endswith("cuda") for argument in sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"  # before torch imports triton

import torch
from fuzz_cases import FEW_KEYS, STATES, Case, describe, draw
from fuzz_oracle import Oracle, grown_by, positions
from kept import Kept
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from rfa.ops import robust_filter_attention

DRAWS, MORE_DRAWS = 4, 64
NOTHING = 1e-11  # rounding error of a gradient that vanishes, for cotangents of order one
FLOOR = 12  # a number is rounded several times, and the largest of a thousand errors is four standard deviations
MISTAKEN = 0.01  # of a gradient's size: a larger error is a mistake, not rounding
STEEPEST = 1e30  # limit for gradients of pairs and steps: above it float32 overflows before the gradients of inputs
SINGLE = torch.finfo(torch.float32).eps
OUTPUTS = ("estimate", "log_precision")


def results(case: Case, given: dict[str, Any], call: Any) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Estimate, log precision and gradients by name, in float64, of the rows that see no poison.

    The second result is the estimate and the log precision of the rows that see poison.
    """
    given = {n: x.detach().clone().requires_grad_() if n in case.learned else x for n, x in given.items()}
    estimate, log_precision = call(given)
    g = torch.Generator().manual_seed(1)
    left = torch.randn(estimate.shape, generator=g).to(case.inputs["query"].dtype).double()
    right = torch.randn(log_precision.shape, generator=g).double()
    unknown = poisoned(case)
    clean, seeing = ~unknown, (estimate.detach()[unknown], log_precision.detach()[unknown])
    estimate, log_precision, left, right = (x[clean] for x in (estimate.double(), log_precision.double(), left, right))
    seen = log_precision > -torch.inf
    total = (left * estimate).sum() + (right * log_precision)[seen].sum()
    leaves = [given[n] for n in case.learned]
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    found = {"estimate": estimate, "log_precision": log_precision, **dict(zip(case.learned, gradients, strict=True))}
    return {n: x.detach().double() for n, x in found.items()}, seeing


def poisoned(case: Case) -> Tensor:
    """Which rows see the poison, `(batch, heads, queries)`."""
    query = case.inputs["query"]
    rows = torch.zeros(query.shape[:3], dtype=torch.bool)
    if case.poison is not None:
        name, (b, h, at, _), _ = case.poison
        visible = positions({**case.inputs, **case.options})[2][b]
        alone = (torch.arange(query.shape[2]) == at) & visible.any(-1)  # a query that sees no key has the estimate 0
        rows[b, h] = alone if name == "query" else visible[:, at]
    return rows


def let_through(case: Case, estimate: Tensor, log_precision: Tensor) -> dict[str, int]:
    """The number of rows that see poison and yet are finite, by name. A poisoned value does not reach log precision."""
    held = {"estimate": estimate.isfinite().all(-1)}
    if case.poison is not None and case.poison[0] != "value":
        held["log_precision"] = log_precision.isfinite()
    return {name: int(rows.sum()) for name, rows in held.items() if rows.any()}


class Held(NamedTuple):
    """The largest and the mean error."""

    largest: float
    mean: float


def held(errors: Tensor) -> Held:
    return Held(float(errors.max()), float(errors.mean())) if errors.numel() else Held(0.0, 0.0)


def of_paths(exact: dict[str, Any], grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float64 rounding of sums over u and M of all keys and queries, of which only differences over lags remain."""
    names = [name for name in ("process_noise", "decay", "times", "query_times") if name in exact]
    given = exact | {n: exact[n].clone().requires_grad_() for n in names if exact[n].is_floating_point()}
    at_keys, at_queries, _ = positions(given)
    earliest = torch.cat([at_keys, at_queries], -1).detach().amin(-1, keepdim=True)
    decay = given["decay"][:, None]
    u_key, u_query = (
        given["process_noise"][:, None] * grown_by(decay, (t - earliest)[:, None]) for t in (at_keys, at_queries)
    )
    m_key, m_query = (decay * (t - earliest)[:, None] for t in (at_keys, at_queries))
    variance = grads.get("variance", torch.zeros(()))  # with Riccati weights and no gate, no score uses it
    through = torch.maximum(u_query[..., None], u_key[..., None, :]).detach() + exact["key_noise"][:, None, None]
    through = 2 * variance * through + grads["decay"]  # E <= 1
    total = (variance * (u_query[..., None] + u_key[..., None, :])).sum()
    through = through + 2 * grads.get("prior", torch.zeros(()))  # log(1 - K) <= 2 mu step where no noise enters
    total = total + (through * (m_query[..., None] + m_key[..., None, :])).sum()
    if "horizon" in given:  # the state's loss over it and the noise's gain are equal when u is stationary
        ahead = given["horizon"] = exact["horizon"].clone().requires_grad_()
        mu, noise = exact["decay"], exact["process_noise"]
        both = torch.maximum(u_query[..., None], u_key[..., None, :]).detach() + exact["key_noise"][:, None, None]
        over = (noise * grown_by(mu, ahead))[:, None, None] - torch.exp(-2 * mu * ahead)[:, None, None] * both
        total, names = total + (variance * over).sum(), [*names, "horizon"]
    leaves = {n: given[n] for n in names if given[n].requires_grad}
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {n: 2.0**-51 * x.abs() for n, x in zip(leaves, found, strict=True)}


def floor(case: Case, name: str, wanted: Tensor, draws: list[Tensor], path: Tensor) -> Held:
    """The effect of rounding on a result: rounding in the oracle, of the result itself, and to the smallest number."""
    dtype = torch.float64 if "times" in name else torch.float32
    if name == "estimate" or name in STATES:
        dtype = case.inputs["query"].dtype
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps + NOTHING * (1 + held(case.inputs["value"].double().abs()).largest)
    drawn = [held((x - wanted).abs()) for x in draws]
    own = held(info.eps / 2 * (wanted.abs() + (name == "log_precision")))  # log s holds a rounding of s
    return Held(*(max(d[i] for d in drawn) + own[i] + least + held(path)[i] for i in (0, 1)))


def on_device(call: Any, device: str, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A call on a device, from tensors on the CPU to results there."""
    placed = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
    estimate, log_precision = call(**placed)
    return estimate.cpu(), log_precision.cpu()


def faults(case: Case, backends: tuple[str, ...], draws: int = DRAWS, device: str = "cpu") -> list[str]:
    """The faults of a case, one line for each. `device` is that of Triton; the other backends run on the CPU."""
    given = {**case.inputs, **case.options}
    low = dict(given)
    if "key_mask" in given:  # masked keys and values may hold anything, even NaN
        for name in ("key", "value"):
            low[name] = given[name].masked_fill(~given["key_mask"][:, None, :, None], math.nan)
    if case.poison is not None:
        name, place, number = case.poison
        low[name], given[name] = low[name].clone(), given[name].clone()
        low[name][place], given[name][place] = number, 0.0
    exact = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()}

    def computed(*how: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Results of the oracle, and the gradients of its intermediate numbers. Too steep gradients are left out."""
        oracle = Oracle(*how)
        found = results(case, exact, lambda given: oracle(given)[:2])[0]
        steep = any(held(grad).largest > STEEPEST for grad in oracle.grads.values())
        return {name: found[name] for name in (OUTPUTS if steep else found)}, oracle.grads

    (expected, grads), dense, wrong = computed(), {}, []
    paths = of_paths(exact, grads) if "decay" in grads and exact["query"].shape[2] else {}
    floors: dict[tuple[float, bool], dict[str, list[Tensor]]] = {}
    dtype = case.inputs["query"].dtype
    for backend in ("reference", *backends):
        half = torch.finfo(dtype).eps / 2 if backend == "triton" and dtype != torch.float32 else 0.0
        kind = half, backend == "triton"
        if kind not in floors:
            more = (half > 0 and case.whole, *[2.0] * (backend == "triton"))
            drawn = [computed(SINGLE, half, n, (0, -1, 0, 1)[n % 4], *more)[0] for n in range(draws)]
            compared = min(drawn, key=len)
            floors[kind] = {name: [d[name] for d in drawn] for name in expected if name in compared}
        call = functools.partial(robust_filter_attention, return_log_precision=True, backend=backend)
        try:
            run = functools.partial(on_device, call, device if backend == "triton" else "cpu")
            found, seeing = results(case, low, run)
        except Exception as error:
            wrong.append(f"{backend}: {type(error).__name__}: {error}")
            continue
        for name, rows in let_through(case, *seeing).items():
            wrong.append(f"{backend} {name}: {rows} of {len(seeing[0])} rows that see poison hold numbers")
        for name in floors[kind]:
            wanted = expected[name]
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
            path = paths.get(name, wanted.new_zeros(0))
            if backend == "triton" and name == "horizon":
                path = path * (SINGLE / 2.0**-51)
            error = held((actual - wanted).abs())
            least = floor(case, name, wanted, [d[known] for d in floors[kind][name]], path)
            sizes, times = held(wanted.abs()), 2 if name in OUTPUTS else 3
            if backend == "reference":
                summed = name not in (*OUTPUTS, *STATES)
                bounds = [
                    10 * FLOOR * small + summed * MISTAKEN * size for small, size in zip(least, sizes, strict=True)
                ]
                dense[name] = [min(got, 10 * FLOOR * small) for got, small in zip(error, least, strict=True)]
            else:
                base = dense.get(name, error)  # a failure of the reference is already reported
                bounds = [times * own + FLOOR * small for own, small in zip(base, least, strict=True)]
            for part, got, bound, small, size in zip(Held._fields, error, bounds, least, sizes, strict=True):
                if not got <= bound:
                    wrong.append(
                        f"{backend} {name}: {part} {size:.1e}, error {got:.1e}, allowed {bound:.1e}, floor {small:.1e}"
                    )
    return wrong


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--cases", type=int, default=10_000)
    made.add_argument("--triton-cases", type=int, default=100, help="more, under Triton's interpreter")
    made.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    made.add_argument("--triton-keys", type=int, default=FEW_KEYS, help="the most keys of these")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of these")
    made.add_argument("--only", type=int, help="this case alone")
    made.add_argument("--json", type=Path, help="file that keeps what is done, to go on from")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    runs = [(seed, ("cpu",)) for seed in range(options.seed, options.seed + options.cases)]
    runs += [(-1 - seed, ("triton",)) for seed in range(options.seed, options.seed + options.triton_cases)]
    if options.only is not None:
        runs = [(options.only, ("cpu",) if options.only >= 0 else ("triton",))]
        print(describe(draw(abs(options.only), options.only < 0, options.triton_keys)))
    asked = {name: value for name, value in vars(options).items() if name != "json"}
    kept = Kept(options.json, asked, done=0, of=len(runs), counts={}, faults={})
    counts, faulty = collections.Counter(kept["counts"]), kept["faults"]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("fuzzing", total=len(runs), completed=kept["done"])
        for seed, backends in runs[kept["done"] :]:
            case = draw(abs(seed), seed < 0, options.triton_keys)
            wrong = faults(case, backends, device=options.device)
            if wrong:
                wrong = faults(case, backends, MORE_DRAWS, options.device)
            counts.update(("cases", str(case.inputs["query"].dtype), *("reference", *backends)))
            counts["numbers"] += sum(x.numel() for x in case.inputs.values())
            if wrong:
                faulty[str(seed)] = wrong
                lines = wrong if options.only is not None else [f"{wrong[0]}; {len(wrong)} in all"]
                for line in lines:
                    progress.console.print(f"--only {seed}: {line}", highlight=False, soft_wrap=True)
            kept |= {"done": kept["done"] + 1, "counts": counts}
            kept.write()
            progress.advance(bar)
    print(", ".join(f"{name} {count:,}" for name, count in counts.items()))
    print(f"{len(runs):,} cases, {len(faulty):,} faults" + (f": --only {' '.join(map(str, faulty))}" if faulty else ""))
    return 1 if faulty else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
