"""Variances far below one: states scaled by s and variances by s^2 are the same problem in other units."""

import pytest
import torch
from cover import cover

from .problems import PRIORS, STATES, WEIGHTS, irregular_times, problem, with_gradients

VARIANCES = ("process_noise", "key_noise", "query_noise", "noise_floor")
# Powers of two, so that scaling rounds nothing: variances of 1e-35 in float32 and 1e-300 in float64. Exponential scores
# leave float32 below 2e-24.
SCALE = {
    (torch.float32, "student_t"): 2.0**-58,
    (torch.float32, "exponential"): 2.0**-36,
    (torch.float64, "student_t"): 2.0**-498,
    (torch.float64, "exponential"): 2.0**-300,
}


@cover(1, dtype=[torch.float32, torch.float64], weight=WEIGHTS, prior=PRIORS, timed=[False, True])
def test_only_the_units_change(dtype, weight, prior, timed, backend):
    if dtype == torch.float64 and backend != "reference":
        pytest.skip("float64 is the reference's")
    inputs = problem(3, keys=7, dtype=dtype)
    options = {"weight": weight, "prior": prior, **({"times": irregular_times(3, 7)} if timed else {})}
    scale = SCALE[dtype, weight]
    small = {n: x * scale if n in STATES[:2] else x * scale**2 if n in VARIANCES else x for n, x in inputs.items()}
    # float32 logarithms are 80 instead of one: their rounding is a relative error of weights
    tolerance = 2e-4 if dtype == torch.float32 else 1e-11
    expected, found = with_gradients(inputs, backend, **options), with_gradients(small, backend, **options)
    for name, wanted in expected.items():
        factor = scale if name in STATES[:2] else scale**2 if name in VARIANCES else 1.0
        if name in ("log_precision", "inverse_temperature"):  # know the logarithm of the unit
            continue
        size = float(wanted.detach().abs().max())
        torch.testing.assert_close(found[name] * factor, wanted, rtol=0, atol=tolerance * max(size, 1e-3), msg=name)


def test_a_sigma_of_zero_hides_no_gradient_of_what_is_added_to_it(backend):
    """Without noises but gamma^2, `Sigma + gamma^2` grows with each of them."""
    for timed in (False, True):
        inputs = problem(1, batch=1, heads=1, keys=5, dtype=torch.float32)
        for name in ("process_noise", "key_noise", "noise_floor"):
            inputs[name].zero_()
        options = {"query_noise_in_bias": True, **({"times": irregular_times(1, 5)} if timed else {})}
        found = with_gradients(inputs, backend, **options)
        shifted = {n: x.double() for n, x in inputs.items()}
        for name in ("process_noise", "key_noise", "noise_floor"):
            shifted[name] = shifted[name] + 1e-9  # a Sigma far above zero, and below what float32 tells from it
        expected = with_gradients(shifted, "reference", **options)
        for name in VARIANCES:
            torch.testing.assert_close(found[name].double(), expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_gradient_of_a_query_of_zeros(backend):
    """Its squared distance is `E^2 |k|^2`, which underflows; its gradient `-2 E k w` does not."""
    inputs = problem(2, batch=1, heads=1, keys=1, modes=2, dtype=torch.float32)
    inputs["query"] = torch.zeros(1, 1, 2, 4)
    inputs["decay"].fill_(30.0)
    for name in VARIANCES:
        inputs[name].fill_(1e-24 if name == "query_noise" else 0.0)
    times = {"times": torch.zeros(1), "query_times": torch.tensor([1.7, 1.8])}
    found = with_gradients(inputs, backend, **times)["query"]
    expected = with_gradients({n: x.double() for n, x in inputs.items()}, "reference", **times)["query"]
    assert expected.abs().amax((0, 1, 3)).min() > 1e-3
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6)
