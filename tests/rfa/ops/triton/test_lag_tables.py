"""The kernels of lag tables beside `rfa.ops.prior.lag_tables`: the same numbers and gradients."""

import pytest
import torch
from cover import cover

from rfa.ops.prior import lag_tables
from rfa.ops.problem import Options, Parameters
from rfa.ops.old_triton.lag_tables import lag_tables as by_kernel

from .fused_problems import DEVICE, needs_triton

pytestmark = needs_triton
NAMES = ("decay", "process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")


def parameters(dtype=torch.float32, horizon=False, **changed):
    """Six heads: no decay, tiny ones, decays near the ends of both formulas of phi, a large one."""
    given = {
        "decay": torch.tensor([0.0, 1e-9, 0.004, 0.25, 0.5001, 30.0]),
        "process_noise": torch.tensor([0.3, 0.0, 1e-3, 2.0, 0.7, 5.0]),
        "key_noise": torch.tensor([0.2, 1.0, 0.0, 0.6, 3.0, 0.1]),
        "query_noise": torch.tensor([0.0, 0.1, 0.5, 0.2, 0.0, 2.0]),
        "noise_floor": torch.tensor([0.1, 0.3, 0.2, 0.0, 1e-6, 0.4]),
        "robustness": torch.tensor([1.0, 0.5, 4.0, 20.0, 2.0, 3.0]),
        "inverse_temperature": torch.tensor([1.0, 0.3, 2.0, 0.7, 1.5, 1.0]),
    }
    given = {name: x.to(DEVICE, dtype) for name, x in (given | changed).items()}
    if horizon:
        given["horizon"] = torch.linspace(0.0, 3.0, 6, device=DEVICE, dtype=dtype)
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    frequency = torch.zeros(6, 8, device=DEVICE, dtype=dtype)
    return Parameters(leaves["decay"], frequency, *(leaves[name] for name in NAMES[1:]), leaves.get("horizon")), leaves


def found_by(function, options, length, heads=6, **given):
    made, leaves = parameters(**given)
    leaves = {name: x.detach()[:heads].requires_grad_() for name, x in leaves.items()}
    made = made._replace(frequency=made.frequency[:heads], **leaves)
    tables, coefficient, bound = function(made, options, length)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(tables.shape, generator=generator).to(DEVICE)
    size = tables.detach().abs().clamp(min=1e-30)  # a gradient of a number's logarithm, in any unit
    total = (weights * tables / size).sum() + (coefficient * torch.arange(1.0, heads + 1.0, device=DEVICE)).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {"tables": tables, "c": coefficient, "bound": bound, **dict(zip(leaves, gradients, strict=True))}


@cover(
    1,
    weight=["student_t", "exponential"],
    prior=["lyapunov", "riccati"],
    gate=[True, False],
    in_bias=[True, False],
    horizon=[True, False],
    dtype=[torch.float32, torch.float64],
)
def test_numbers_and_gradients_are_those_of_pytorch(weight, prior, gate, in_bias, horizon, dtype):
    options = Options(True, weight, True, prior, gate, in_bias, False)
    expected = found_by(lag_tables, options, 300, dtype=dtype, horizon=horizon)
    actual = found_by(by_kernel, options, 300, dtype=dtype, horizon=horizon)
    assert_equal(actual, expected)


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_one_head_and_few_lags(prior):
    options = Options(True, "student_t", True, prior, True, False, False)
    assert_equal(found_by(by_kernel, options, 5, heads=1), found_by(lag_tables, options, 5, heads=1))


def assert_equal(actual, expected):
    """To the rounding of float32; gradients are sums over lags of both signs."""
    for name, wanted in expected.items():
        assert actual[name].dtype == wanted.dtype, name
        atol = 0.0 if name == "tables" else 3e-7 * float(wanted.abs().max())
        torch.testing.assert_close(actual[name], wanted, rtol=3e-7, atol=atol, msg=name)


@cover(1, name=NAMES, gate=[True, False])
def test_what_is_no_number_is_not_hidden(name, gate):
    options = Options(True, "student_t", True, "lyapunov", gate, False, False)
    broken = parameters()[1][name].detach().clone()
    broken[2] = torch.nan
    made, _ = parameters(**{name: broken})
    tables, coefficient, _ = by_kernel(made, options, 5)
    expected, of_c, _ = lag_tables(made, options, 5)
    assert torch.equal(tables.isnan(), expected.isnan())
    assert torch.equal(coefficient.isnan(), of_c.isnan())
    others = torch.tensor([0, 1, 3, 4, 5], device=DEVICE)
    assert tables[:, others].isfinite().all()


def test_variances_below_the_smallest_have_no_gradient():
    options = Options(True, "student_t", True, "lyapunov", True, False, False)
    zeros = dict.fromkeys(("process_noise", "key_noise", "query_noise", "noise_floor"), torch.zeros(6))
    for each in (lag_tables, by_kernel):
        found = found_by(each, options, 40, **zeros)
        assert found["tables"].isfinite().all()
        assert all((found[name] == 0.0).all() for name in zeros)
