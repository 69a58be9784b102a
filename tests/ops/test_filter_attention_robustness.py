"""Large inputs, far lags, extreme parameters, empty rows, odd memory layouts: finite, deterministic, unchanged."""

import pytest
import torch
from cover import cover

from .problems import PARAMETERS, PRIORS, WEIGHTS, assert_same, attend, irregular_times, problem


def gradients(inputs, backend, **options):
    """(output, log precision, gradients by name); the cotangents are random, so that nothing cancels."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    output, log_precision = attend(leaves, backend, **options)
    g = torch.Generator().manual_seed(0)
    left = torch.randn(output.shape, generator=g).to(output.dtype)
    right = torch.randn(log_precision.shape, generator=g).to(log_precision.dtype)
    seen = ~log_precision.isinf()
    objective = (left * output).sum() + (right * torch.where(seen, log_precision, 0.0)).sum()
    grads = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return output, log_precision, dict(zip(leaves, grads, strict=True))


def assert_finite(inputs, backend, **options):
    output, log_precision, grads = gradients(inputs, backend, **options)
    for name, x in {"output": output, "log_precision": log_precision, **grads}.items():
        assert bool(torch.isfinite(x).all()), name
    return output, log_precision, grads


@cover(dtype=[torch.float32, torch.bfloat16, torch.float16], prior=PRIORS, weight=WEIGHTS)
def test_inputs_times_a_thousand(weight, prior, dtype, backend):
    inputs = problem(1, keys=9, dtype=torch.float32)
    inputs.update({n: (1e3 * inputs[n]).to(dtype) for n in ("query", "key", "value")})
    if dtype == torch.float16:
        # float16 gradients end at 65504; the cotangents of `value` stay small, those of q and k are 2 r / S.
        inputs["query"], inputs["key"] = inputs["query"] / 4, inputs["key"] / 4
        inputs["robustness"] = inputs["robustness"] * 100
    for times in (None, irregular_times(1, 9)):
        for causal in (True, False):
            assert_finite(inputs, backend, weight=weight, prior=prior, times=times, causal=causal)


@cover(dtype=[torch.float32, torch.bfloat16], prior=PRIORS, weight=WEIGHTS, gate=[True, False])
def test_large_vanishing_residuals_do_not_turn_negative(gate, weight, prior, dtype, backend):
    """q = k of size 1e3 without decay or rotation: |q|^2 + |k|^2 - 2 q.k cancels to less than its rounding."""
    inputs = problem(2, keys=9, dtype=torch.float32)
    inputs["decay"].zero_()
    inputs["frequency"].zero_()
    for name in ("process_noise", "key_noise", "query_noise", "noise_floor"):
        inputs[name].fill_(1e-4)
    inputs["query"] = inputs["key"] = (1e3 * inputs["key"][:, :, :1]).expand(-1, -1, 9, -1).to(dtype).contiguous()
    inputs["value"] = inputs["value"].to(dtype)
    _, log_precision, _ = assert_finite(inputs, backend, weight=weight, prior=prior, gate=gate)
    # r >= 0, so that L <= its prior term: log s <= log(9 * 1e4^beta), or log 9 with the Riccati prior.
    top = 2.2 + (9.3 * inputs["inverse_temperature"][:, None] if prior == "lyapunov" else 0.1)
    assert bool((log_precision <= top).all())


@cover(prior=PRIORS, weight=WEIGHTS, causal=[True, False])
def test_lags_of_a_million(causal, weight, prior, backend):
    inputs = problem(3, keys=9, heads=3, dtype=torch.float32)
    inputs["decay"] = torch.tensor([0.0, 1e-6, 0.5])
    far = irregular_times(3, 9) * 1e6
    options = {"causal": causal, "weight": weight, "prior": prior}
    assert_finite(inputs, backend, times=far, **options)
    near = irregular_times(4, 9)
    assert_finite(inputs, backend, times=near, query_times=near + 1e6, **options)
    assert_finite(inputs, backend, horizon=torch.full((3,), 1e6), **options)
    gap = torch.cat([near[:5], near[5:] + 1e6])
    assert_finite(inputs, backend, times=gap, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_forgotten_past_leaves_nothing(dtype, backend):
    """Behind a gap that decays to exp(-5e5) = 0, keys still take weight but carry nothing."""
    inputs = problem(4, batch=1, heads=1, keys=4, dtype=dtype)
    inputs["decay"].fill_(0.5)
    times = torch.tensor([0.0, 1.0, 2.0, 1e6], dtype=torch.float64)
    last = attend(inputs, backend, times=times)[0][:, :, -1]
    changed = {**inputs, "value": inputs["value"] * torch.tensor([1e3, 1e3, 1e3, 1.0], dtype=dtype)[:, None]}
    assert torch.equal(attend(changed, backend, times=times)[0][:, :, -1], last)


VALUES = {
    "decay": [1e-30, 1e-7, 50.0, 1e4],
    "frequency": [1e-20, 50.0, 1e4],
    "process_noise": [0.0, 1e-12, 1e6, 1e12],
    "key_noise": [0.0, 1e-12, 1e6, 1e12],
    "query_noise": [0.0, 1e-12, 1e6, 1e12],
    "noise_floor": [0.0, 1e-12, 1e6, 1e12],
    "robustness": [1e-3, 1e3, 1e8],
    "inverse_temperature": [1e-3, 1e2],
}


@cover(prior=PRIORS, weight=WEIGHTS, name=PARAMETERS)
def test_extreme_parameters(name, weight, prior, backend):
    for value in VALUES[name]:
        inputs = problem(5, keys=7, dtype=torch.float32)
        inputs[name].fill_(value)
        for times in (None, irregular_times(5, 7)):
            for causal in (True, False):
                assert_finite(inputs, backend, weight=weight, prior=prior, times=times, causal=causal)


@cover(1, prior=PRIORS, size=[1e-10, 1e10])
def test_all_variances_tiny_or_huge(size, prior, backend):
    inputs = problem(6, keys=7, dtype=torch.float32)
    for name in ("process_noise", "key_noise", "query_noise", "noise_floor"):
        inputs[name].fill_(size)
    for weight in WEIGHTS:
        assert_finite(inputs, backend, weight=weight, prior=prior)


@cover(prior=PRIORS, causal=[True, False], timed=[True, False])
def test_rows_without_keys(timed, causal, prior, backend):
    inputs = problem(8, keys=6, dtype=torch.float32)
    mask = torch.tensor([[False, False, True, True, False, True], [False] * 6])
    options = {
        "key_mask": mask,
        "causal": causal,
        "prior": prior,
        **({"times": irregular_times(8, 6)} if timed else {}),
    }
    output, log_precision, grads = gradients(inputs, backend, **options)
    empty = torch.zeros(2, 6, dtype=torch.bool)
    empty[1] = True
    if causal:
        empty[0, :2] = True
    empty = empty[:, None].expand(2, 2, 6)
    assert bool((output[empty] == 0).all())
    assert torch.equal(log_precision == -torch.inf, empty)
    assert bool(torch.isfinite(output).all())
    for name, g in grads.items():
        assert bool(torch.isfinite(g).all()), name
    assert bool((grads["query"][empty] == 0).all())
    hidden = ~mask[:, None].expand(2, 2, 6)
    for name in ("key", "value"):
        assert bool((grads[name][hidden] == 0).all()), name


@pytest.mark.parametrize("prior", PRIORS)
def test_empty_rows_pass_no_nan_from_a_careless_loss(prior, backend):
    """The -inf of an empty row may be summed and differentiated: its own gradient is zero, not NaN."""
    inputs = {n: x.requires_grad_() for n, x in problem(9).items()}
    mask = torch.tensor([[False] * 5, [False, True, True, True, True]])
    output, log_precision = attend(inputs, backend, key_mask=mask, prior=prior)
    (output.sum() + log_precision.sum()).backward()
    for name, x in inputs.items():
        assert bool(torch.isfinite(x.grad).all()), name


@cover(dtype=[torch.float32, torch.bfloat16], prior=PRIORS, timed=[True, False])
def test_two_runs_are_bitwise_equal(timed, prior, dtype, backend):
    inputs = problem(10, keys=70, heads=4, dtype=dtype)
    options = {"prior": prior, **({"times": irregular_times(10, 70)} if timed else {})}
    first, second = (gradients(inputs, backend, **options) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    for name in inputs:
        assert torch.equal(first[2][name], second[2][name]), name


def layouts(x):
    """The same numbers with other strides."""
    spread = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
    spread[..., ::2] = x
    yield spread[..., ::2]
    if x.dim() == 4:
        yield x.transpose(1, 2).contiguous().transpose(1, 2)
        yield x.mT.contiguous().mT
        offset = torch.cat([torch.full_like(x[:, :, :1], float("nan")), x], 2)
        yield offset[:, :, 1:]


@pytest.mark.parametrize("prior", PRIORS)
def test_memory_layouts(prior, backend):
    inputs = problem(11, keys=7)
    options = {"times": irregular_times(11, 2, 7), "prior": prior}
    expected = gradients(inputs, backend, **options)
    for name, x in inputs.items():
        for other in layouts(x):
            leaf = other.requires_grad_() if other.is_leaf else other.detach().requires_grad_()
            assert leaf.stride() != x.stride()
            output, log_precision = attend({**inputs, name: leaf}, backend, **options)
            assert_same((output, log_precision), expected[:2], backend, 1e-12)  # sums in another order
            (output.sum() + log_precision.sum()).backward()
            assert leaf.grad.shape == x.shape
            assert bool(torch.isfinite(leaf.grad).all())


@pytest.mark.parametrize("prior", PRIORS)
def test_expanded_inputs(prior, backend):
    """Stride 0 over batch, heads and parameters: the gradient of the small tensor is the sum."""
    inputs = problem(12, batch=2, heads=3)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name][:1, :1]
    inputs["decay"] = inputs["decay"][1:]
    small = {n: x if x.dim() == 4 else x[:1] for n, x in inputs.items()}
    leaves = {n: x.clone().requires_grad_() for n, x in small.items()}
    wide = {n: x.expand(2, 3, -1, -1) if x.dim() == 4 else x.expand(3, *x.shape[1:]) for n, x in leaves.items()}
    output, log_precision = attend(wide, backend, prior=prior)
    (output.sum() + log_precision.sum()).backward()
    one, log_one, grads = None, None, {}
    alone = {n: x.clone().requires_grad_() for n, x in small.items()}
    one, log_one = attend(alone, backend, prior=prior)
    (6 * (one.sum() + log_one.sum())).backward()
    grads = {n: x.grad for n, x in alone.items()}
    assert_same((output, log_precision), (one.expand_as(output), log_one.expand_as(log_precision)), backend, 1e-12)
    for name, leaf in leaves.items():
        assert_same(leaf.grad, grads[name], backend, 1e-11)  # sums in another order


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode, backend):
    inputs = {n: x.requires_grad_() for n, x in problem(14).items()}
    expected = attend(inputs, backend)
    with mode():
        result = attend(inputs, backend)
    assert not result[0].requires_grad
    assert_same(tuple(x.clone() for x in result), tuple(x.detach() for x in expected), backend, 1e-12)


@cover(1, process_noise=[1.0, 100.0, 1e20], step=[1.0, 1e9, 1e18])
def test_riccati_prior_at_any_scale(step, process_noise, backend):
    """Half the variance, squared, would pass the end of float32 at 1e19."""
    if process_noise * step > 1e30:
        return
    inputs = problem(30, keys=7, dtype=torch.float32)
    inputs["process_noise"].fill_(process_noise)
    assert_finite(inputs, backend, prior="riccati", times=step * torch.arange(7, dtype=torch.float64))


@cover(prior=PRIORS, weight=WEIGHTS, scale=[1.0, 1e3])
def test_no_noise_at_all(scale, weight, prior, backend):
    inputs = problem(31, keys=7, dtype=torch.float32)
    for name in ("process_noise", "key_noise", "query_noise", "noise_floor"):
        inputs[name].zero_()
    for name in ("query", "key", "value"):
        inputs[name] *= scale
    assert_finite(inputs, backend, weight=weight, prior=prior)


def test_a_parameter_that_vanishes_in_the_inputs_precision(backend):
    inputs = problem(32, keys=4, dtype=torch.float32)
    inputs["robustness"] = torch.full((2,), 1e-50, dtype=torch.float64)
    with pytest.raises(ValueError, match="robustness"):
        attend(inputs, backend)


@cover(prior=PRIORS, weight=WEIGHTS, scale=[1e-8, 1e-5, 1e5])
def test_the_unit_of_the_observations(scale, weight, prior, backend):
    """Volts or microvolts: q and k times s, all variances times s^2, and the same attention."""
    inputs = problem(33, keys=7, dtype=torch.float32)
    scaled = {
        **inputs,
        **{name: scale * inputs[name] for name in ("query", "key")},
        **{name: scale**2 * inputs[name] for name in ("process_noise", "key_noise", "query_noise", "noise_floor")},
    }
    expected, _ = attend(inputs, backend, weight=weight, prior=prior)
    found, _ = attend(scaled, backend, weight=weight, prior=prior)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)  # float32, as against the oracle
