"""Dtypes: what is computed in which precision, what comes back in which, and what autocast may not touch."""

import pytest
import torch
from cover import cover

from .problems import (
    PRIORS,
    SINGLE,
    STATES,
    assert_matches_oracle,
    assert_same,
    attend,
    irregular_times,
    problem,
)  # fmt: skip

HALF = [torch.bfloat16, torch.float16]


def with_states_in(inputs, dtype):
    return {n: x.to(dtype) if n in STATES else x for n, x in inputs.items()}


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(dtype, backend):
    """Dtypes of results and gradients, and one rounding; the fuzz command has the numbers of all options."""
    leaves = {n: x.requires_grad_() for n, x in with_states_in(problem(0, keys=9, dtype=torch.float32), dtype).items()}
    output, log_precision = attend(leaves, backend)
    assert (output.dtype, log_precision.dtype) == (dtype, torch.float32)
    (output.float().sum() + log_precision.sum()).backward()
    assert {n: x.grad.dtype for n, x in leaves.items()} == {n: x.dtype for n, x in leaves.items()}
    expected, _ = attend(with_states_in(leaves, torch.float32), backend)
    # half a unit in the last place; eps allows for ties decided in float32, which itself is off by 1e-6
    torch.testing.assert_close(output.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


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
