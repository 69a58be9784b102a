"""Bias, gate, regime, prior response and peak lag against the closed forms of section 3.7 and appendix C."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from rfa.dynamics import bias, gate, peak_lag, prior_response, regime, steady_state_variance

# decay, process_noise, key_noise, noise_floor; sigma~^2 = 1.0, 0.05, 0.01
DIFFUSIVE = (0.25, 0.5, 0.1, 0.02)
INTEGRATIVE = (0.2, 0.02, 1.5, 0.01)
STRONG = (0.05, 0.001, 2.0, 0.03)
CASES = [DIFFUSIVE, INTEGRATIVE, STRONG]
QUERY_NOISE = 0.3
LAGS = torch.linspace(0, 30, 61, dtype=torch.float64)
ROUNDING = 1e-12  # closed forms in another order of operations; alpha and beta cancel by at most 1e2


def as_tensors(*numbers):
    return torch.tensor(numbers, dtype=torch.float64).unbind()


def alpha_beta(mu, sigma2, eta2, floor):
    steady = sigma2 / (2 * mu)
    return eta2 - steady, floor + steady


def test_regime_is_the_sign_of_alpha():
    for case in CASES:
        mu, sigma2, eta2, _ = case
        alpha = regime(*as_tensors(mu, sigma2, eta2)).item()
        assert alpha == pytest.approx(eta2 - sigma2 / (2 * mu), rel=ROUNDING)
        assert (alpha < 0) == (case is DIFFUSIVE)


@pytest.mark.parametrize("case", CASES)
def test_bias_and_gate_have_one_exponential(case):
    """Sigma = beta + alpha exp(-2 mu tau): a gate that closes where alpha < 0, and opens otherwise."""
    alpha, beta = alpha_beta(*case)
    variance = beta + alpha * np.exp(-2 * case[0] * LAGS.numpy())
    np.testing.assert_allclose(bias(*as_tensors(*case), LAGS), -np.log(variance), rtol=ROUNDING, atol=ROUNDING)
    found = gate(*as_tensors(*case), as_tensors(QUERY_NOISE)[0], LAGS)
    np.testing.assert_allclose(found, 1 / (variance + QUERY_NOISE), rtol=ROUNDING)
    assert bool((found.diff() * np.sign(alpha) > 0).all())


@pytest.mark.parametrize("case", [INTEGRATIVE, STRONG])
def test_peak_lag_is_the_formula_and_the_maximum(case):
    numbers = as_tensors(*case)
    alpha, beta = alpha_beta(*case)
    peak = peak_lag(*numbers).item()
    assert peak == pytest.approx(np.log(alpha / beta) / (2 * case[0]), rel=ROUNDING)
    found = minimize_scalar(
        lambda lag: -prior_response(*numbers, as_tensors(lag)[0]).item(), bounds=(0, 200), method="bounded",
        options={"xatol": 1e-9},
    )  # fmt: skip
    assert peak == pytest.approx(found.x, rel=1e-6)  # a maximum is located to the root of the rounding


def test_no_peak_is_at_lag_zero():
    cases = [DIFFUSIVE, (0.2, 0.02, 0.05, 0.01), (0.0, 0.3, 0.5, 0.1), (0.0, 0.0, 0.5, 0.1)]
    numbers = torch.tensor(cases, dtype=torch.float64).T
    assert torch.equal(peak_lag(*numbers), torch.zeros(4, dtype=torch.float64))
    lags = torch.linspace(0, 50, 200, dtype=torch.float64)
    response = prior_response(*numbers[:, :, None], lags)
    assert bool((response.argmax(1) == 0).all())


def test_gradients():
    numbers = [x.clone().requires_grad_() for x in torch.tensor(CASES, dtype=torch.float64).T]
    lag = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    query_noise = torch.tensor(QUERY_NOISE, dtype=torch.float64, requires_grad=True)
    for f in (bias, prior_response):
        assert torch.autograd.gradcheck(f, (*numbers, lag))
    assert torch.autograd.gradcheck(gate, (*numbers, query_noise, lag))
    assert torch.autograd.gradcheck(regime, numbers[:3])
    assert torch.autograd.gradcheck(peak_lag, [x[1:].detach().requires_grad_() for x in numbers])


def test_gradients_are_finite_at_no_decay():
    """mu = 0 is a legal value: what does not depend on a parameter there has gradient zero, not NaN."""
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for function, given in [
        (steady_state_variance, (zero, zero)),
        (regime, (zero, zero, one)),
        (peak_lag, (zero, one, one, 0.01 * one)),
        (peak_lag, (one, one, 9 * one, 0.01 * one)),
    ]:
        leaves = [x.clone().requires_grad_() for x in given]
        grads = torch.autograd.grad(function(*leaves), leaves, allow_unused=True, materialize_grads=True)
        assert all(bool(grad.isfinite()) for grad in grads), function
