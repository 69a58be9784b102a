"""The kernels of whole problems (`rfa.ops.triton`): values and gradients, windows, launches, repeatability."""

import math
from typing import Any

import pytest
import torch

from rfa.ops import reference
from rfa.ops.backends import BACKENDS
from rfa.ops.positions import checked_positions
from rfa.ops.prior import log_gains_of_lags
from rfa.ops.problem import Options, Parameters, Problem

operator = pytest.importorskip("rfa.ops.triton.operator")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16 = torch.bfloat16, torch.float16
# of estimates and gradients of states; of parameters, whose gradients cancel where the cotangent is noise
TOLERANCES = {BF16: (0.04, 0.4), FP16: (2e-3, 0.05)}
# Of parameters on a card, whose products truncate and whose exp2 and log2 are approximate. On an H200 0.8, 0.15 and 10:
# what is left after the sums cancelled, 1e-5 of their terms.
ON_A_CARD = {"copies at large norms": 1.2, "exponents around the largest that folds": 0.25, "one weight near 1": 15.0}
COPIES = (0.02, 0.05)  # in float16: a gradient where q = k consists of rounding, as `q - E k` does

CASES: dict[str, dict[str, Any]] = {
    "one key": {"length": 1, "dtype": FP16},
    "riccati, one key beyond two tiles": {"length": 129, "prior": "riccati"},
    "small cotangents in float16": {"length": 130, "dtype": FP16, "cotangent": 1e-3},
    "fewer queries, no gate": {"length": 134, "queries": 70, "gate": False, "log_sum": True},
    "a head too fast to fold": {"length": 130, "decays": (0.5, 0.01, 3.0)},
    "queries that are keys": {"length": 130, "scale": 4.0, "copies": True, "dtype": FP16},
    "no decay, a large exponent": {"length": 130, "decays": (0.0, 0.0, 0.0), "robustness": 23.0},
    "padding": {"length": 70, "present": (70, 6)},
    **{f"{n} keys": {"length": n, "dtype": FP16, "decays": (0.004,)} for n in (64, 127)},
    "one weight near 1": {"length": 70, "scale": 5.0, "copies": True, "dtype": FP16, "exponents": (12.0,) * 3},
    # without rotation and decay: else the distance of copies is that of their rounding
    "copies at large norms": {"length": 70, "scale": 60.0, "copies": True, "decays": (0.0,), "compared": (0, 4)},
    "exponents around the largest that folds": {"length": 70, "dtype": FP16, "exponents": (24.0, 24.5, 24.6)},
    "noise in the bias, a horizon": {"length": 130, "query_noise_in_bias": True, "horizon": 2.5, "dtype": FP16},
}


