"""Compiled filters against the same filters in PyTorch and statsmodels."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch
from cover import cover

from rfa.estimation import LinearSDE, compiled, recursive_estimate, robust_estimate

from .models import coupled, irregular_times, matrix, rotating, statsmodels_of, trend, with_gaps

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


def test_one_warning_without_a_compiler(monkeypatch):
    """Of all calls together; it says how much longer they take, and the way out."""

    def refuse(sources):
        raise compiled.BuildError("no C++ compiler: got none; install one")

    monkeypatch.setattr(compiled, "load_library", refuse)
    monkeypatch.setattr(compiled, "library", functools.cache(compiled.library.__wrapped__))
    given = rotating(), *series(rotating(), 5)
    with pytest.warns(UserWarning, match=r"rfa: .* 40 to 500 times .*: no C\+\+ compiler: .* install"):
        recursive_estimate(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        robust_estimate(*given)


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
    expected = statsmodels_of(sde, seen, 0.1, (mean, covariance))
    states = expected.filtered_state if direction == "filter" else expected.smoothed_state
    found = robust_estimate(sde, times, seen, nu=math.inf, initial=(mean, covariance), direction=direction)
    # statsmodels' covariance form loses digits of 1e12 beside the noise of 0.5
    np.testing.assert_allclose(found.mean, states.T, rtol=1e-8, atol=1e-2)
    np.testing.assert_allclose(found.mean[100:, 0], states[0, 100:], rtol=1e-12)
