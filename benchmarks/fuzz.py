"""Compare every backend with float64 on random calls of the operator: `python benchmarks/fuzz.py --cases 10000`.

A seed draws shapes, dtypes, times, masks, segments, options, extreme states, and parameters over many orders of
magnitude. One case in eight has a NaN or an infinity in a state ("poison"). The estimate, the log precision and all
gradients are compared with the `Oracle`, which shares no code with `rfa`. The mean and the largest error of each
must satisfy this rule (with 3 instead of 2 for gradients):

    error <= 2 * error of the dense reference in the same dtype + FLOOR * floor

The floor is the effect of rounding every intermediate number of the oracle once, and its gradient; the largest of DRAWS
draws counts, and a case that fails is tested again with MORE_DRAWS. One draw rounds to nearest, so that scores can tie.
The others round at random, with squared distances shifted by their rounding error down, up or not at all. The estimate
is rounded too: the backward pass subtracts its product with its gradient from every score of a row. What is computed in
float64 from times far from the origin is rounded in float64. Triton sums the gradients of scalars in float32; in half
precision it rounds states, weights and gradients once more, and for whole problems weights before their sum and keys
and values twice. Its floor does the same.

The dense reference may be off by 120 floors (10 * FLOOR); gradients of parameters and times, sums over all pairs that
cancel, by another 1 % of the oracle's mean or largest number. An error beyond does not loosen the rule of the others.
Not compared are gradients of a case whose pairs or steps have one above STEEPEST, and numbers above half of the dtype's
largest. NOTHING is allowed where a gradient vanishes, and `of_paths` for sums over keys and queries that cancel. Rows
that see poison must not be finite, in the log precision too if a query or a key is poisoned.

Certified windows are held against float64 too, on `certified_case`. With 4 times the error of the same call without an
eps, and 1e-5, as the rounding, a row's error and the loss of its log sum must satisfy

    |out - exact| <= 2 eps max |v| + rounding,    log s_exact - log s <= eps + rounding

The exit status is 1 if a case is at fault. `--only SEED` runs one case again: from 0 on the CPU's, below 0 Triton's.
With `--device cuda` Triton's cases run on a GPU; `--triton-keys 160` has more keys there, and so several blocks.
"""

import argparse
import functools
import math
import os
import sys
from typing import Any, NamedTuple

if __name__ == "__main__" and not any(argument.endswith("cuda") for argument in sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"  # before torch imports triton

import torch
from fuzz_cases import FEW_KEYS, STATES, Case, Oracle, certified_case, draw, grown_by, positions
from torch import Tensor

from rfa.ops import robust_filter_attention

DRAWS, MORE_DRAWS = 4, 64
NOTHING = 1e-11  # rounding error of a gradient that vanishes, for cotangents of order one
FLOOR = 12  # a number is rounded several times, and the largest of a thousand errors is four standard deviations
MISTAKEN = 0.01  # of a gradient's size: a larger error is a mistake, not rounding
STEEPEST = 1e30  # limit for gradients of pairs and steps: above it float32 overflows before the gradients of inputs
ROUNDING = 1e-5  # of certified windows, of the largest value
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


def certified_faults(given: dict[str, Any], eps: float) -> list[str]:
    """Both backends' estimates and log sums against the bound, and gradients of states that must be finite."""
    single = {n: x.float() if isinstance(x, Tensor) and n in STATES else x for n, x in given.items()}
    double = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in single.items()}
    call = functools.partial(robust_filter_attention, return_log_precision=True)
    exact, log_exact = call(**double, backend="reference")
    seen, largest, wrong = log_exact > -torch.inf, held(double["value"].norm(dim=-1)).largest, []
    for backend, chosen in (("reference", double), ("cpu", single)):
        found = []
        for certified in (eps, None):
            leaves = [chosen[name].clone().requires_grad_() for name in STATES]
            of_states = dict(zip(STATES, leaves, strict=True))
            out, log_sum = call(**chosen | of_states, certified=certified, backend=backend)
            gradients = torch.autograd.grad((out * exact.sign().to(out.dtype)).sum(), leaves)
            error, loss = (out.detach().double() - exact).norm(dim=-1), (log_exact - log_sum.detach().double())[seen]
            found.append((error, loss, gradients))
        (error, loss, gradients), (base, base_loss, others) = found
        if not bool((error <= 2 * eps * largest + 4 * base + ROUNDING * largest).all()):
            wrong.append(f"{backend}: error {held(error).largest:.2e}, allowed {2 * eps * largest:.2e}")
        if not bool((loss <= eps + 4 * base_loss.abs() + ROUNDING).all()):
            wrong.append(f"{backend}: log sum {held(loss).largest:.2e} below, allowed {eps:.2e}")
        if any(bool((x.isfinite() < other.isfinite()).any()) for x, other in zip(gradients, others, strict=True)):
            wrong.append(f"{backend}: a gradient is not finite")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--triton-cases", type=int, default=100, help="more, under Triton's interpreter")
    parser.add_argument("--certified-cases", type=int, default=2000, help="more, of certified windows")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--triton-keys", type=int, default=FEW_KEYS, help="the most keys of these")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of Triton's cases")
    parser.add_argument("--only", type=int, help="this case alone")
    options = parser.parse_args(arguments)
    first = options.seed
    runs = [*range(first, first + options.cases), *(-1 - n for n in range(first, first + options.triton_cases))]
    certified = range(first, first + options.certified_cases)
    if options.only is not None:
        runs, certified = [options.only], range(0)
        print(draw(abs(options.only), options.only < 0, options.triton_keys))
    faulty = 0
    for seed in runs:
        case, backends = draw(abs(seed), seed < 0, options.triton_keys), ("cpu",) if seed >= 0 else ("triton",)
        wrong = faults(case, backends, device=options.device) and faults(case, backends, MORE_DRAWS, options.device)
        if wrong:
            faulty += 1
            print(f"--only {seed}:", *(wrong if options.only is not None else wrong[:1]), sep="\n  ", flush=True)
    for seed in certified:
        if wrong := certified_faults(*certified_case(seed)):
            faulty += 1
            print(f"certified case {seed}: {wrong}", flush=True)
    print(f"{len(runs) + len(certified):,} cases, {faulty:,} faults")
    return int(faulty > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
