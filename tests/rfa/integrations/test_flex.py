"""The operator by flex attention against the float64 reference."""

import sys
from functools import partial

import pytest
import torch
from cover import cover, slow
from torch.nn.attention.flex_attention import flex_attention

import rfa
from rfa.integrations import flex
from rfa.integrations.flex import flex_filter_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def problem(queries=37, keys=37, modes=8, dtype=torch.float32, heads=3):
    """States and parameters; the first head does not decay."""
    torch.manual_seed(0)
    numbers = dict.fromkeys(("process_noise", "key_noise", "query_noise", "noise_floor"), (0.1, 1.0))
    numbers |= {"decay": (0.0, 0.3), "robustness": (1.0, 6.0), "inverse_temperature": (0.5, 2.0)}
    given = {name: torch.linspace(*ends, heads) for name, ends in numbers.items()}
    given["frequency"] = torch.randn(heads, modes)
    lengths = (queries, keys, keys)
    return [torch.randn(2, heads, length, 2 * modes).to(dtype) for length in lengths], given


def marks(kind, keys):
    """Masked keys in one row, one row without keys at its start, and segments."""
    keep = torch.rand(2, keys) > 0.3
    keep[0, :4] = False
    segments = torch.arange(keys).expand(2, -1) // 11
    given = {"key_mask": keep, "segment_ids": segments}
    return {name: given[name] for name in {"none": [], "both": given}.get(kind, [kind])}


def expected(states, given, **options):
    double = [x.double() for x in states]
    numbers = {name: x.double() for name, x in given.items()}
    return rfa.robust_filter_attention(*double, **numbers, **options, return_log_precision=True, backend="reference")


@cover(
    weight=["student_t", "exponential"],
    prior=["lyapunov", "riccati"],
    causal=[True, False],
    kind=["none", "key_mask", "segment_ids", "both"],
    queries=[37, 5],
)
def test_it_is_the_reference(weight, prior, causal, kind, queries):
    """Values turn where there are as many queries as keys."""
    states, given = problem(queries)
    options = {"weight": weight, "prior": prior, "causal": causal, "rotate_values": queries == 37, **marks(kind, 37)}
    wanted, precision = expected(states, given, **options)
    got, log_precision = flex_filter_attention(*states, **given, **options, return_log_precision=True)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)  # float32; estimates are about 1
    torch.testing.assert_close(log_precision.double(), precision, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_in_half_precision_only_the_result_is_rounded(dtype):
    states, given = problem(dtype=dtype)
    wanted, _ = expected(states, given)
    got = flex_filter_attention(*states, **given)
    assert got.dtype == dtype
    same = rfa.robust_filter_attention(*states, **given, backend="reference")
    assert (got.double() - same.double()).norm() < 1e-3 * same.double().norm()
    torch.testing.assert_close(got.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_one_token_and_no_key():
    states, given = problem(1, 1)
    got, log_precision = flex_filter_attention(*states, **given, return_log_precision=True)
    torch.testing.assert_close(got, states[2], rtol=1e-5, atol=1e-6)  # its own value
    _, precision = expected(states, given)
    torch.testing.assert_close(log_precision.double(), precision, rtol=1e-5, atol=1e-5)
    nothing = torch.zeros(2, 1, dtype=torch.bool)
    states[2].fill_(torch.nan)  # an absent token may hold anything
    got, log_precision = flex_filter_attention(*states, **given, key_mask=nothing, return_log_precision=True)
    assert torch.equal(got, torch.zeros_like(got))
    assert torch.equal(log_precision, torch.full_like(log_precision, -torch.inf))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 0), (2, 0, 5)])
def test_nothing_gives_nothing(batch, queries, keys):
    (query, key, value), given = problem(queries, keys)
    states = [x[:batch] for x in (query, key, value)]
    found = flex_filter_attention(*states, **given, return_log_precision=True)
    wanted = rfa.robust_filter_attention(*states, **given, return_log_precision=True, backend="reference")
    for one, other in zip((*found, flex_filter_attention(*states, **given)), (*wanted, wanted[0]), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_compiled_flex_attention_is_the_same():
    """By Dynamo alone: the compiler has no log sums of flex attention on the CPU."""
    states, given = problem()
    attend = torch.compile(flex_attention, backend="eager")
    same = flex_filter_attention(*states, **given, attend=attend)
    torch.testing.assert_close(same, flex_filter_attention(*states, **given))


@pytest.mark.parametrize(
    ("prior", "compiler"),
    [
        ("lyapunov", None),
        pytest.param("riccati", None, marks=slow),
        pytest.param("lyapunov", "aot_eager", marks=slow),  # `bench/test_peers.py` has it too
        ("riccati", "aot_eager"),
    ],
)
def test_gradients_are_the_references(prior, compiler, monkeypatch):
    """Flex attention refuses gradients on the CPU, but it has them: here the refusals are switched off.

    Compiled, it loses the gradients of captured tensors that are views: "aot_eager" differentiates as on a GPU.
    """
    attend = flex_attention if compiler is None else torch.compile(flex_attention, backend=compiler)
    monkeypatch.setattr(sys.modules["torch.nn.attention.flex_attention"], "_validate_device", lambda *states: None)
    monkeypatch.setattr(flex, "_check_gradients", lambda *tensors: None)
    states, given = problem(9, 11)
    given["decay"] = given["decay"] + 0.01
    inputs = [x.requires_grad_() for x in (*states, *given.values())]
    along = torch.randn(2, 3, 9, 16)
    options = {"prior": prior, "key_mask": torch.rand(2, 11) > 0.2}
    got, wanted = (
        torch.autograd.grad((function(*states, **given, **options) * along).sum(), inputs)
        for function in (
            partial(flex_filter_attention, attend=attend),
            partial(rfa.robust_filter_attention, backend="reference"),
        )
    )
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()  # float32, sums in another order


def test_gradients_and_float64_are_refused():
    states, given = problem()
    given["decay"].requires_grad_()
    with pytest.raises(ValueError, match="query: got 'states or parameters on the CPU that need a gradient'"):
        flex_filter_attention(*states, **given)
    with torch.no_grad():
        assert flex_filter_attention(*states, **given).isfinite().all()
        with pytest.raises(ValueError, match=r"query: got torch\.float64, expected float32"):
            flex_filter_attention(*(x.double() for x in states), **{n: x.double() for n, x in given.items()})
