"""The kernels of whole problems (`rfa.ops.triton`): values and gradients, windows, launches, repeatability."""

import math
from typing import Any

import pytest
import torch

from rfa.dynamics import rotation_of_heads
from rfa.ops.backends import BACKENDS
from rfa.ops.positions import checked_positions
from rfa.ops.problem import Options, Parameters, Problem

operator = pytest.importorskip("rfa.ops.triton.operator")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# of estimates and gradients of states; of parameters, whose gradients cancel where the cotangent is noise
TOLERANCES = {BF16: (0.04, 0.4), FP16: (2e-3, 0.05), FP32: (6e-6, 2e-4)}
COPIES = (0.02, 0.05)  # in float16: a gradient where q = k consists of rounding, as `q - E k` does

CASES: dict[str, dict[str, Any]] = {
    "lengths around a tile": {"length": 129},
    "one key": {"length": 1, "dtype": FP32},
    "riccati": {"length": 140, "prior": "riccati"},
    "log precision": {"length": 130, "dtype": FP16, "log_sum": True},
    "small cotangents in float16": {"length": 130, "dtype": FP16, "cotangent": 1e-3},
    "fewer queries": {"length": 134, "queries": 70},
    "a head too fast to fold": {"length": 130, "decays": (0.5, 0.01, 3.0)},
    "large norms": {"length": 130, "scale": 60.0},
    "queries that are keys": {"length": 130, "scale": 4.0, "copies": True, "dtype": FP16},
    "no decay, a large exponent": {"length": 130, "decays": (0.0, 0.0, 0.0), "robustness": 23.0},
    "padding": {"length": 130, "present": (130, 70)},
    "float32": {"length": 70, "dtype": FP32},
    "no gate": {"length": 70, "dtype": FP32, "gate": False},
    "noise in the bias, a horizon": {"length": 130, "query_noise_in_bias": True, "horizon": 2.5, "dtype": FP16},
}


