"""Compiled filters against the same filters in PyTorch and statsmodels; the gradient by autograd and differences."""

import math

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from cover import cover, slow

from rfa.estimation import LinearSDE, compiled, fit, likelihood, log_likelihood, recursive_estimate, robust_estimate
from rfa.estimation.problem import make_problem
from rfa.estimation.robust_weight import RobustWeight
from rfa.estimation.row_filters import filter_rows

from .models import coupled, irregular_times, matrix, rotating, trend, with_gaps

MODELS = {"rotating": rotating, "coupled": coupled, "trend": trend}
QUERIES = matrix([-1.0, 0.5, 3.3, 100.0])


def series(sde: LinearSDE, length: int, batch=(), outliers=None):
    times = irregular_times(length)
    seen = with_gaps(sde.simulate(times, torch.Generator().manual_seed(1), outliers, sample_shape=batch).observations)
    seen[..., 0, :] = torch.nan  # a diffuse start goes on where nothing is seen
    return times, seen


def start(sde: LinearSDE, known: bool):
    n = sde.state_size
    return (torch.linspace(-1, 1, n).double(), torch.diag(torch.linspace(1, 4, n).double())) if known else None


def assert_equal(found, expected, tolerance=1e-9):
    """But for rounding: the order of sums differs."""
    for mine, theirs in zip(found, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@cover(name=MODELS, direction=["filter", "smooth"], known=[False, True], batch=[(), (3,)], queries=[None, QUERIES])
def test_kalman_as_in_torch(in_torch, name, direction, known, batch, queries):
    sde = MODELS[name]()
    options = {"direction": direction, "initial": start(sde, known), "query_times": queries, "nu": math.inf}
    given = sde, *series(sde, 25, batch)
    assert_equal(robust_estimate(*given, **options), in_torch(robust_estimate, *given, **options))


@cover(name=MODELS, direction=["filter", "smooth"], known=[False, True], batch=[(), (2,)], queries=[None, QUERIES])
def test_recursive_as_in_torch(in_torch, name, direction, known, batch, queries):
    """Over outliers, and a jump, which starts challengers."""
    sde = MODELS[name]()
    times, seen = series(sde, 60, batch, (0.2, 20.0))
    seen[..., 40:, :] += 30
    options = {"direction": direction, "initial": start(sde, known), "query_times": queries}
    found = recursive_estimate(sde, times, seen, **options)
    assert_equal(found, in_torch(recursive_estimate, sde, times, seen, **options), 1e-8)
    assert (found.weights < 0.1).any()


def test_series_with_models_of_their_own(in_torch):
    one = rotating()
    dynamics = one.dynamics * matrix([0.5, 2.0])[:, None, None]
    sde = LinearSDE(dynamics, one.diffusion, one.observation, 0.5 * one.diffusion)
    given = sde, *series(one, 20, (2,))
    options = {"nu": math.inf, "return_weights": False}
    assert_equal(robust_estimate(*given, **options), in_torch(robust_estimate, *given, **options))


@pytest.mark.parametrize("direction", ["filter", "smooth"])
def test_far_from_zero_as_statsmodels(direction):
    """A start at 1e8 with a variance of 1e12, a regular series of 300 readings."""
    sde, times = trend(), 0.1 * torch.arange(300, dtype=torch.float64)
    mean, covariance = matrix([1e8, 1e8]), 1e12 * torch.eye(2).double()
    seen = 1e8 + sde.simulate(times, torch.Generator().manual_seed(0)).observations
    model = sm.tsa.statespace.MLEModel(seen.numpy(), k_states=2, k_posdef=2)
    model["transition"], model["state_cov"] = sde.transition(0.1).numpy(), sde.covariance(0.1).numpy()
    model["selection"], model["design"], model["obs_cov"] = np.eye(2), sde.observation.numpy(), np.array([[0.5]])
    model.initialize_known(mean.numpy(), covariance.numpy())
    expected = model.smooth([])
    states = expected.filtered_state if direction == "filter" else expected.smoothed_state
    found = robust_estimate(sde, times, seen, nu=math.inf, initial=(mean, covariance), direction=direction)
    # statsmodels' covariance form loses digits of 1e12 beside the noise of 0.5
    np.testing.assert_allclose(found.mean, states.T, rtol=1e-8, atol=1e-2)
    np.testing.assert_allclose(found.mean[100:, 0], states[0, 100:], rtol=1e-12)
    llf = log_likelihood(sde, times, seen, initial=(mean, covariance))
    assert llf.item() == pytest.approx(expected.llf, rel=1e-8)


def likelihood_and_gradient(sde, times, seen, initial, way):
    inputs = [sde.dynamics, sde.diffusion, sde.observation, sde.observation_noise, *(initial or ())]
    inputs = [x.clone().requires_grad_() for x in inputs]
    model, initial = LinearSDE(*inputs[:4]), inputs[4:] or None
    function = likelihood.density_function(
        model, times, seen, RobustWeight(math.inf, None, sde.observation_size), 1, initial
    )
    assert way is None or function(model, math.inf, None)[0].grad_fn is not None
    density, counts = function(model, math.inf, None)
    total = (torch.where(counts, density, 0.0).sum(-1) * torch.arange(1.0, 1 + density[..., 0].numel())).sum()
    gradients = torch.autograd.grad(total, inputs)
    # of a covariance, the part along other covariances
    return [total, *(x + x.mT if x.dim() == 2 and x.shape[0] == x.shape[1] else x for x in gradients[1:]), gradients[0]]


@cover(name=MODELS, known=[False, True], batch=[(), (3,)])
def test_gradient_of_the_likelihood_as_in_torch(in_torch, name, known, batch):
    sde = MODELS[name]()
    given = sde, *series(sde, 20, batch), start(sde, known), None
    expected = in_torch(likelihood_and_gradient, *given)
    assert_equal(likelihood_and_gradient(*given), expected)


def test_the_public_likelihood_has_the_gradient(in_torch):
    """For a noise in the model, and for observations, which PyTorch differentiates."""
    times, seen = series(rotating(), 12)
    noise = (0.3 * torch.eye(2, dtype=torch.float64)).requires_grad_()
    seen = seen.nan_to_num().requires_grad_()

    def gradient(wanted, values):
        sde = LinearSDE(rotating().dynamics, rotating().diffusion, rotating().observation, noise)
        return torch.autograd.grad(log_likelihood(sde, times, values), wanted)[0]

    torch.testing.assert_close(gradient(noise, seen.detach()), in_torch(gradient, noise, seen.detach()))
    torch.testing.assert_close(gradient(seen, seen), in_torch(gradient, seen, seen))


def test_second_derivatives():
    """`torch.func` has them; compiled code says that it has none, in the place of a wrong number."""
    times = 0.7 * torch.arange(12, dtype=torch.float64)
    seen = torch.randn(12, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def function(logarithms):
        forcing, noise, decay = logarithms.exp()
        dynamics = matrix([[0.0, 1.0], [-1.0, 0.0]]) - decay * torch.eye(2).double()
        return log_likelihood(
            LinearSDE(dynamics, forcing * torch.eye(2).double(), matrix([[1.0, 0.0]]), noise.reshape(1, 1)), times, seen
        )

    def gradient(at):
        at = at.clone().requires_grad_()
        return torch.autograd.grad(function(at), at)[0]

    at, step = matrix([0.1, -0.3, -1.0]), 1e-5
    differences = [(gradient(at + e) - gradient(at - e)) / (2 * step) for e in step * torch.eye(3).double()]
    # differences of gradients with 1e-15 of rounding keep ten digits
    torch.testing.assert_close(torch.func.hessian(function)(at), torch.stack(differences), rtol=1e-7, atol=1e-7)
    with pytest.raises(RuntimeError, match=r"second derivative of compiled code, .* torch\.func\.hessian$"):
        torch.autograd.functional.hessian(function, at)


def test_transitions_of_many_lags():
    """Values and gradients as matrix exponentials have them, for short lags and long ones, which are doubled."""
    lags = matrix([1e-6, 0.3, 1.0, 7.0, 40.0])
    found, expected = [], []
    for ours, results in ((True, found), (False, expected)):
        inputs = [x.clone().requires_grad_() for x in (coupled().dynamics, coupled().diffusion)]
        sde = LinearSDE(*inputs, coupled().observation, coupled().observation_noise)
        parts = [x[0] for x in compiled.discretize(sde, lags)] if ours else [sde.transition(lags), sde.covariance(lags)]
        total = sum((part * torch.linspace(-1, 1, part.numel()).view_as(part)).sum() for part in parts)
        dynamics, diffusion = torch.autograd.grad(total, inputs)
        results += [*parts, dynamics, diffusion + diffusion.mT]
    assert_equal(found, expected, 1e-11)


def test_transitions_of_several_models_have_gradients():
    """Each is that of its model alone."""
    lags, scales = matrix([0.3, 2.0]), matrix([0.5, 2.0])[:, None, None]

    def gradients(scale):
        inputs = [(scale * x).requires_grad_() for x in (coupled().dynamics, coupled().diffusion)]
        sde = LinearSDE(*inputs, coupled().observation, coupled().observation_noise)
        parts = compiled.discretize(sde, lags)
        total = sum((part * torch.linspace(-1, 1, part[0].numel()).view_as(part[0])).sum() for part in parts)
        return torch.autograd.grad(total, inputs)

    alone = [torch.stack(each) for each in zip(*map(gradients, (0.5, 2.0)), strict=True)]
    assert_equal(gradients(scales), alone, 1e-14)


def test_a_gap_over_which_a_state_overflows():
    unstable = LinearSDE(matrix([[1.0, 1.0], [0.0, 1.0]]), *(torch.eye(2).double(),) * 3)
    with pytest.raises(ValueError, match=r"^times: got a gap of 400, over which .* overflows$"):
        recursive_estimate(unstable, matrix([0.0, 1.0, 401.0]), torch.zeros(3, 2))


@cover(robust=[False, True], smooth=[False, True], predict=[False, True])
def test_rows_as_in_torch(robust, smooth, predict):
    """Predictions where they are asked for, the least squares of the Kalman filter alone."""
    sde = coupled()
    problem = make_problem(sde, *series(sde, 25), initial=start(sde, True), robust=robust, smooth=smooth)
    options = {"robust": robust, "smooth": smooth, "predict": predict}
    parts = problem.grid, problem.transitions, problem.initial
    found, expected = (filter_rows(*parts, compiled=ours, **options) for ours in (True, False))
    for each in (found, expected):
        assert (each.predicted is not None, each.least_squares is not None) == (predict, not robust)
    assert_equal([*found.estimates, found.weights], [*expected.estimates, expected.weights], 1e-8)
    if predict:
        assert_equal(found.predicted, expected.predicted, 1e-8)
    if not robust:
        assert_equal([found.least_squares], [expected.least_squares], 1e-8)


def test_threads_for_long_work_alone(monkeypatch):
    """And no more than there are parts."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    work = {(9, 500, 6): 1, (9, 10_000, 6): 4, (2, 100_000, 6): 2}
    assert {given: compiled.threads_for(*given) for given in work} == work


def test_equal_lags_are_one():
    """So that a regular series needs few matrix exponentials, also where its times are rounded."""
    assert len(compiled.different_lags(0.1 * torch.arange(10_000, dtype=torch.float64)[None])[0]) < 50
    times = matrix([[0.0, 1.0, 2.0, 2.0 + 2**-30, 3.0 + 2**-30], [0.0, 0.5, 1.5, 2.5, 3.5]])
    lags, index = compiled.different_lags(times)
    assert lags.tolist() == [2**-30, 0.5, 1.0]
    assert torch.equal(lags[index], times.diff())


@slow
def test_fit_as_in_torch(in_torch):
    sde, times = trend(), irregular_times(25)
    seen = sde.simulate(times, torch.Generator().manual_seed(0)).observations
    begin = LinearSDE(sde.dynamics, 2 * sde.diffusion, sde.observation, 2 * sde.observation_noise)
    found, expected = fit(begin, times, seen), in_torch(fit, begin, times, seen)
    assert found.converged
    assert found.log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-10)
    # at the maximum a parameter is found to the root of the likelihood's digits
    assert found.parameters == pytest.approx(expected.parameters, rel=1e-4)
    assert found.standard_errors == pytest.approx(expected.standard_errors, rel=1e-3)
