"""`RobustFilter` on compiled code against the same in PyTorch, one reading after another."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cover import cover

from rfa.estimation import (
    Autoregression,
    Component,
    Cycle,
    Level,
    LinearSDE,
    RobustFilter,
    Season,
    StructuralModel,
    Trend,
    compiled,
)
from rfa.estimation.parameter_search import series_scale
from rfa.estimation.readings_problem import ReadingsTable, exact_log_likelihood, run_readings

MODELS: dict[str, Component | StructuralModel] = {
    "level": Level(),
    "trend": Trend(),
    "season": Level() + Season(5.0),
    "cycle": Cycle(),
}
VALUES = {
    "sigma2.irregular": 1.0,
    "sigma2.level": 0.2,
    "sigma2.trend": 0.01,
    "sigma2.freq_seasonal_5.0(1)": 0.05,
    "sigma2.cycle": 0.3,
    "frequency.cycle": 0.7,
    "damping.cycle": 0.8,
    "sigma2.ar": 0.5,
    "ar.L1": 0.6,
}


def series(seed: int = 0):
    """Two sensors that often read at once, gaps, wrong readings, a jump, known noises and offsets, a regressor."""
    generator = np.random.default_rng(seed)
    times = np.repeat(generator.exponential(size=40).cumsum(), 2)
    values = generator.normal(size=80) + np.sin(times) + 20 * (times > 25)
    values[generator.random(80) < 0.1] = np.nan
    values[[10, 33]] += 100.0
    given = {"sensor": ["a", "b"] * 40, "noise": generator.random(80), "offset": 0.1 * np.arange(80)}
    return times, values, {**given, "exog": generator.normal(size=80)}


def fitted(model, robust: bool) -> RobustFilter:
    times, values, given = series()
    fixed = {name: value for name, value in VALUES.items() if name in model.parameters}
    fixed |= {"sigma2.irregular.a": 1.0, "sigma2.irregular.b": 2.0}
    return RobustFilter(model, robust).fit(times, values, fixed=fixed, **given)


def assert_same(found, expected, tolerance: float) -> None:
    for name in ("mean", "variance", "weights", "innovations"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance, err_msg=name)
    np.testing.assert_array_equal(found.outliers, expected.outliers)
    for name, mine in found.states.items():
        np.testing.assert_allclose(mine, expected.states[name], rtol=tolerance, atol=tolerance, err_msg=name)


@cover(1, name=MODELS, robust=[False, True], what=["filter", "smooth", "forecast"])
def test_as_in_torch(in_torch, name, robust, what):
    """To 5e-5: where the start has a variance of 1e8, both keep five digits of the first states."""
    found = fitted(MODELS[name] + Autoregression(), robust)
    later = {"exog": [0.5, 1.0], "sensor": "a", "offset": 0.0, "noise": 0.0}
    given, options = ([[70.0, 71.5]], later) if what == "forecast" else ([], {})
    mine = getattr(found, what)(*given, **options)
    expected = in_torch(fitted, MODELS[name] + Autoregression(), robust)
    assert found.log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-10)
    theirs = in_torch(getattr(expected, what), *given, **options)
    assert_same(mine, theirs, 5e-5)
    assert (mine.weights[~np.isnan(mine.weights)] < 0.1).any() == (robust and what != "forecast")


@pytest.mark.parametrize("name", ["trend", "cycle"])
def test_rolling_forecasts_as_in_torch(in_torch, name):
    found, pairs = fitted(MODELS[name], True), ([40, 40, 50], [60, 79, 60])
    mine, theirs = found.rolling_forecast(*pairs), in_torch(found.rolling_forecast, *pairs)
    np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_the_likelihood_of_several_models(in_torch):
    """Together as one by one, and as in PyTorch. One reading shows one direction."""
    model = Trend() + Season(5.0) + Cycle()
    found = fitted(model, robust=False)
    variances = torch.tensor([0.01, 0.1, 3.0])
    for length in (1, 80):
        table = ReadingsTable.of(found._all, found._readings.selected(slice(length)))
        together = exact_log_likelihood(table.problem({**found._values, "sigma2.level": variances}))
        alone = [exact_log_likelihood(table.problem({**found._values, "sigma2.level": v.item()})) for v in variances]
        assert torch.equal(together, torch.cat(alone))
        problem = table.problem({**found._values, "sigma2.level": variances})
        torch.testing.assert_close(together, in_torch(exact_log_likelihood, problem), rtol=1e-10, atol=1e-9)


def test_transitions_of_blocks_and_models():
    """States that move independently are discretised by themselves, and once for equal ones: as a matrix exponential.

    Of states in another order, too, in which the blocks do not stand together.
    """
    model, variances = Trend() + Season(5.0) + Autoregression(), torch.tensor([0.1, 0.2, 0.1], dtype=torch.float64)
    given = {**VALUES, "sigma2.trend": variances, "ar.L1": torch.tensor([0.5, 0.5, 0.6], dtype=torch.float64)}
    sde = model.to_sde(given)
    order, lags = [2, 0, 4, 3, 1], torch.tensor([0.0, 1e-3, 0.7, 30.0], dtype=torch.float64)
    for states in (slice(None), order):
        turned = (x[..., states, :][..., states] for x in (sde.dynamics, sde.diffusion))
        one = LinearSDE(*turned, sde.observation, sde.observation_noise)
        for mine, theirs in zip(
            compiled.discretize(one, lags), (one.transition(lags), one.covariance(lags)), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("robust", [False, True])
def test_an_update_is_the_same_number(robust):
    """Not a digit differs from the filter of the whole series, over wrong readings and a jump."""
    generator = np.random.default_rng(3)
    values = generator.normal(size=60)
    values[[5, 30]] += 40.0
    values[33] = np.nan
    values[45:] += 15.0
    fixed = {"sigma2.level": 0.01, "sigma2.trend": 0.001, "sigma2.irregular": 1.0}
    whole = RobustFilter(Trend(), robust).fit(np.arange(60), values, fixed=fixed).filter()
    part = RobustFilter(Trend(), robust).fit(np.arange(25), values[:25], fixed=fixed)
    # the scale of the start is that of the readings that `fit` has seen
    part._scale = series_scale(RobustFilter(Trend(), robust).fit(np.arange(60), values, fixed=fixed)._readings, robust)
    for k in range(25, 60):
        found = part.update(k, values[k])
        assert (found.mean[0], found.variance[0]) == (whole.mean[k], whole.variance[k])
        np.testing.assert_equal(found.weights[0], whole.weights[k])


def test_each_fault_of_a_row_says_what_is_wrong():
    values = 1e6 * np.cumsum(np.cumsum(np.random.default_rng(0).standard_normal(30)))
    found = RobustFilter(Trend() + Season(5.0)).fit(np.arange(30.0), values)
    problem, kernel = found._filtered()[0], found._kernel
    start = problem.first(kernel, found._scale)
    spoilt = torch.where(torch.arange(30) == 7, torch.inf, problem.table.values)
    infinite = replace(problem, table=replace(problem.table, values=spoilt))
    for call, says in (
        (lambda: run_readings(kernel, problem, found._state.copy()), "times: got 0 in row 0, expected a time not"),
        (lambda: run_readings(kernel, infinite, start), "readings: got an infinite value at 7 in row 7, expected"),
        (lambda: found.forecast([40.0, 1e99]), "query_times: got 1e.99, expected a shorter gap"),
        (lambda: found.update(1e99, 1.0), "time: got 1e.99, expected a shorter gap"),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            call()
