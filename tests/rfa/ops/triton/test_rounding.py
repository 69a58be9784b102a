"""Where gradients of the Triton kernels need more digits than inputs have, by the fuzz command's rule; and NaN."""

import pytest
import torch
from cover import ALL, cover
from scripts import script

from .fused_problems import needs_triton, triton_attention

pytestmark = needs_triton


@pytest.fixture(scope="module")
def fuzz():
    return script("benchmarks/fuzz.py")


cases = script("benchmarks/fuzz_cases.py")


def case(fuzz, *, keys=6, modes=8, dtype=torch.float32, size=1.0, timed=False, options=None, **parameters):
    """One head with parameters of order one, but for those that are given; `size` of queries and keys."""
    chance = cases.Chance(1)
    inputs = {name: chance.normal(1, 1, keys, 2 * modes).mul(size).to(dtype) for name in ("query", "key")}
    inputs["value"] = chance.normal(1, 1, keys, 2 * modes).mul(10).to(dtype)
    inputs |= {name: torch.tensor([1.0]) for name in cases.PARAMETERS}
    inputs |= {"decay": torch.tensor([0.2]), "frequency": chance.normal(1, modes).float()}
    inputs |= {name: torch.tensor([number]) for name, number in parameters.items()}
    if timed:
        inputs["times"] = chance.uniform(0.1, 2.0, keys).cumsum(0)
    learned = [n for n in inputs if n not in ("times", "frequency")]
    chosen = {"causal": True, "weight": "student_t", "prior": "lyapunov", "gate": True, "rotate_values": True}
    return fuzz.Case(inputs, {**chosen, "query_noise_in_bias": False, **(options or {})}, learned, None)


def hold(fuzz, drawn, monkeypatch):
    """Under the interpreter or on a GPU, as the tests of this folder run."""

    def call(**given):
        if given.pop("backend") == "triton":
            given.pop("return_log_precision")
            return tuple(x.cpu() for x in triton_attention(**given))
        return robust(**given, backend="reference")

    robust = fuzz.robust_filter_attention
    monkeypatch.setattr(fuzz, "robust_filter_attention", call)
    assert not (fuzz.faults(drawn, ("triton",)) and fuzz.faults(drawn, ("triton",), fuzz.MORE_DRAWS))


@pytest.mark.parametrize("seed", [n for n in range(200 if ALL else 40) if not cases.draw(n, for_triton=True).whole])
def test_drawn_cases_hold(fuzz, seed, monkeypatch):
    """Of the kernels that go pair by pair: shapes, times, masks, parameters, options and dtypes."""
    hold(fuzz, fuzz.draw(seed, for_triton=True), monkeypatch)


@cover(1, timed=[False, True], weight=["student_t", "exponential"])
def test_rows_with_one_large_weight(fuzz, timed, weight, monkeypatch):
    """`E <dout, v> - <dout, out>` is 1e-4 of either; taken from a rounded estimate, 1e-3 of gradients was wrong."""
    options = {"weight": weight, "causal": False}
    hold(fuzz, case(fuzz, timed=timed, inverse_temperature=40.0, robustness=80.0, options=options), monkeypatch)


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_half_precision_rows_add_up_to_zero(fuzz, prior, monkeypatch):
    """What remains of a row's sum is multiplied by log Sigma = -40, the same in all pairs."""
    small = {n: 1e-18 for n in ("process_noise", "key_noise", "noise_floor")}
    drawn = case(fuzz, timed=True, dtype=torch.float16, inverse_temperature=2e-3, options={"prior": prior}, **small)
    hold(fuzz, drawn, monkeypatch)


def test_weights_formed_anew_are_those_of_the_forward_pass(fuzz, monkeypatch):
    """Distances of nearly equal states are rounding, divided by 1e-25: products must be those of the forward pass."""
    small = {n: 1e-25 for n in ("process_noise", "key_noise", "query_noise", "noise_floor")}
    drawn = case(fuzz, modes=16, size=4e-3, robustness=9e3, inverse_temperature=0.4, **small)
    drawn.inputs["query"] = drawn.inputs["key"] * (1 + 1e-6)
    drawn.inputs["decay"] = torch.tensor([1e-5])
    drawn = drawn._replace(options={**drawn.options, "rotate_values": False})
    hold(fuzz, drawn, monkeypatch)


def test_a_state_beyond_float16_once_it_is_turned(fuzz):
    """Rows that see it are NaN, others and their gradients hold: before, `0 * inf` spread."""
    drawn = case(fuzz, timed=True, dtype=torch.float16)
    drawn.inputs["key"][0, 0, 2] = 6e4
    drawn.inputs["value"][0, 0, 2] = 1.0
    given = {n: x.clone().requires_grad_(n in ("query", "key", "value")) for n, x in drawn.inputs.items()}
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]])
    output, log_precision = (x.cpu() for x in triton_attention(**given, **drawn.options, segment_ids=segments))
    assert output[0, 0, 2].isnan().all()
    assert log_precision[0, 0, 2].isnan()
    others = [0, 1, 3, 4, 5]
    assert output[0, 0, others].isfinite().all()
    output[0, 0, others].float().sum().backward()
    assert all(given[name].grad.isfinite().all() for name in ("query", "key", "value"))
