"""Random cases of the fuzz command: shapes, dtypes, times, masks, segments, options, parameters and states."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

STATES = ("query", "key", "value")
FEW_KEYS = 35  # of the cases for Triton that go pair by pair
FIXED = ("decay", "frequency", "horizon")  # whose gradients its kernels of whole problems do not give
PARAMETERS = ("process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")


class Chance:
    """Draws from one generator."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def below(self, n: int) -> int:
        """A random integer from 0 to n - 1."""
        return int(torch.randint(n, (), generator=self.generator))

    def once_in(self, n: int) -> bool:
        """True with probability 1 / n."""
        return self.below(n) == 0

    def choice(self, *of: Any) -> Any:
        """One of the arguments."""
        return of[self.below(len(of))]

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers of mean 0 and variance 1."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform numbers between `low` and `high`."""
        return low + (high - low) * torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def magnitude(self, low: float, high: float, *shape: int, zeros: int = 6) -> Tensor:
        """Log-uniform numbers between 10^low and 10^high; each is 0 with probability 1 / `zeros`."""
        drawn = 10.0 ** self.uniform(low, high, *shape)
        return drawn.masked_fill(self.uniform(0, zeros, *shape) < 1, 0.0)


class Case(NamedTuple):
    """The arguments of one call."""

    inputs: dict[str, Tensor]  # states in their dtype, parameters in float32, times
    options: dict[str, Any]
    learned: list[str]  # names whose gradients are asked for
    poison: tuple[str, tuple[int, ...], float] | None  # a state, the index of one element, its NaN or infinity
    whole: bool = False  # for Triton's kernels of whole problems


def draw(seed: int, for_triton: bool = False, most_keys: int = FEW_KEYS) -> Case:
    """The case of a seed. Cases for Triton have head sizes that it supports and, for its slow interpreter, few keys.

    Half of them are for its kernels of whole problems.
    """
    chance = Chance(seed)
    whole = for_triton and chance.once_in(2)
    batch, heads = chance.choice(1, 1, 2, 3), chance.choice(1, 1, 2, 3)
    keys = chance.choice(
        0, 1, 2, 3 + chance.below(10), 3 + chance.below(10), 1 + chance.below(40), 97 + chance.below(60)
    )
    if for_triton:
        batch, keys = 1, keys if whole else min(keys, most_keys)
    modes = (
        chance.choice(8, 8, 16) if for_triton else chance.choice(1, 2, 1 + chance.below(8), 16, 1 + chance.below(40))
    )
    inputs, queries = _times(chance, batch, keys, "uniform" if whole else None)
    options: dict[str, Any] = {
        "causal": not chance.once_in(3),
        "weight": chance.choice("student_t", "exponential"),
        "prior": chance.choice("lyapunov", "riccati"),
        "gate": not chance.once_in(4),
        "rotate_values": not chance.once_in(3),
    }
    if whole:
        options |= {"causal": True, "weight": "student_t"}
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
    if wide and chance.once_in(2):  # all of similar size, so that none dominates
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
    if whole:
        learned = [n for n in learned if n not in FIXED]
    elif chance.once_in(2):
        learned.remove("frequency")  # then the kernel rotates the states, otherwise autograd does
    elif not for_triton:
        learned += [n for n in ("times", "query_times") if n in inputs and inputs[n].dtype == torch.float64]
    dtype = chance.choice(torch.float32, torch.float32, torch.bfloat16, torch.float16)
    # Triton keeps rotated states in float16, and twice the keys of whole problems: beyond its range they become NaN
    most = 2.2e4 if whole else 4.5e4 if for_triton else 6e4
    for name in STATES:
        inputs[name] = inputs[name].clamp(-most, most).to(dtype)
    poison = None
    if chance.once_in(8) and keys and queries:
        name = chance.choice(*STATES)
        index = tuple(chance.below(n) for n in inputs[name].shape)
        poison = name, index, chance.choice(math.nan, math.inf, -math.inf)
    return Case(inputs, options, learned, poison, whole)


def _times(chance: Chance, batch: int, keys: int, kind: str | None) -> tuple[dict[str, Tensor], int]:
    """Times and the number of queries.

    Times are uniform or irregular, shared by all samples or different. Queries are at the last keys, or at other times.
    """
    kind = kind or chance.choice("uniform", "irregular", "queried")
    queries = chance.choice(keys, keys, chance.below(keys + 1))
    if kind == "uniform":
        return {}, queries
    lead = chance.choice((), (batch,))
    scale = 10.0 ** chance.choice(-6, -1, 0, 0, 1, 6)
    steps = chance.uniform(0.1, 2.0, *lead, keys) * 10.0 ** (chance.uniform(0, chance.choice(0, 0, 3), *lead, keys))
    origin = chance.choice(0.0, 0.0, -3.0, 1e6 * scale, 1e9 * scale)
    times = {"times": origin + scale * steps.cumsum(-1)}
    if kind == "queried":  # between the keys, before the first and far after the last, unordered
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


def describe(case: Case) -> str:
    """The arguments of a case as text."""
    lines = []
    for name, x in case.inputs.items():
        numbers = x.tolist() if x.numel() <= 8 else f"+-{float(x.abs().max()):.3g}"
        lines.append(f"{name}: {x.dtype} {tuple(x.shape)} {numbers}")
    chosen = {n: tuple(x.shape) if isinstance(x, Tensor) else x for n, x in case.options.items()}
    return "\n".join([*lines, str(chosen), f"learned: {case.learned}", f"poison: {case.poison}"])
