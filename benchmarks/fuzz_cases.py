"""Random cases of the fuzz command, and the operator in float64 from its formulas, which can round every number."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

STATES = ("query", "key", "value")
FEW_KEYS = 35  # of the cases for Triton that go pair by pair
FIXED = ("decay", "frequency", "horizon")  # whose gradients its kernels of whole problems do not give
PARAMETERS = ("process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")

TINY = torch.finfo(torch.float32).tiny  # replaces a noise of zero, in float64 too
LEAST_OF_EXPONENTIAL = TINY**0.625  # the smallest Sigma~ whose scores do not overflow in float32
SHARP = 0.75  # a row with a larger weight must keep more digits


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


def draw(seed: int, for_triton: bool = False, most_keys: int = FEW_KEYS, keys: int | None = None) -> Case:
    """The case of a seed. Cases for Triton have head sizes that it supports and, for its slow interpreter, few keys.

    Half of them are for its kernels of whole problems.
    """
    chance = Chance(seed)
    whole = for_triton and chance.once_in(2)
    batch, heads = chance.choice(1, 1, 2, 3), chance.choice(1, 1, 2, 3)
    lengths = 0, 1, 2, 3 + chance.below(10), 3 + chance.below(10), 1 + chance.below(40), 97 + chance.below(60)
    drawn = chance.choice(*lengths)
    keys = drawn if keys is None else keys
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
    options |= _marks(chance, batch, keys, queries <= keys)
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


def _marks(chance: Chance, batch: int, keys: int, segments: bool) -> dict[str, Tensor]:
    """Which keys are there, and segments, where there is such a mark."""
    marks = {}
    if chance.once_in(3):
        marks["key_mask"] = chance.uniform(0, 1, batch, keys) < chance.choice(0.1, 0.5, 0.95)
    if chance.once_in(4) and segments:
        ids = torch.randint(0, chance.choice(2, 8), (batch, keys), generator=chance.generator)
        marks["segment_ids"] = ids if chance.once_in(2) else ids.sort(-1).values
    return marks


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


def certified_case(seed: int) -> tuple[dict[str, Any], float]:
    """The arguments of a call with the Riccati prior, of lengths around the edges of tiles, and an eps.

    In half of the cases old keys agree with the queries and new ones do not, or all are equal: then sums come near the
    bound.
    """
    chance = Chance(seed)
    edge = chance.choice(2, 12, 96, 128, 192, 256, 384) + chance.below(3) - 1
    case = draw(seed, keys=edge + chance.choice(0, 0, 128, 300))
    given = {**case.inputs, **case.options, "causal": True, "prior": "riccati", "query_noise_in_bias": False}
    agree, border = chance.choice("random", "random", "equal", "old keys"), chance.below(edge)
    if agree != "random":
        given |= {name: torch.ones_like(given[name]) for name in ("query", "key")}
        given["key"][:, :, border:] *= 1.0 if agree == "equal" else -chance.choice(1.0, 3.0, 30.0)
        given["value"] = (
            torch.where(torch.arange(given["key"].shape[2]) < border, 1, -1)[:, None] * given["value"].abs()
        )
    return given, chance.choice(2.0**-24, 1e-5, 2.0**-12, 1e-3, 1e-2, 0.3)


def _rounded(x: Tensor, eps: float, generator: torch.Generator | None) -> Tensor:
    """`(1 + eps n) x` with normal n. Without a generator: x rounded to nearest, with a spacing of eps near 1."""
    if generator is not None:
        return x * (1 + eps * torch.randn(x.shape, generator=generator, dtype=x.dtype))
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * (2 / eps)).round() * (eps / 2), exponent).where(x.isfinite(), x)


class _Rounded(torch.autograd.Function):
    """`_rounded` of x, and in the backward pass `_rounded` of its gradient."""

    @staticmethod
    def forward(ctx, x, eps, generator):
        ctx.rest = eps, generator
        return _rounded(x, eps, generator)

    @staticmethod
    def backward(ctx, grad):
        eps, generator = ctx.rest
        return _rounded(grad, eps, generator), None, None


class Oracle:
    """The operator from its formulas, in float64.

    eps: every intermediate number is rounded with this relative error; 0 for no rounding.
    half: relative error of numbers that are rounded to half precision.
    whole: as Triton's kernels of whole problems in half precision. They round weights before their sum, so that the
        gradients of a row's scores sum to 0 but for that, and keys and values once more.
    seed: of random rounding; 0 for rounding to nearest.
    farther: 1 shifts squared distances up by their rounding error, -1 shifts them down. A distance that becomes zero
        has no gradient.
    """

    def __init__(
        self,
        eps: float = 0.0,
        half: float = 0.0,
        seed: int = 0,
        farther: int = 0,
        whole: bool = False,
        sharp: float = SHARP,
    ):
        self.eps, self.half = eps, max(half, eps)
        self.generator = torch.Generator().manual_seed(seed) if seed else None
        self.farther, self.whole, self.sharp = farther, whole, sharp
        self.grads: dict[str, Tensor] = {}  # of each pair's E, Sigma and r, and of each step's measurement noise

    def rounded(self, x: Tensor, eps: float | None = None) -> Tensor:
        """x and its gradient, both rounded."""
        return _Rounded.apply(x, eps or self.eps, self.generator) if self.eps else x

    def watched(self, name: str, x: Tensor) -> Tensor:
        """x. The backward pass stores its gradient in `grads`."""
        if x.requires_grad:
            x.register_hook(lambda grad: self.grads.update({name: grad.abs()}))
        return x

    def turned(self, x: Tensor, phase: Tensor | None) -> Tensor:
        """x rotated by the phase, real parts first; without a phase x itself. The result is rounded."""
        if phase is not None:
            real, imaginary = x.chunk(2, dim=-1)
            if self.generator is not None and self.eps:  # phases are computed in float64
                phase = phase + 2.0**-51 * phase * torch.randn(phase.shape, generator=self.generator, dtype=phase.dtype)
            turned = torch.complex(real, imaginary) * torch.exp(1j * phase)
            x = torch.cat([turned.real, turned.imag], dim=-1)
        return self.rounded(x, self.half)

    def __call__(self, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Estimate, log precision, and which query sees which key, `(batch, queries, keys)`."""
        query, key, value = (given[name] for name in STATES)
        at_keys, at_queries, visible = positions(given)
        p = {name: given[name][:, None, None] for name in ("decay", *PARAMETERS)}
        frequency, seen = given["frequency"][:, None], visible[:, None]
        ahead = given.get("horizon", torch.zeros_like(given["decay"]))[:, None, None]
        key_phase, query_phase = (frequency * t[:, None, :, None] for t in (at_keys, at_queries))
        turns = given["rotate_values"]
        q, k = self.turned(query, -query_phase), self.turned(key, -key_phase)
        v = self.turned(value, -key_phase if turns else None)
        if self.whole:
            k, v = self.rounded(k, self.half), self.rounded(v, self.half)

        lag = (at_queries[:, :, None] - at_keys[:, None, :]).abs().masked_fill(~visible, 0.0)[:, None] + ahead
        damping = p["decay"] * lag + self.damping_error(given, at_keys, at_queries)
        decay = self.rounded(self.watched("decay", torch.exp(-damping)))
        grown = p["process_noise"] * grown_by(p["decay"], lag)
        sigma = self.watched("variance", grown + p["key_noise"] * decay.square() + p["noise_floor"])
        sigma = self.rounded(sigma)
        student = given["weight"] == "student_t"
        total = self.rounded((sigma + p["query_noise"]).clamp(min=TINY))
        variance = total if student else total.clamp(min=LEAST_OF_EXPONENTIAL)
        if self.eps:  # every backend expands the square
            squares = (self.rounded(x).square().sum(-1) for x in (q, k))
            own, other = next(squares)[..., None], decay.square() * next(squares)[..., None, :]
            both = self.rounded(2 * decay * (self.rounded(q) @ self.rounded(k).mT))
            apart = self.rounded(own.expand_as(both)) + self.rounded(other) - both
            apart = (apart + 4 * self.farther * self.eps * (own + other).detach()).clamp(min=0)
        else:
            apart = self.watched("distance", (q[..., None, :] - decay[..., None] * k[..., None, :, :]).square().sum(-1))
        distance = self.rounded(apart / (p["robustness"] * (q.shape[-1] // 2) * (variance if given["gate"] else 1.0)))
        if given["prior"] == "riccati":
            prior = self.watched("prior", self.log_weights(given, at_keys, at_queries))
        else:
            prior = -torch.log(total if given["query_noise_in_bias"] else sigma.clamp(min=TINY))
        evidence = (p["robustness"] + 1) * torch.log1p(distance) if student else distance
        score = self.rounded(p["inverse_temperature"] * (self.rounded(prior) - self.rounded(evidence)))
        if self.whole and self.generator is not None:
            noise = torch.randn(score.shape, generator=self.generator, dtype=score.dtype)
            score = score + self.half * noise  # of the logarithm of a weight
        empty = ~seen.any(-1, keepdim=True)
        score = score.masked_fill(~seen & ~empty, -torch.inf)
        attention = self.rounded(self.rounded(self.softmax(score)) * decay, self.half)
        estimate = attention @ v
        self.product_size: Tensor | float = 0.0  # norm over channels of the terms of <dout, out>
        if self.eps and estimate.requires_grad:
            value = estimate.detach()
            estimate.register_hook(
                lambda g: setattr(self, "product_size", (g * value).square().sum(-1, keepdim=True).sqrt())
            )
        estimate = self.turned(estimate, query_phase + frequency * ahead if turns else None)
        log_precision = self.rounded(score.logsumexp(-1))
        return estimate.masked_fill(empty, 0.0), log_precision.masked_fill(empty[..., 0], -torch.inf), visible

    def damping_error(self, given: dict[str, Any], at_keys: Tensor, at_queries: Tensor) -> Tensor | float:
        """The float64 error of `mu |t_i - t_j|` from `mu t_i` and `mu t_j`. Equal times have equal errors."""
        if self.generator is None or not self.eps or "times" not in given:
            return 0.0
        queries, both = at_queries.shape[1], torch.cat([at_keys, at_queries], -1)
        error = both * torch.randn(both.shape, generator=self.generator, dtype=both.dtype)
        at_key, at_query = error[:, : at_keys.shape[1]], error[:, at_keys.shape[1] :]
        if "query_times" not in given:
            at_query = at_key[:, at_key.shape[1] - queries :]
        ahead = (at_queries[:, :, None] - at_keys[:, None, :]).sign()
        error = 2.0**-53 * ahead * (at_query[:, :, None] - at_key[:, None, :])
        return (given["decay"][:, None, None] * error[:, None]).detach()

    def expm1(self, x: Tensor) -> Tensor:
        """Rounded `exp(x) - 1`. Like autograd it computes the derivative from the rounded result."""
        if not self.eps:
            return torch.expm1(x)
        result = self.rounded(torch.expm1(x.detach()))
        return result + (x - x.detach()) * (result + 1)

    def softmax(self, score: Tensor) -> Tensor:
        """The softmax over the last dimension. The backward pass uses `<dout, out>` of a rounded estimate.

        If one weight is above `sharp`, the product is exact.
        """
        weights = score.softmax(-1)
        if not self.eps or not score.shape[-1]:
            return weights
        flat = weights.detach().amax(-1, keepdim=True) <= self.sharp

        def error() -> Tensor:
            return (self.half if self.whole else self.eps) * flat * self.product_size

        total = score.logsumexp(-1, keepdim=True)
        if self.generator is not None and total.requires_grad:
            total.register_hook(lambda g: g + error() * torch.randn(g.shape, generator=self.generator, dtype=g.dtype))
        return (score - total).exp()

    def log_weights(self, given: dict[str, Any], at_keys: Tensor, at_queries: Tensor) -> Tensor:
        """`log K_j - |C_i - C_j|` of the keys that are not masked, by segment. A noise of zero is replaced by TINY."""
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
                    grown = self.rounded(q * grown_by(decay, step))
                    lost = -self.expm1(-2 * decay * step)
                    g = grown / self.watched(f"noise of {b}, {int(segment)}", r.expand_as(grown))
                    b_ = lost - g  # x = K / (1 - K) solves x^2 + x (1 - F^2 - g) - g = 0
                    root = torch.sqrt(b_.square() + 4 * g)
                    positive = b_ > 0
                    x = torch.where(positive, 2 * g / (b_ + root).where(positive, torch.ones(())), (root - b_) / 2)
                    log_rest = self.rounded(-torch.log1p(x))
                    log_gain = self.rounded(torch.log(x)) + log_rest
                    gain = torch.cat([log_gain[:, :1], log_gain], -1)
                    steps = torch.cat([steps, log_rest.cumsum(-1)], -1)
                    if self.generator is not None and self.eps:  # sums in float64
                        noise = torch.randn(steps.shape, generator=self.generator, dtype=steps.dtype)
                        steps = steps + 2.0**-53 * (steps * noise).detach()
                last = (torch.searchsorted(times.detach(), at_queries[b, of].detach(), right=True) - 1).clamp(min=0)
                found = gain[:, None] - (steps[:, last, None] - steps[:, None]).abs()
                weights = weights.index_put((torch.arange(len(decay))[:, None, None], of[None, :, None], at), found)
            rows.append(weights)
        return torch.stack(rows) if rows else torch.zeros(0, len(decay), queries, keys, dtype=torch.float64)


def grown_by(decay: Tensor, lag: Tensor) -> Tensor:
    """`(1 - exp(-2 mu tau)) / (2 mu)`. For small x = 2 mu tau a series to x^3 / 24 has an error of 1e-17."""
    x = 2 * decay * lag
    small = x < 1e-4
    series = lag * (1 - x / 2 * (1 - x / 3 * (1 - x / 4)))
    return torch.where(small, series, -torch.expm1(-x) / torch.where(small, 1.0, 2 * decay))


def positions(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Times of keys and queries since the first key, and which query sees which key, `(b, ...)` each."""
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
