"""Time of the operator and of decoding beside PyTorch's scaled dot-product attention (SDPA), of the same states.

A case is compared with the reference in float64 before it is timed. Then all contestants have turns in one process, and
each round gives one ratio. Threads are those of the process, as a user has it: `torch.set_num_threads` would also
change how MKL divides its work, and make SDPA slower.
"""

import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.checks import check_range, require
from rfa.dynamics import rotate
from rfa.environment import environment
from rfa.models import PRESETS, preset
from rfa.nn import FilterCache, RobustFilterAttention
from rfa.nn.cache_layer import AHEAD, TurnTable
from rfa.ops import choose_backend, robust_filter_attention
from rfa.ops.backends import BACKENDS
from rfa.ops.prior import eps_of_dtype
from rfa.ops.problem import certificate_missing

WHAT = ("operator", "decode")
LENGTHS = {"operator": (512, 2048, 8192), "decode": (8192,)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RUN = AHEAD  # tokens of a decoding call: a cache makes phases for as many at a time, so each call makes them once
ALL_KEYS = "all-keys"  # the operator itself without certified windows
TURN = 0.1  # seconds, the shortest turn; a short call is repeated within a turn
_PIECE = 8192  # tokens that enter a cache at once
_CHECKED_SCORES = 2**20  # most scores of the reference; with gradients they need about 200 MB
_CHECKED_ROWS = 64
Groups = Mapping[str, Sequence[Any]]  # pairs of actual and expected, and a tolerance
TOLERANCES = {  # of the estimate, of gradients of states, and of parameters: sums of more terms cancel more
    "float32": (1e-5, 1e-3, 1e-3),
    "float16": (2e-3, 5e-3, 5e-2),
    "bfloat16": (2e-2, 4e-2, 2e-1),
}


@dataclass(frozen=True)
class Case:
    """One preset at one shape of the states, for the operator or for decoding.

    Fields:
        what: one of `WHAT`.
        preset: of the layer whose dynamics and options the operator has.
        shape: `(batch, heads, length, channels)`; for decoding, `length` is that of the cached tokens.
        device, dtype, backend: of the states, and of the operator.
        repeats: number of rounds.
        certified: leave out keys by the layer's certificate, and stand beside the same with all keys too.

    Raises:
        ValueError: for an unknown value, or one that cannot run on this machine.
    """

    what: str
    preset: str
    shape: tuple[int, int, int, int]
    device: str = "cpu"
    dtype: str = "float32"
    backend: str = "auto"
    repeats: int = 7
    certified: bool = False

    def __post_init__(self):
        require(self.what in WHAT, "bench", self.what, f"one of {', '.join(WHAT)}")
        require(self.device in ("cpu", "cuda"), "device", self.device, "'cpu' or 'cuda'")
        require(self.device == "cpu" or torch.cuda.is_available(), "device", self.device, "'cpu': there is no CUDA")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        sizes = dict(zip(("batch", "heads", "lengths", "channels"), self.shape, strict=True))
        for name, size in {**sizes, "repeats": self.repeats}.items():
            check_range(name, size, 1, 2**31 - 1)
        names = ("auto", *BACKENDS)
        require(self.backend in names, "backend", self.backend, f"one of {', '.join(names)}")
        layer = filter_layer(self.preset, sizes["heads"], sizes["channels"])
        missing = certificate_missing(layer.options.prior, layer.causal) if self.certified else None
        require(missing is None, "--certified", self.preset, "a preset with prior='riccati', as rfa")
        if self.backend != "auto":  # for "auto" this would already compile kernels
            choose_backend(self.backend, self.device, DTYPES[self.dtype], self.shape[-1:])

    def lines(self) -> Iterator[dict[str, Any]]:
        """Check, then measure: a line of results for each pass and peer. One line alone says that a check failed."""
        problem = CaseInputs(self)
        line = {"benchmark": self.what, **asdict(self), "threads": torch.get_num_threads()} | {"certified": problem.eps}
        line |= dict(zip(("batch", "heads", "length", "channels"), self.shape, strict=True))
        line["backend"] = choose_backend(self.backend, self.device, problem.dtype, self.shape[-1:])
        decoding = self.what == "decode"
        with torch.set_grad_enabled(not decoding):
            for part in (_decoding_lines if decoding else _operator_lines)(problem):
                yield {**line, **part}


class CaseInputs:
    """Random states, a random gradient of the estimate, and a layer whose dynamics need gradients."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        self.case, self.dtype, self.tolerances = case, DTYPES[case.dtype], TOLERANCES[case.dtype]
        self.eps = eps_of_dtype("auto", self.dtype) if case.certified else None
        batch, heads, length, channels = case.shape
        self.cached = length
        self.layer = filter_layer(case.preset, heads, channels, case.device)
        length += RUN if case.what == "decode" else 0
        states = torch.randn(4, batch, heads, length, channels).to(case.device, self.dtype)
        *self.states, self.grad = (state.clone() for state in states)
        for state in self.states:
            state.requires_grad_()

    @property
    def differentiated(self) -> list[Tensor]:
        """The tensors whose gradients are computed: the states and the numbers of the layer's dynamics."""
        return [*self.states, *dynamics_of(self.layer)]

    def estimate(self) -> Tensor:
        """One call of the public operator."""
        return call_operator(self.layer, self.states, self.case.backend, certified=self.eps)

    def gradients(self) -> tuple[Tensor, ...]:
        """One call and its backward pass."""
        return torch.autograd.grad(self.estimate(), self.differentiated, self.grad)

    def with_all_keys(self) -> "CaseInputs":
        """The same problem without certified windows."""
        other = copy.copy(self)
        other.eps = None
        return other

    def check(self) -> dict[str, Any]:
        """Compare values and gradients at some rows with float64.

        The loss is `<estimate, grad>` over these rows. Half of `grad` is the estimate itself. With pure noise a
        parameter's gradient, a sum over all pairs, would cancel, and only the rounding of single pairs would remain.
        """
        batch, heads, length, _ = self.states[0].shape
        count = max(1, min(_CHECKED_ROWS, length, _CHECKED_SCORES // (batch * heads * length)))
        # only late rows: the gradient of the first row is pure rounding error, and would hide those of the others
        rows = torch.linspace(length // 2, length - 1, count).round().long().unique().to(self.case.device)
        states = [state.detach().clone().requires_grad_() for state in self.states]
        exact = copy.deepcopy(self.layer).double()
        exact_states = [state.detach().double().requires_grad_() for state in states]
        query, key, value = exact_states
        expected = call_operator(exact, [query[:, :, rows], key, value], "reference", query_times=rows)
        signal = expected.detach() / expected.detach().square().mean().sqrt()
        grad = torch.zeros_like(states[0])
        grad[:, :, rows] = self.grad[:, :, rows] + signal.to(grad.dtype)
        wanted = [*exact_states, *dynamics_of(exact)]
        expected_gradients = torch.autograd.grad(expected, wanted, grad[:, :, rows].double())
        actual = call_operator(self.layer, states, self.case.backend, certified=self.eps)
        gradients = torch.autograd.grad(actual, [*states, *dynamics_of(self.layer)], grad)
        pairs = list(zip(gradients, expected_gradients, strict=True))
        of = [(actual[:, :, rows], expected)], pairs[:3], pairs[3:]
        names = "estimate", "gradients of states", "gradients of parameters"
        return compare_with_tolerances({name: each for name, *each in zip(names, of, self.tolerances, strict=True)})


def filter_layer(name: str, heads: int, channels: int, device: str = "cpu") -> RobustFilterAttention:
    """The attention layer of a preset, with gradients of all its dynamics. `ValueError` for a preset without a filter.

    Its decay has a gradient, learned or not: who calls the operator may ask for it.
    """
    require(name in PRESETS, "presets", name, f"some of {', '.join(PRESETS)}")
    require(channels >= 4 and channels % 4 == 0, "channels", channels, "a multiple of 4: pairs of complex modes")
    layer = preset(name, hidden_size=heads * channels // 2, num_attention_heads=heads).build_attention()
    require(isinstance(layer, RobustFilterAttention), "presets", name, "a filter")
    layer = cast(RobustFilterAttention, layer).to(device)  # first: moved later, a buffer with a gradient is no leaf
    for tensor in dynamics_of(layer):
        tensor.requires_grad_()
    return layer


def dynamics_of(layer: RobustFilterAttention) -> list[Tensor]:
    """The parameters of a layer's dynamics, and its decay where it is not learned."""
    fixed = [tensor for name, tensor in layer.dynamics.named_buffers() if name == "decay"]
    return [*layer.dynamics.parameters(), *fixed]


def call_operator(layer: RobustFilterAttention, states: list[Tensor], backend: str, **options: Any) -> Tensor:
    """Call the public operator with a layer's dynamics and options."""
    chosen = ("weight", "rotate_values", "prior", "gate", "query_noise_in_bias")
    given: dict[str, Any] = {name: getattr(layer.options, name) for name in chosen}
    given |= {**layer.dynamics(), **options}
    estimate = robust_filter_attention(*states, **given, backend=backend)
    return cast(Tensor, estimate)  # a tuple only with return_log_precision


def compare_with_tolerances(groups: Groups) -> dict[str, Any]:
    """The largest relative error of each group, and whether all are within their tolerances.

    An error that is not finite does not pass. It is returned as None, because JSON cannot contain it.
    """

    def off(actual: Tensor, expected: Tensor) -> float:
        """The norm of the error over that of the expected value; itself, if all expected values are zero."""
        actual, expected = actual.detach().double(), expected.detach().double()
        return (actual - expected).norm().item() / (expected.norm().item() or 1.0)

    errors = {name: [off(*pair) for pair in pairs] for name, (pairs, _) in groups.items()}
    tolerances = {name: tolerance for name, (_, tolerance) in groups.items()}
    return {
        "passed": all(error <= tolerances[name] for name, each in errors.items() for error in each),
        "tolerances": tolerances,
        "errors": {name: max(each) if all(map(math.isfinite, each)) else None for name, each in errors.items()},
    }


def in_turns(contestants: Mapping[str, Callable[[], object]], case: Case) -> dict[str, list[float]]:
    """Seconds of a call of each contestant, in each round.

    All run in one process, after a warm-up. Every second round has the opposite order, so that neither a drift of the
    machine nor the cache content of the one before favours a contestant. On CUDA the device's own clock is used.
    """
    calls = {}
    for name, call in contestants.items():
        _seconds_of_call(call, 1, case.device)  # the first one may compile something
        calls[name] = max(1, math.ceil(TURN / max(_seconds_of_call(call, 1, case.device), 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(case.repeats):
        for name in contestants if repeat % 2 == 0 else reversed(list(contestants)):
            seconds[name].append(_seconds_of_call(contestants[name], calls[name], case.device))
    return seconds


def _seconds_of_call(call: Callable[[], object], calls: int, device: str) -> float:
    gpu = device == "cuda"
    began = time.perf_counter()
    if gpu:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
    for _ in range(calls):
        call()
    if gpu:
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000 / calls
    return (time.perf_counter() - began) / calls


def compare(seconds: Mapping[str, Sequence[float]], peer: str) -> dict[str, Any]:
    """The fields of a line of results: the ratio of each round, a summary of the ratios, and the times."""
    ratios = [mine / theirs for mine, theirs in zip(seconds["rfa"], seconds[peer], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "peer": peer,
        "ratio": {"median": median, "q1": low, "q3": high},
        "ratios": ratios,
        "seconds": {"rfa": list(seconds["rfa"]), "peer": list(seconds[peer])},
    }


def _operator_lines(problem: CaseInputs) -> Iterator[dict[str, Any]]:
    """Forward, then forward and backward: all gradients of the operator, those of the states of SDPA."""
    check = {"check": problem.check()}
    if not check["check"]["passed"]:
        yield check
        return
    states = problem.states
    for each in ("forward", "forward_backward"):
        backward = each == "forward_backward"

        def sdpa(backward: bool = backward) -> object:
            out = F.scaled_dot_product_attention(states[0], states[1], states[2], is_causal=True)
            return torch.autograd.grad(out, states, problem.grad) if backward else out

        contestants = {"rfa": problem.gradients if backward else problem.estimate, "sdpa": sdpa}
        if problem.eps is not None:
            other = problem.with_all_keys()
            contestants[ALL_KEYS] = other.gradients if backward else other.estimate
        with torch.set_grad_enabled(backward):
            seconds = in_turns(contestants, problem.case)
        for peer in [*contestants][1:]:
            yield {**check, "pass": each, **compare(seconds, peer)}


def _decoding_lines(problem: CaseInputs) -> Iterator[dict[str, Any]]:
    """A token among the `RUN` that follow many cached ones. Projections are the same in both and are left out."""
    filtered = FilterRun(problem)
    line: dict[str, Any] = {"pass": "one token", "check": _check_decoding(problem, filtered)}
    if not line["check"]["passed"]:
        yield line
        return
    contestants: dict[str, Callable[[], object]] = {"rfa": filtered, "sdpa": dot_product_run(problem)}
    held = {"sdpa": sum(state.nbytes for state in problem.states[1:])}
    if problem.eps is not None:
        contestants[ALL_KEYS] = full = FilterRun(problem.with_all_keys())
        held[ALL_KEYS] = full.cache_bytes()
    runs = in_turns(contestants, problem.case)
    seconds = {name: [run / RUN for run in each] for name, each in runs.items()}
    for peer, size in held.items():
        sizes = {"cache_bytes": {"rfa": filtered.cache_bytes(), "peer": size}}
        yield {**line, **compare(seconds, peer), **sizes, "uncertified": filtered.cache.uncertified}


def _check_decoding(problem: CaseInputs, filtered: "FilterRun") -> dict[str, Any]:
    """Compare the first and the last token with float64; of all, the reference would need much memory."""
    exact, ends = copy.deepcopy(problem.layer).double(), torch.tensor([0, RUN - 1], device=problem.case.device)
    places, (query, key, value) = problem.cached + ends, problem.states
    states = [state.double() for state in (query[:, :, places], key, value)]
    expected = call_operator(exact, states, "reference", query_times=places)
    found = torch.cat(filtered(), dim=2)[:, :, ends]
    return compare_with_tolerances({"estimate": ([(found, expected)], problem.tolerances[0])})


class FilterRun:
    """Decodes a problem's last `RUN` tokens with all others in a cache, and removes them again.

    Its time includes the phases of these tokens, the rotations of the new states and of the estimates, and the writes
    to the cache. It does not include what a decoder makes once for a whole text: the layer's dynamics, and tables of
    the prior. Only the first call drops keys that can count for no head.
    """

    @torch.no_grad()
    def __init__(self, problem: CaseInputs):
        self.layer, self.device = problem.layer, torch.device(problem.case.device)
        self.layer.backend = problem.case.backend
        self.batch = len(problem.grad)
        self.cache = FilterCache(certified=problem.eps)
        frequency, turned = self.layer.dynamics()["frequency"], (True, self.layer.rotate_values)
        for start in range(0, problem.cached, _PIECE):
            end = min(start + _PIECE, problem.cached)
            times = self.cache.locate(self.batch, end - start, self.device, None, None, None).query_times
            entering = [state.detach()[:, :, start:end] for state in problem.states[1:]]
            self.cache.layer(0).update(
                *(
                    rotate(state.float(), frequency, times, inverse=True).to(state.dtype) if turns else state
                    for state, turns in zip(entering, turned, strict=True)
                )
            )
        self.tokens = _last_tokens(problem)

    def __call__(self) -> list[Tensor]:
        """The estimates of the run."""
        held = self.cache.layer(0)
        held.turns = TurnTable()  # those of the last call, whose tokens had the same places
        estimates = []
        for query, key, value in self.tokens:
            positions = self.cache.locate(self.batch, 1, self.device, None, None, None)
            estimates.append(self.layer.estimate_with_cache(query, key, value, held, positions=positions))
        held.crop(-RUN)
        return estimates

    def cache_bytes(self) -> int:
        """The bytes of the keys, the values and the norms that the cache holds."""
        held = self.cache.layer(0)
        return sum(state.nbytes for state in (held.keys, held.values, held.key_norms) if state is not None)


def dot_product_run(problem: CaseInputs) -> Callable[[], list[Tensor]]:
    """A closure of the same steps for SDPA: write key and value into a cache with room for them, then attend to it."""
    cached = [state.detach().clone() for state in problem.states[1:]]
    tokens = _last_tokens(problem)

    def run() -> list[Tensor]:
        estimates = []
        for length, (query, *new) in enumerate(tokens, problem.cached + 1):
            for room, state in zip(cached, new, strict=True):
                room[:, :, length - 1 : length] = state
            keys, values = (room[:, :, :length] for room in cached)
            estimates.append(F.scaled_dot_product_attention(query, keys, values))
        return estimates

    return run


def _last_tokens(problem: CaseInputs) -> list[tuple[Tensor, ...]]:
    """Query, key and value of each of the last `RUN` tokens."""
    parts = (state.detach()[:, :, -RUN:].split(1, dim=2) for state in problem.states)
    return list(zip(*parts, strict=True))


def cases(
    what: str, presets: Sequence[str], lengths: Sequence[int], batch: int | None, heads: int, channels: int, **more: Any
) -> list[Case]:
    """A case for each preset and length, with further fields of `Case`.

    By default there are about 2,048 tokens on a CPU, in at most 4 sequences, 16 sequences on a GPU, one in decoding.
    """
    made = []
    for name in presets:
        for length in lengths or LENGTHS.get(what, (1,)):
            usual = 16 if more.get("device") == "cuda" else min(4, max(1, 2048 // max(length, 1)))
            number = (usual if what == "operator" else 1) if batch is None else batch
            made.append(Case(what, name, (number, heads, length, channels), **more))
    return made


def run(made: Sequence[Case], out: Path) -> Iterator[dict[str, Any]]:
    """Measure each case, and append each of its lines to the file `out`, as JSON, before it is yielded."""
    require(not out.exists() or out.is_file(), "--out", str(out), "the path of a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:  # first, so that an error comes before the first measurement
        for case in made:
            for line in case.lines():
                at = datetime.now(UTC).isoformat(timespec="seconds")
                line |= {"processor": torch.backends.cpu.get_cpu_capability(), "environment": environment(), "time": at}
                file.write(json.dumps(line, allow_nan=False) + "\n")
                file.flush()
                yield line


def summary_line(line: Mapping[str, Any]) -> str:
    """A line of results in words: what, its size, the ratio to the peer with its quartiles, and both times."""
    size = " x ".join(str(line[name]) for name in ("batch", "heads", "length", "channels"))
    model = f"{line['preset']} ({line['backend']}{', certified' * (line['certified'] is not None)})"
    what = f"{line['benchmark']} {size} {line['dtype']}, {model}"
    if "ratio" not in line:
        return f"{what}: check failed: {line['check']['errors']}"
    ratio, ours, theirs = line["ratio"], *(statistics.median(line["seconds"][name]) for name in ("rfa", "peer"))
    form = f"{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f}), {1e3 * ours:.4g} / {1e3 * theirs:.4g} ms"
    held = line.get("cache_bytes")
    cache = f", cache {held['rfa'] / 1e6:.1f} / {held['peer'] / 1e6:.1f} MB" if held else ""
    return f"{what}, {line['pass'].replace('_', ' and ')} / {line['peer']}: {form}{cache}"
