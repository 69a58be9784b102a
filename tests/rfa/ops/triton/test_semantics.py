"""What a comparison with the reference does not show: the fused interface by itself, hostile inputs, repeatability."""

import pytest
import torch
from cover import cover, some

from rfa.ops.kernel import kernel_inputs
from rfa.ops.positions import Positions
from rfa.ops.prior import UNIT, LagTables
from rfa.ops.old_triton import fused_attention

from ..problems import irregular_times, problem
from .fused_problems import DEVICE, errors, needs_triton, one_head, rounded, triton_attention

pytestmark = needs_triton


def states(*lengths, heads=2, channels=16, dtype=torch.float32, seed=0):
    """Queries, keys and values of these lengths."""
    g = torch.Generator().manual_seed(seed)
    queries, keys = lengths
    sizes = (queries, keys, keys)
    return [torch.randn(1, heads, n, channels, generator=g).to(DEVICE, dtype).requires_grad_() for n in sizes]


def table_prior(keys, heads=2, seed=0, unit=UNIT):
    """Lag tables that belong to no dynamics."""
    g = torch.Generator().manual_seed(seed)
    tables = torch.rand(3, heads, keys, generator=g)
    tables[2] /= unit
    coefficient = 0.5 + torch.rand(1, heads, generator=g)[0]
    tables, coefficient = (x.to(DEVICE).requires_grad_() for x in (tables, coefficient))
    return LagTables(tables, coefficient, tables[1].detach().amax(-1))


def by_position(queries, keys):
    times = torch.arange(keys, dtype=torch.float64, device=DEVICE)[None]
    return Positions(times, times[:, keys - queries :], uniform=True)


def run(query, key, value, prior, positions, causal=True, score="student_t"):
    return fused_attention(kernel_inputs(query, key, value, None, prior, positions, causal=causal, score_kind=score))


def dense(query, key, value, prior, positions, causal, score):
    """The formulas of `rfa.ops.kernel` with tables, in float64."""
    query, key, value, tables = (x.double() for x in (query, key, value, prior.tables))
    lag = (positions.query_times[0, :, None] - positions.key_times[0]).long()
    decay, bias, weight = tables[:, :, lag.abs()]
    dot = query @ key.mT
    residual = query.square().sum(-1)[..., None] + decay**2 * key.square().sum(-1)[..., None, :] - 2 * decay * dot
    evidence = {
        "student_t": torch.log2(1 + UNIT * weight * residual),
        "exponential": weight * residual,
        "dot_product": -dot,
    }[score]
    z = (bias - prior.coefficient[:, None, None].double() * evidence) * torch.log(torch.tensor(2.0)).double()
    if causal:
        z = z.masked_fill(lag < 0, -torch.inf)
    return (z.softmax(-1) * decay) @ value, z.logsumexp(-1) / torch.log(torch.tensor(2.0)).double()


def gradients(function, inputs, prior, positions, *options):
    """Both results, and the gradients of states, tables and scalars."""
    out, log_sum = function(*inputs, prior, positions, *options)
    leaves = [*inputs, prior.tables, prior.coefficient]
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)
    total = (out * weights).sum() + (log_sum * weights[..., 0]).sum()
    return [out, log_sum, *torch.autograd.grad(total, leaves)]


@cover(1, causal=[True, False], score=["student_t", "exponential", "dot_product"])
def test_scores_with_free_tables(score, causal):
    unit = UNIT if score == "student_t" else 1.0
    inputs, prior, positions = states(21, 40), table_prior(40, unit=unit), by_position(21, 40)
    actual = gradients(run, inputs, prior, positions, causal, score)
    expected = gradients(dense, inputs, prior, positions, causal, score)
    for found in (actual, expected):
        found[5][2] /= unit  # of w, in order one
    for one, other in zip(actual, expected, strict=True):  # float32: 40 terms of order 1 to 10
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("irregular", some([True, False], 1))
def test_gradients_are_repeatable(irregular):
    inputs = {n: x.to(DEVICE) for n, x in rounded(problem(batch=1, keys=40, modes=8), torch.float32).items()}
    times = irregular_times(0, 40).to(DEVICE) if irregular else None
    found = []
    for _ in range(2):
        leaves = {n: x.clone().requires_grad_(n != "frequency") for n, x in inputs.items()}
        out, log_precision = triton_attention(**leaves, times=times)
        learned = [x for x in leaves.values() if x.requires_grad]
        found.append(torch.autograd.grad(out.square().sum() + log_precision.sin().sum(), learned))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("irregular", some([True, False], 1))