def _problem(
    length: int, queries: int, dtype: torch.dtype, decays: tuple[float, ...], scale: float, robustness: float,
    copies: bool, horizon: float | None, exponents: tuple[float, ...] | None = None, batch: int = 1,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    generator = torch.Generator().manual_seed(length)
    heads, channels = len(decays), 16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform() -> torch.Tensor:
        return torch.rand(heads, generator=generator)

    base = normal(1, heads, 1, channels)
    query, key, value = (scale * (base + 0.5 * normal(batch, heads, n, channels)) for n in (queries, length, length))
    if copies:
        query = key[:, :, length - queries :].clone()
    parameters = {
        "decay": torch.tensor(decays),
        "frequency": 0.5 * torch.rand(heads, channels // 2, generator=generator) * (decays != (0.0,)),
        "process_noise": 0.001 + 0.02 * uniform(), "key_noise": 0.3 + uniform(), "query_noise": 0.3 + uniform(),
        "noise_floor": 0.01 + 0.1 * uniform(), "robustness": robustness + uniform(),
        "inverse_temperature": 0.7 + 0.3 * uniform(),
    }  # fmt: skip
    if exponents is not None:
        parameters |= {"robustness": torch.tensor(exponents) - 1, "inverse_temperature": torch.ones(heads)}
    if horizon is not None:
        parameters["horizon"] = torch.full((heads,), horizon)
    states = [x.to(DEVICE, dtype) for x in (query, key, value)]
    return states, {name: x.to(DEVICE) for name, x in parameters.items()}


def _results(
    states: Any, parameters: Any, options: Options, positions: Any, backend: str, log_sum: bool, exact: bool,
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
    compared, batch = given.pop("compared", (0, 1, 2, 3, 4)), 1 if DEVICE == "cpu" and present is None else 2
    states, parameters = _problem(
        length, queries, dtype, given.pop("decays"), given.pop("scale"), given.pop("robustness"),
        given.pop("copies", False), given.pop("horizon", None), given.pop("exponents", None), batch,
    )  # fmt: skip
    mask = (
        None
        if present is None
        else torch.arange(length, device=DEVICE)[None] < torch.tensor(present).to(DEVICE)[:, None]
    )
    positions = checked_positions(batch, queries, length, states[0].device, None, None, mask)
    options = Options(**{**given, "log_precision": True})
    assert operator.serves(states[0], Problem(Parameters(**parameters), positions, options))
    actual = _results(states, parameters, options, positions, "triton", log_sum, exact=False, size=size)
    expected = _results(states, parameters, options, positions, "reference", log_sum, exact=True, size=size)
    of_states, of_parameters = COPIES if "copies" in CASES[name] and dtype == FP16 else TOLERANCES[dtype]
    errors = [_error(actual[0][at], expected[0][at], size) for at in compared]
    assert max(errors) < of_states, errors
    errors = [_error(a, e, size) for a, e in zip(actual[1], expected[1], strict=True)]
    if DEVICE == "cuda":
        of_parameters = ON_A_CARD.get(name, of_parameters)
    assert max(errors) < of_parameters, errors


def _fading(
    length: int, queries: int, kind: str, dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """States, and parameters whose Riccati weight falls by 0.5 and 0.2 nats a step.

    Kinds: "noise"; "far", where a query is far from all near keys and equals an old one; "copies" at a large norm.
    """
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(1, 2, length, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    if kind == "far":
        query = 30 * query[:, :, :1].expand_as(query)
        key[:, :, 3] = query[:, :, 3]
    elif kind == "copies":
        key = query = 30 * query
    slope, decay, noise = (torch.tensor(x, dtype=torch.float64) for x in ((0.5, 0.2), (0.0, 0.01), 0.35))
    gain, remaining = -torch.expm1(-slope / 0.9), torch.exp(-2 * decay)
    ahead = gain * noise / (1 - gain)
    grown = torch.where(decay > 0, (1 - remaining) / (2 * decay), 1.0)
    same = torch.ones(2, dtype=torch.float64)
    parameters = {
        "decay": decay, "frequency": 0.5 * torch.rand(2, 8, generator=generator, dtype=torch.float64),
        "process_noise": (ahead**2 + ahead * noise * (1 - remaining)) / (ahead + noise) / grown,
        "key_noise": 0.3 * same, "query_noise": 0.2 * same, "noise_floor": 0.05 * same, "robustness": 3 * same,
        "inverse_temperature": 0.9 * same,
    }  # fmt: skip
    states = [x.to(DEVICE, dtype) for x in (query[:, :, length - queries :], key, value)]
    return states, {name: x.float().to(DEVICE) for name, x in parameters.items()}


def _certified(monkeypatch: pytest.MonkeyPatch, states: Any, parameters: Any, eps: float | None) -> Any:
    """The estimate and the log sum in nats, and the first key that each row visits, `(batch, heads, rows)`."""
    calls: list[Any] = []
    body = operator._forward_body

    def recorded(*given: Any) -> Any:
        calls.append((operator._plan(given), body(*given)))
        return calls[-1][1]

    monkeypatch.setattr(operator, "_forward_body", recorded)
    rows = states[0].shape[2]
    positions = checked_positions(1, rows, states[1].shape[2], states[0].device, None)
    problem = Problem(Parameters(**parameters), positions, Options(prior="riccati", certified=eps))
    estimate, log_sum = operator.filter_attention(*states, problem)
    monkeypatch.setattr(operator, "_forward_body", body)
    ((plan, found),) = calls
    blocks = found[3].split_with_sizes(plan.numbers)[9].view(torch.int32)
    first = torch.zeros(*states[0].shape[:2], -(-rows // 64), dtype=torch.int32, device=DEVICE)
    if eps:
        first = blocks[: first.numel()].view(first.shape)
    return estimate, log_sum * math.log(2), 64 * first.long().repeat_interleave(64, -1)[..., :rows]


def _windowed(
    patch: pytest.MonkeyPatch, states: Any, held: Any, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The estimate and the log sum of the keys from each row's first on, densely; and the prior of pairs in nats."""
    queries, keys = states[0].shape[2], states[1].shape[2]
    patch.setattr(reference, "left_out", lambda *_: torch.arange(keys, device=DEVICE) < first[..., None])
    positions = checked_positions(1, queries, keys, states[0].device, None)
    options = Options(prior="riccati", certified=0.1, log_precision=True)
    estimate, log_sum = BACKENDS["reference"].run(*states, Problem(Parameters(**held), positions, options))
    log_gain, log_rest = log_gains_of_lags(Parameters(**held))
    seen = positions.visible(True)
    lag = positions.lags(seen, torch.float64)
    prior = held["inverse_temperature"][:, None, None] * (log_gain[:, None, None] + lag * log_rest[:, None, None])
    assert log_sum is not None
    return estimate, log_sum, prior.masked_fill(~seen[:, None], -torch.inf)


@pytest.mark.parametrize(("kind", "dtype"), [("noise", BF16), ("far", FP16), ("copies", FP16)])
def test_certified_windows(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    """What is left out weighs at most eps of each row's sum, and changes no more than is said."""
    states, parameters = _fading(320, 128, kind, dtype)
    exact_states, held = [x.double() for x in states], {n: x.double() for n, x in parameters.items()}
    exact, exact_sum, prior = _windowed(monkeypatch, exact_states, held, torch.zeros(1, 2, 128, device=DEVICE))
    largest = states[2].double().norm(dim=-1).amax()
    rounding, of_sum = {BF16: (0.01, 0.2), FP16: (1.5e-3, 0.03)}[dtype]
    for eps in (0.1, 2.0**-12):
        estimate, log_sum, first = _certified(monkeypatch, states, parameters, eps)
        assert (estimate.double() - exact).norm(dim=-1).max() <= (2 * eps + rounding) * largest
        assert (exact_sum - log_sum).max() <= eps + of_sum
        left_out = prior.masked_fill(torch.arange(320, device=DEVICE) >= first[..., None], -torch.inf).logsumexp(-1)
        assert (left_out <= _windowed(monkeypatch, exact_states, held, first)[1] + math.log(eps)).all()
        assert first[0, 0].max() == (192 if kind != "far" or eps == 0.1 else 128)  # of 0.5 nats a key
        assert first[0, 1].max() == {"noise": 192, "far": 64, "copies": 192}[kind] or eps < 0.1


class _Recorded:
    """A kernel that computes nothing but the first tiles that it is given."""

    def __init__(self, kernel: Any, tiles: torch.Tensor):
        self.arg_names, self._tiles = kernel.arg_names, tiles
        self.run = self.function = self.packed_metadata = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> Any:
        arguments[self.arg_names.index("first_block")][: len(self._tiles)] = self._tiles
        return self


def test_gradients_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of what was computed, where the first tiles of rows rise and fall."""
    dtype = FP16
    states, parameters = _fading(320, 320, "noise", dtype)
    parameters["process_noise"] *= 1e-3  # far more keys count than are visited
    tiles = torch.tensor([0, 1, 1, 0, 3, 0, 0, 2, 1, 2], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(operator, "windows_kernel", _Recorded(operator.windows_kernel, tiles))
    monkeypatch.setattr(operator, "_plans", {})
    leaves = [x.clone().requires_grad_() for x in states]
    held = {n: x.clone().requires_grad_(n in operator.LEARNED) for n, x in parameters.items()}
    estimate, log_sum, first = _certified(monkeypatch, leaves, held, 0.1)
    exact = [x.detach().double().requires_grad_() for x in states]
    exact_held = {n: x.detach().double().requires_grad_(n in operator.LEARNED) for n, x in parameters.items()}
    expected, expected_sum, _ = _windowed(monkeypatch, exact, exact_held, first)
    cotangent = expected.detach() + torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for found, sums in ((estimate, log_sum), (expected, expected_sum)):
        ((found.double() * cotangent.to(dtype).double()).sum() + sums.double().sum()).backward()
    of_states, of_parameters = TOLERANCES[dtype]
    pairs = (
        (estimate, expected),
        (log_sum, expected_sum),
        *((x.grad, y.grad) for x, y in zip(leaves, exact, strict=True)),
    )
    errors = [_error(x.detach(), y.detach()) for x, y in pairs]
    assert max(errors) < of_states, errors
    errors = [_error(held[n].grad, exact_held[n].grad) for n in operator.LEARNED]
    assert max(errors) < of_parameters, errors


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after another")
def test_repeatable() -> None:
    """Two backward passes agree bit by bit."""
    states, parameters = _problem(130, 130, BF16, (0.0, 0.05), 1.0, 2.0, False, None)
    positions = checked_positions(1, 130, 130, states[0].device, None)
    first, second = (_results(states, parameters, Options(), positions, "triton", False, exact=False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0][2:] + first[1], second[0][2:] + second[1], strict=True))


@pytest.mark.parametrize("sizes", [(1, 2, 0, 5), (0, 2, 5, 5)])
def test_no_pairs(sizes: tuple[int, int, int, int]) -> None:
    """Estimates of no query, and gradients of 0."""
    batch, heads, queries, keys = sizes
    shapes = [(batch, heads, n, 16) for n in (queries, keys, keys)]
    states = [torch.randn(shape, device=DEVICE, dtype=BF16, requires_grad=True) for shape in shapes]
    held = {n: torch.full((heads,), 0.5, device=DEVICE) for n in ("decay", *operator.LEARNED)}
    parameters = Parameters(frequency=torch.zeros(heads, 8, device=DEVICE), **held)
    for x in parameters[2:8]:
        x.requires_grad_()
    positions = checked_positions(batch, queries, keys, states[0].device, None)
    problem = Problem(parameters, positions, Options(prior="riccati", certified=0.1))
    assert operator.serves(states[0], problem)
    out, log_sum = operator.filter_attention(*states, problem)
    (out.sum() + log_sum.sum()).backward()
    assert out.shape == (batch, heads, queries, 16)
    assert not any(x.grad.any() for x in (*states, *parameters[2:8]))
