"""Compiled filters against the same filters in PyTorch and statsmodels."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch
from cover import cover

from rfa.estimation import Level, LinearSDE, RobustFilter, Trend, compiled, robust_estimate

from .models import coupled, irregular_times, looped, matrix, rotating, statsmodels_of, trend, with_gaps

MODELS = {"rotating": rotating, "coupled": coupled, "trend": trend}


def series(sde: LinearSDE, length: int, batch=(), outliers=None):
    times = irregular_times(length)
    seen = with_gaps(sde.simulate(times, torch.Generator().manual_seed(1), outliers, sample_shape=batch).observations)
    seen[..., 0, :] = torch.nan  # a diffuse start goes on where nothing is seen
    return times, seen


def start(sde: LinearSDE, known: bool):
    n = sde.state_size
    return (torch.linspace(-1, 1, n).double(), torch.diag(torch.linspace(1, 4, n).double())) if known else None


@cover(name=MODELS, direction=["filter", "smooth"], known=[False, True], batch=[(), (2,)], robust=[False, True])
def test_a_linear_model_as_in_torch(name, direction, known, batch, robust):
    """Over outliers, and a jump, which starts challengers."""
    sde = MODELS[name]()
    times, seen = series(sde, 60, batch, (0.2, 20.0))
    seen[..., 40:, :] += 30
    initial = start(sde, known)
    place = "reading" if known else None
    found = RobustFilter(sde, robust, start=initial, start_at=place).fit(times.numpy(), seen.numpy())
    found = getattr(found, direction)()
    mean, covariance, weights = looped(sde, times, seen, initial, direction, robust)
    known = np.isfinite(covariance)
    np.testing.assert_array_equal(np.isfinite(found.state_covariances), known)
    np.testing.assert_allclose(found.state_covariances[known], covariance[known], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.states, mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-8)
    assert (found.weights[~np.isnan(found.weights)] < 0.1).any() == robust


def test_one_warning_without_a_compiler(monkeypatch):
    """Of all calls together; it says how much longer they take, and the way out."""

    def refuse(sources):
        raise compiled.BuildError("no C++ compiler: got none; install one")

    monkeypatch.setattr(compiled, "load_library", refuse)
    monkeypatch.setattr(compiled, "library", functools.cache(compiled.library.__wrapped__))
    given = np.arange(5.0), np.arange(5.0)
    fixed = {"sigma2.level": 1.0, "sigma2.irregular": 1.0}
    with pytest.warns(UserWarning, match=r"rfa: .* 40 to 500 times .*: no C\+\+ compiler: .* install"):
        RobustFilter(Level()).fit(*given, fixed=fixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RobustFilter(Trend()).fit(*given, fixed={"sigma2.trend": 1.0, **fixed}).filter()


@pytest.mark.parametrize("direction", ["filter", "smooth"])
def test_far_from_zero_as_statsmodels(direction):
    """A start at 1e8 with a variance of 1e12, a regular series of 300 readings."""
    sde, times = trend(), 0.1 * torch.arange(300, dtype=torch.float64)
    mean, covariance = matrix([1e8, 1e8]), 1e12 * torch.eye(2).double()
    seen = 1e8 + sde.simulate(times, torch.Generator().manual_seed(0)).observations
    expected = statsmodels_of(sde, seen, 0.1, (mean, covariance))
    states = expected.filtered_state if direction == "filter" else expected.smoothed_state
    found = robust_estimate(sde, times, seen, nu=math.inf, initial=(mean, covariance), direction=direction)
    # statsmodels' covariance form loses digits of 1e12 beside the noise of 0.5
    np.testing.assert_allclose(found.mean, states.T, rtol=1e-8, atol=1e-2)
    np.testing.assert_allclose(found.mean[100:, 0], states[0, 100:], rtol=1e-12)
