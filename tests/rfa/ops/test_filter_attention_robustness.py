"""Large inputs, far lags, extreme parameters, empty rows, odd memory layouts: finite, deterministic, unchanged."""

import pytest
import torch
from cover import cover

from .problems import PRIORS, WEIGHTS, attend, irregular_times, problem, with_gradients


def assert_finite(inputs, backend, **options):
    found = with_gradients(inputs, backend, **options)
    for name, x in found.items():
        assert bool(torch.isfinite(x).all()), name
    return found


@cover(1, dtype=[torch.float32, torch.bfloat16, torch.float16], prior=PRIORS, weight=WEIGHTS)
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


@cover(1, dtype=[torch.float32, torch.bfloat16], prior=PRIORS, weight=WEIGHTS, gate=[True, False])
def test_large_vanishing_residuals_do_not_turn_negative(gate, weight, prior, dtype, backend):
    """q = k of size 1e3 without decay or rotation: |q|^2 + |k|^2 - 2 q.k cancels to less than its rounding."""
    inputs = problem(2, keys=9, dtype=torch.float32)
    inputs["decay"].zero_()
    inputs["frequency"].zero_()
    for name in ("process_noise", "key_noise", "query_noise", "noise_floor"):
        inputs[name].fill_(1e-4)
    inputs["query"] = inputs["key"] = (1e3 * inputs["key"][:, :, :1]).expand(-1, -1, 9, -1).to(dtype).contiguous()
    inputs["value"] = inputs["value"].to(dtype)
    log_precision = assert_finite(inputs, backend, weight=weight, prior=prior, gate=gate)["log_precision"]
    # r >= 0, so that L <= its prior term: log s <= log(9 * 1e4^beta), or log 9 with the Riccati prior.
    top = 2.2 + (9.3 * inputs["inverse_temperature"][:, None] if prior == "lyapunov" else 0.1)
    assert bool((log_precision <= top).all())


@cover(1, prior=PRIORS, weight=WEIGHTS, causal=[True, False])
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


@cover(1, prior=PRIORS, weight=WEIGHTS)
def test_extreme_parameters(weight, prior, backend):
    for name, value in ((name, value) for name, values in VALUES.items() for value in values):
        inputs = problem(5, keys=7, dtype=torch.float32)
        inputs[name].fill_(value)
        for times in (None, irregular_times(5, 7)):
            assert_finite(inputs, backend, weight=weight, prior=prior, times=times, causal=times is None)


@cover(1, prior=PRIORS, weight=WEIGHTS, causal=[True, False], timed=[True, False], length=[6, 150])
def test_rows_without_keys(length, timed, causal, weight, prior, backend):
    """Some rows of a block, and all rows of a sequence; 150 tokens are several blocks of a fused kernel."""
    inputs = problem(8, keys=length, dtype=torch.float32)
    mask = torch.arange(2 * length).view(2, length) % 3 > 0
    mask[0, : length // 3], mask[1] = False, False
    options = {"key_mask": mask, "causal": causal, "weight": weight, "prior": prior}
    options |= {"times": irregular_times(8, length)} if timed else {}
    found = with_gradients(inputs, backend, **options)
    empty = ~mask.cummax(1).values if causal else ~mask.any(1, keepdim=True).expand(2, length)
    empty = empty[:, None].expand(2, 2, length)
    assert bool((found["output"][empty] == 0).all())
    assert torch.equal(found.pop("log_precision") == -torch.inf, empty)
    for name, x in found.items():
        assert bool(torch.isfinite(x).all()), name
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    sum(x.sum() for x in attend(leaves, backend, **options)).backward()  # of a loss that takes the -inf too
    assert all(bool(x.grad.isfinite().all()) for x in leaves.values())
    assert bool((found["query"][empty] == 0).all())
    for name in ("key", "value"):
        assert bool((found[name][~mask[:, None].expand(2, 2, length)] == 0).all()), name


def test_a_parameter_that_vanishes_in_the_inputs_precision(backend):
    inputs = problem(32, keys=4, dtype=torch.float32)
    inputs["robustness"] = torch.full((2,), 1e-50, dtype=torch.float64)
    with pytest.raises(ValueError, match="robustness"):
        attend(inputs, backend)