def test_absent_keys_may_hold_anything(irregular):
    """In the first batch entry ten keys are missing, in the second all: zeros, -inf and no gradient."""
    inputs = {n: x.to(DEVICE) for n, x in rounded(problem(keys=35, modes=8), torch.float32).items()}
    present = torch.ones(2, 35, dtype=torch.bool, device=DEVICE)
    present[0, 3:13], present[1] = False, False
    bad = torch.where(torch.arange(35, device=DEVICE) % 2 == 0, torch.nan, torch.inf)[:, None]
    for name in ("key", "value"):
        inputs[name] = torch.where(present[:, None, :, None], inputs[name], bad)
    leaves = {n: x.clone().requires_grad_(n != "frequency") for n, x in inputs.items()}
    times = irregular_times(0, 35).to(DEVICE) if irregular else None
    out, log_precision = triton_attention(**leaves, key_mask=present, times=times)
    assert out.isfinite().all()
    assert not out[1].any()
    assert (log_precision[1] == -torch.inf).all()
    total = out.square().sum() + log_precision[log_precision > -torch.inf].sum()
    total.backward()
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            assert leaf.grad.isfinite().all(), name
            if leaf.dim() == 4:
                assert not leaf.grad[1].any(), name
    for name in ("key", "value"):
        assert not leaves[name].grad[0, :, 3:13].any(), name


@pytest.mark.parametrize("weight", ["student_t", "exponential"])
def test_rows_far_below_the_bound(weight):
    """Scores of -1e3 to -1e5 bits: the sums would underflow under any fixed reference."""
    inputs = one_head(3, batch=1, keys=35)
    inputs["query"] = inputs["query"] * (1e3 if weight == "student_t" else 30)
    inputs["inverse_temperature"] = inputs["inverse_temperature"] * 20
    found = errors(inputs, weight=weight)
    assert not {n: e for n, e in found.items() if e > 1e-2}  # logits of 1e4 in float32 are right to 1e-3
    assert found["log_precision"] < 1e-6


def test_states_in_any_memory_order():
    """As a projection gives them: `(batch, length, heads, channels)`; and a gradient without memory of its own."""
    inputs = {n: x.to(DEVICE) for n, x in rounded(problem(keys=20, modes=8), torch.float32).items()}
    expected, _ = triton_attention(**inputs)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out, _ = triton_attention(**inputs)
    assert torch.equal(out, expected)
    out.sum().backward()
    strange = inputs["query"].grad
    inputs = {n: x.detach().contiguous() for n, x in inputs.items()}
    inputs["query"].requires_grad_()
    out, _ = triton_attention(**inputs)
    out.backward(torch.ones_like(out))
    assert torch.equal(strange, inputs["query"].grad)


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_steps_of_one_far_from_the_origin(prior):
    """A jump within a block: rows and columns of one tile lie 1e6 apart, and what counts are lags of 1."""
    times = torch.arange(35.0, dtype=torch.float64) + irregular_times(0, 35) / 1e3
    times[10:] += 1e6
    inputs = one_head(4, batch=1, keys=35)
    inputs["decay"][0] = 1e-4
    # gradients of the decay weigh single-precision terms with times of 1e6: all but 1e-4 of that must cancel
    assert not {n: e for n, e in errors(inputs, times=times, prior=prior).items() if e > 1e-3}
