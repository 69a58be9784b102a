"""The shapes in the annotations of `rfa.estimation`, checked in one call of each way (tests/conftest.py)."""

import math

import jaxtyping
import pytest
import torch
from cover import cover

from rfa.estimation import (
    Autoregression,
    Cycle,
    LinearSDE,
    RobustFilter,
    Season,
    Trend,
    robust_estimate,
)
from rfa.estimation.linear_sde import symmetric

from .models import coupled, irregular_times, matrix, trend, with_gaps

LENGTH, SERIES = 12, 3
QUERIES = matrix([-0.3, 0.7, 40.0])
OPTIONS = [
    {"nu": math.inf},
    {"nu": math.inf, "direction": "smooth", "query_times": QUERIES},
    {},
    {"direction": "smooth", "nu": 4.0, "kappa": 1.0},
    {"start": "leave_one_out", "kappa": None, "query_times": QUERIES},
    {"start": "query", "direction": "smooth", "penalty": "welsch", "return_weights": False},
    {"prior": "lyapunov"},
    {"prior": "lyapunov", "start": "leave_one_out"},
    {"prior": "lyapunov", "start": "query", "direction": "smooth", "query_times": QUERIES},
]


def drawn(sde: LinearSDE, times: torch.Tensor, gaps: bool) -> torch.Tensor:
    seen = sde.simulate(times, torch.Generator().manual_seed(0), (0.2, 100.0), sample_shape=(SERIES,)).observations
    seen[0, 8:] += 50.0  # a jump: a challenger
    return with_gaps(seen) if gaps else seen


@cover(1, known=[False, True], model=[coupled, trend])
def test_dense(model, known):
    sde, times = model(), irregular_times(LENGTH)
    n = sde.state_size
    for gaps in (False, True):
        seen = drawn(sde, times, gaps)
        initial = (torch.zeros(n).double(), torch.eye(n).double()) if known else None
        for options in OPTIONS:
            found = robust_estimate(sde, times, seen, initial=initial, **options)
            queries = len(options.get("query_times", times))
            assert found.mean.shape == (SERIES, queries, n)
            assert found.covariance.shape == (SERIES, queries, n, n)
            if options.get("return_weights", True):
                assert found.weights.shape == (SERIES, queries, LENGTH)


@pytest.mark.parametrize("robust", [False, True])
def test_robust_filter(robust):
    """Two sensors, regressors, a season, a missing reading."""
    times = irregular_times(LENGTH)
    values = torch.stack([times.sin(), times.cos()], dim=-1)
    values[3, 1] = torch.nan
    model = Trend() + Cycle() + Season(period=2) + Autoregression()
    exog = torch.arange(LENGTH * 1.0).square()
    found = RobustFilter(model, robust).fit(times, values, exog=exog, max_steps=1)
    later = found.forecast([times[-1].item() + 1], exog=[3.0])
    for estimate, rows in ((found.filter(), 2 * LENGTH), (found.smooth(), 2 * LENGTH), (later, 1)):
        assert estimate.mean.shape == estimate.variance.shape == estimate.innovations.shape == (rows,)
        assert [state.shape for state in estimate.states.values()] == 8 * [(rows,)]
    assert found.update(times[-1].item() + 1, 0.0, sensor="2", exog=[2.0]).mean.shape == (1,)
    assert found.diagnostics(torch.zeros(2 * LENGTH + 1, 8)).nees > 0


def test_a_wrong_shape_is_an_error():
    with pytest.raises(jaxtyping.TypeCheckError):
        symmetric(torch.zeros(2, 3))