def _problem(
    length: int, queries: int, dtype: torch.dtype, decays: tuple[float, ...], scale: float, robustness: float,
    copies: bool, horizon: float | None,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    generator = torch.Generator().manual_seed(length)
    heads, channels = len(decays), 16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform() -> torch.Tensor:
        return torch.rand(heads, generator=generator)

    base = normal(1, heads, 1, channels)
    query, key, value = (scale * (base + 0.5 * normal(2, heads, n, channels)) for n in (queries, length, length))
    if copies:
        query = key[:, :, length - queries :].clone()
    parameters = {
        "decay": torch.tensor(decays), "frequency": 0.5 * torch.rand(heads, channels // 2, generator=generator),
        "process_noise": 0.001 + 0.02 * uniform(), "key_noise": 0.3 + uniform(), "query_noise": 0.3 + uniform(),
        "noise_floor": 0.01 + 0.1 * uniform(), "robustness": robustness + uniform(),
        "inverse_temperature": 0.7 + 0.3 * uniform(),
    }  # fmt: skip
    if horizon is not None:
        parameters["horizon"] = torch.full((heads,), horizon)
    states = [x.to(DEVICE, dtype) for x in (query, key, value)]
    return states, {name: x.to(DEVICE) for name, x in parameters.items()}


def _results(
    states: Any,
    parameters: Any,
    options: Options,
    positions: Any,
    backend: str,
    log_sum: bool,
    exact: bool,
    size: float = 1.0,
):  # fmt: skip
    kind = torch.float64 if exact else states[0].dtype
    leaves = [x.detach().to(kind).requires_grad_() for x in states]
    held = {
        name: x.detach().to(torch.float64 if exact else x.dtype).requires_grad_(name in operator.LEARNED)
        for name, x in parameters.items()
    }
    estimate, log_precision = BACKENDS[backend].run(*leaves, Problem(Parameters(**held), positions, options))
    noise = torch.randn(estimate.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    # half of the cotangent is the estimate itself: with noise alone the parameters' gradients cancel
    signal = noise + estimate.detach().float() / estimate.detach().float().square().mean().sqrt()
    loss = (estimate.double() * (size * signal).to(states[0].dtype).double()).sum()
    if log_sum and log_precision is not None:
        loss = loss + log_precision.double().sum()
    loss.backward()
    of_parameters = [
        g if g is not None else torch.zeros_like(held[n]) for n in operator.LEARNED for g in [held[n].grad]
    ]
    return [estimate, log_precision, *(x.grad for x in leaves)], of_parameters


def _error(actual: torch.Tensor, expected: torch.Tensor, size: float = 1.0) -> float:
    finite = expected.isfinite()
    assert torch.equal(finite, actual.isfinite())
    difference, whole = (actual.double() - expected)[finite], expected[finite]
    return float(difference.norm() / whole.norm().clamp(min=0.3 * size))  # what should be 0 is so but for rounding


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    """Against the reference in float64."""
    given = {"dtype": BF16, "decays": (0.0, 0.004, 0.05), "scale": 1.0, "robustness": 2.0, "log_sum": False} | CASES[
        name
    ]
    length, dtype, log_sum = given.pop("length"), given.pop("dtype"), given.pop("log_sum")
    queries, present, size = given.pop("queries", length), given.pop("present", None), given.pop("cotangent", 1.0)
    states, parameters = _problem(
        length, queries, dtype, given.pop("decays"), given.pop("scale"), given.pop("robustness"),
        given.pop("copies", False), given.pop("horizon", None),
    )  # fmt: skip
    mask = (
        None
        if present is None
        else torch.arange(length, device=DEVICE)[None] < torch.tensor(present).to(DEVICE)[:, None]
    )
    positions = checked_positions(2, queries, length, states[0].device, None, None, mask)
    options = Options(**{**given, "log_precision": True})
    assert operator.serves(Problem(Parameters(**parameters), positions, options))
    actual = _results(states, parameters, options, positions, "triton", log_sum, exact=False, size=size)
    expected = _results(states, parameters, options, positions, "reference", log_sum, exact=True, size=size)
    of_states, of_parameters = COPIES if "copies" in CASES[name] else TOLERANCES[dtype]
    errors = [_error(a, e, size) for a, e in zip(actual[0], expected[0], strict=True)]
    assert max(errors) < of_states, errors
    errors = [_error(a, e, size) for a, e in zip(actual[1], expected[1], strict=True)]
    assert max(errors) < of_parameters, errors


def test_windows() -> None:
    """Keys before a block's first tile take no part, in values and gradients."""
    states, parameters = _problem(256, 256, FP32, (0.01, 0.05), 1.0, 2.0, False, None)
    first = torch.tensor([[[0, 0, 1, 3], [0, 1, 1, 2]]], dtype=torch.int32, device=DEVICE)
    leaves = [x.clone().requires_grad_() for x in states]
    problem = Problem(Parameters(**parameters), checked_positions(2, 256, 256, leaves[0].device, None), Options())
    actual, log_sum = operator.filter_attention(*leaves, problem, first)
    exact = [x.double().requires_grad_() for x in states]
    expected, expected_sum = _windowed(*exact, {n: x.double() for n, x in parameters.items()}, first)
    for estimate in (actual, expected):
        estimate.sin().sum().backward()
    assert _error(actual, expected) < 3e-6
    assert _error(log_sum * math.log(2), expected_sum) < 3e-6
    for x, y in zip(leaves, exact, strict=True):
        assert _error(x.grad, y.grad) < 3e-6


def _windowed(query, key, value, held, first):  # type: ignore[no-untyped-def]
    times = torch.arange(256, dtype=torch.float64, device=DEVICE)
    cos, sin = rotation_of_heads(held["frequency"], times[None, None])

    def turn(x, sign):  # type: ignore[no-untyped-def]
        real, imaginary = x.chunk(2, -1)
        return torch.cat([cos * real - sign * sin * imaginary, cos * imaginary + sign * sin * real], -1)

    query, key, value = turn(query, -1), turn(key, -1), turn(value, -1)
    of = {name: x[:, None, None] for name, x in held.items() if x.dim() == 1}
    lag = (times[:, None] - times).clamp(min=0)
    decay = torch.exp(-of["decay"] * lag)
    phi = (1 - decay**2) / (2 * of["decay"])
    variance = of["process_noise"] * phi + of["key_noise"] * decay**2 + of["noise_floor"]
    scale = of["robustness"] * 8 * (variance + of["query_noise"])
    squares = query.square().sum(-1)[..., None] + decay**2 * key.square().sum(-1)[..., None, :]
    distance = squares - 2 * decay * (query @ key.mT)
    score = -variance.log() - (of["robustness"] + 1) * torch.log1p(distance / scale)
    place = torch.arange(256, device=DEVICE)
    seen = (place[:, None] >= place) & (place >= 64 * first.long().repeat_interleave(64, -1)[..., None])
    score = (of["inverse_temperature"] * score).masked_fill(~seen, -torch.inf)
    return turn((score.softmax(-1) * decay) @ value, 1), score.logsumexp(-1)


def test_repeatable() -> None:
    """Two backward passes agree bit by bit."""
    states, parameters = _problem(130, 130, BF16, (0.0, 0.05), 1.0, 2.0, False, None)
    positions = checked_positions(2, 130, 130, states[0].device, None)
    first, second = (_results(states, parameters, Options(), positions, "triton", False, exact=False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0][2:] + first[1], second[0][2:] + second[1], strict=True))


class _Recorded:
    """A kernel that notes its launches and computes nothing."""

    def __init__(self, kernel: Any, launches: list[str]):
        self.arg_names, self._name, self._launches = kernel.arg_names, kernel.__name__, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launches.append(self._name)
        return lambda *arguments, **constants: self


@pytest.mark.parametrize(("learned", "launches"), [(True, 6), (False, 5)])
def test_launches(monkeypatch: pytest.MonkeyPatch, learned: bool, launches: int) -> None:
    """Six of a forward and backward pass; five where no parameter asks for its gradient."""
    found: list[str] = []
    for name in ("prologue_kernel", "forward_kernel", "delta_kernel", "key_kernel", "query_kernel", "epilogue_kernel"):
        monkeypatch.setattr(operator, name, _Recorded(getattr(operator, name), found))
    monkeypatch.setattr(operator, "_plans", {})
    states, parameters = _problem(70, 70, BF16, (0.0, 0.05), 1.0, 2.0, False, None)
    leaves = [x.requires_grad_() for x in states]
    for name in operator.LEARNED:
        parameters[name].requires_grad_(learned)
    problem = Problem(Parameters(**parameters), checked_positions(2, 70, 70, leaves[0].device, None), Options())
    operator.filter_attention(*leaves, problem)[0].sum().backward()
    assert len(found) == launches


def test_compiled() -> None:
    """One graph, with the same values."""
    states, parameters = _problem(70, 70, FP32, (0.0, 0.05), 1.0, 2.0, False, None)
    problem = Problem(Parameters(**parameters), checked_positions(2, 70, 70, states[0].device, None), Options())

    def call(*given: torch.Tensor) -> torch.Tensor:
        estimate: torch.Tensor = operator.filter_attention(*given, problem)[0]
        return estimate

    leaves = [x.requires_grad_() for x in states]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves)
    assert torch.equal(compiled, call(*leaves))
    compiled.sum().backward()
    assert all(x.grad is not None for x in leaves)
