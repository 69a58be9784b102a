"""Dtypes: what is computed in which precision, what comes back in which, and what autocast may not touch."""

import pytest
import torch
from cover import cover

from .problems import (
    PRIORS,
    SINGLE,
    STATES,
    WEIGHTS,
    assert_matches_oracle,
    assert_same,
    attend,
    irregular_times,
    problem,
)  # fmt: skip

HALF = [torch.bfloat16, torch.float16]


def with_states_in(inputs, dtype):
    return {n: x.to(dtype) if n in STATES else x for n, x in inputs.items()}


def half_problem(dtype, seed=0):
    """The same rounded numbers in half precision and in float32; the parameters are float32 in both."""
    half = with_states_in(problem(seed, keys=9, dtype=torch.float32), dtype)
    return half, with_states_in(half, torch.float32)


def assert_rounded(actual, expected, dtype):
    """One rounding of the result: half a unit in the last place, eps / 2; eps allows for ties decided in float32."""
    assert actual.dtype == dtype
    # float16 flushes towards its smallest subnormal 6e-8, and float32 itself is off by 1e-6.
    torch.testing.assert_close(actual.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@cover(1, dtype=HALF, prior=PRIORS, weight=WEIGHTS, causal=[True, False])
def test_half_precision_accumulates_in_float32(causal, weight, prior, dtype, backend):
    half, single = half_problem(dtype)
    for times in (None, irregular_times(0, 9)):
        options = {"causal": causal, "weight": weight, "prior": prior, "times": times}
        output, log_precision = attend(half, backend, **options)
        expected, expected_log = attend(single, backend, **options)
        assert_rounded(output, expected, dtype)
        assert log_precision.dtype == torch.float32
        assert_same(log_precision, expected_log, backend, 1e-6)


@cover(1, dtype=HALF, turned=["by autograd", "by the kernel"])
def test_half_precision_gradients(dtype, turned, backend):
    """A fused kernel turns the states itself where no frequency is learned."""
    half, single = half_problem(dtype, 1)
    gradients = []
    for inputs in (half, single):
        names = [n for n in inputs if turned == "by autograd" or n != "frequency"]
        leaves = {n: inputs[n].clone().requires_grad_() for n in names}
        output, log_precision = attend({**inputs, **leaves}, backend)
        gradients.append(torch.autograd.grad(output.float().sum() + log_precision.sum(), list(leaves.values())))
    for name, actual, expected in zip(names, *gradients, strict=True):
        assert actual.dtype == half[name].dtype
        if name in STATES:
            assert_rounded(actual, expected, dtype)
        else:
            # The cotangent of a sum is exact in half precision: float32 sums over 300 pairs in the same order.
            torch.testing.assert_close(actual, expected, rtol=SINGLE, atol=SINGLE)


@cover(1, prior=PRIORS, low=HALF)
def test_autocast_does_not_lower_the_accuracy(low, prior, backend):
    inputs = problem(6, keys=9, dtype=torch.float32)
    with torch.autocast("cpu", dtype=low):
        output, log_precision = assert_matches_oracle(inputs, backend, SINGLE, prior=prior)
    assert output.dtype == log_precision.dtype == torch.float32
    outside = attend(inputs, backend, prior=prior)
    assert_same((output, log_precision), outside, backend, 1e-6)


@pytest.mark.parametrize("prior", PRIORS)
def test_long_sequences_and_small_decays_keep_float32_accuracy(prior, backend):
    """Late positions rotate by large angles and sum many small variances; checked at the last three queries.

    Of decays mu tau is 1e-8 to 1, where 1 - exp(-2 mu tau) cancels if it is written so.
    """
    long = problem(8, batch=1, keys=600, queries=3, modes=2, dtype=torch.float32)
    slow = problem(10, batch=1, heads=4, keys=20, dtype=torch.float32)
    slow["decay"] = torch.tensor([1e-9, 1e-6, 1e-4, 1e-2])
    for inputs in (long, slow):
        for times in (None, irregular_times(9, inputs["key"].shape[2])):
            assert_matches_oracle(inputs, backend, SINGLE, prior=prior, times=times)


@pytest.mark.parametrize("prior", PRIORS)
def test_states_in_float32_with_parameters_in_float64(prior, backend):
    """Results are in the states' dtype, gradients in that of each input."""
    leaves = {n: x.requires_grad_() for n, x in with_states_in(problem(4), torch.float32).items()}
    output, log_precision = assert_matches_oracle(leaves, backend, SINGLE, prior=prior)
    assert output.dtype == log_precision.dtype == torch.float32
    (output.sum() + log_precision.sum()).backward()
    assert {n: x.grad.dtype for n, x in leaves.items()} == {n: x.dtype for n, x in leaves.items()}
