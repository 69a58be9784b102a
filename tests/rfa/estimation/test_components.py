"""`RobustFilter(robust=False)` against statsmodels' `UnobservedComponents`: likelihood, states, forecasts, fits."""

import numpy as np
import pytest
import scipy.linalg
import statsmodels.api as sm
from statsmodels.tsa.statespace.initialization import Initialization

from rfa.estimation import Autoregression, Cycle, Level, RobustFilter, Season, Trend
from rfa.estimation.components import StructuralModel

from .series_models import column, dense_log_likelihood, hours, unobserved_components

NILE = column("nile.csv", "volume")
CO2 = column("co2.csv", "co2")[:640:4]  # every fourth week: weekly ones cost statsmodels the digits of its start
HOURS = hours(240)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # the start is diffuse to a relative 1e-8
CYCLE = {"cycle": True, "stochastic_cycle": True}
HOURLY = (
    HOURS,
    Level() + Season(24) + Autoregression(),
    ["level", "season.1", "season.1.auxiliary", "ar"],
    {"sigma2.irregular": 0.5, "sigma2.level": 0.3, "sigma2.freq_seasonal_24(1)": 0.01, "sigma2.ar": 1.0, "ar.L1": 0.7},
    {"level": "llevel", "freq_seasonal": [{"period": 24, "harmonics": 1}], "autoregressive": 1},
    12,
)
SEASON = {"freq_seasonal": [{"period": 13, "harmonics": 2}]}


def same(found: RobustFilter, expected, states: list[str], settled: int) -> None:
    """Log-likelihood, states and forecasts. Filtered states from the time on at which all of them are known."""
    assert found.log_likelihood == pytest.approx(expected.llf, rel=1e-9, abs=1e-6)
    filtered, smoothed = found.filter(), found.smooth()
    spread = np.nanstd(filtered.values)
    for k, name in enumerate(states):
        now, later = filtered.states[name][settled:], smoothed.states[name]
        np.testing.assert_allclose(now, expected.filtered_state[k][settled:], rtol=1e-6, atol=1e-6 * spread)
        np.testing.assert_allclose(later, expected.smoothed_state[k], rtol=1e-6, atol=1e-6 * spread)
        variance = smoothed.state_variances[name]
        np.testing.assert_allclose(variance, expected.smoothed_state_cov[k, k], rtol=1e-6, atol=1e-6 * spread**2)
    ahead, theirs = found.forecast(12), expected.get_forecast(12)
    np.testing.assert_allclose(ahead.mean, theirs.predicted_mean, **CLOSE)
    np.testing.assert_allclose(ahead.variance, theirs.var_pred_mean, **CLOSE)
    lower, upper = ahead.interval(0.9)
    bounds = theirs.conf_int(alpha=0.1)
    np.testing.assert_allclose(np.stack([lower, upper], axis=-1), bounds, **CLOSE)


@pytest.mark.parametrize(
    ("values", "model", "states", "parameters", "specification", "settled"),
    [
        (
            NILE,
            Trend(),
            ["level", "trend"],
            {"sigma2.irregular": 15099.0, "sigma2.level": 1469.0, "sigma2.trend": 0.0},
            {"level": "lltrend"},
            2,
        ),
        (
            CO2,
            Trend() + Season(13, 2),
            ["level", "trend", "season.1", "season.1.auxiliary", "season.2", "season.2.auxiliary"],
            {"sigma2.irregular": 0.1, "sigma2.level": 0.01, "sigma2.trend": 0.0, "sigma2.freq_seasonal_13(2)": 0.001},
            {"level": "lltrend", **SEASON},
            20,
        ),
        HOURLY,
    ],
    ids=["nile", "co2", "hours"],
)
def test_statsmodels(values, model, states, parameters, specification, settled):
    found = RobustFilter(model, robust=False).fit(np.arange(len(values)), values, fixed=parameters)
    same(found, unobserved_components(values, parameters, **specification), states, settled)


WALK = np.random.default_rng(0).normal(0, 0.3, 50).cumsum() + np.random.default_rng(1).normal(size=50)
GRID, SHIFTED = np.arange(50.0), np.arange(50.0) + 0.5 * (np.arange(50) > 40)
NEVER_SEEN = {  # the sine of a wave whose half period is the step; states held twice
    "months": (Level() + Season(12, 6), GRID, WALK, None),
    "every third": (Level() + Season(6), GRID, np.where(np.arange(50) % 3, np.nan, WALK), None),
    "aliases": (Level() + Season(4, 3), GRID, WALK, None),
    "seen once": (Level() + Season(4, 2), SHIFTED, WALK, None),
    "irregular": (Level() + Season(4, 2), np.sort(np.random.default_rng(2).uniform(0, 50, 50)), WALK, None),
    "ones": (Level(), GRID, WALK, np.ones((50, 1))),
    "line": (Trend() + Season(4, 2), GRID, WALK, np.c_[3 * np.ones(50), GRID]),
}


@pytest.mark.parametrize("case", NEVER_SEEN.values(), ids=NEVER_SEEN)
def test_states_that_no_reading_sees(in_torch, case):
    """The likelihood of one dense Gaussian. Forecasts between readings are finite."""
    model, times, values, exog = case
    model = StructuralModel.of(model)
    fixed = {name: 0.1 if name == "sigma2.level" else 0.05 for name in model.parameters} | {"sigma2.irregular": 1.0}
    found = RobustFilter(model, robust=False).fit(times, values, fixed=fixed, exog=exog)
    regressors = np.empty((50, 0)) if exog is None else exog
    expected = dense_log_likelihood(model.to_sde(fixed), times, values, regressors)
    assert found.log_likelihood == pytest.approx(expected, abs=1e-8)
    in_loops = in_torch(RobustFilter(model, robust=False).fit, times, values, fixed=fixed, exog=exog)
    assert in_loops.log_likelihood == pytest.approx(expected, abs=1e-8)
    between = found.forecast(times[-1] + np.array([0.5, 1.5]), exog=None if exog is None else exog[-2:])
    assert np.isfinite([between.mean, between.variance]).all()
    assert (np.abs(between.mean) < 100).all()


def test_a_damped_trend():
    """statsmodels' trend with the transition and the noise of one step from the matrix exponential; the limit ahead.

    The slope starts stationary.
    """
    parameters = {"sigma2.irregular": 15099.0, "sigma2.level": 1469.0, "sigma2.trend": 30.0, "damping.trend": 0.9}
    mu = -np.log(0.9)
    dynamics, diffusion = np.array([[0.0, 1.0], [0.0, -mu]]), np.diag([1469.0, 30.0])
    transition = scipy.linalg.expm(dynamics)
    grid = np.linspace(0, 1, 2001)
    gained = [(step := scipy.linalg.expm(dynamics * s)) @ diffusion @ step.T for s in grid]
    model = sm.tsa.UnobservedComponents(NILE, "lltrend", use_exact_diffuse=True)
    model.update([parameters[name] for name in model.param_names])
    model["transition"], model["state_cov"] = transition, scipy.integrate.simpson(gained, x=grid, axis=0)
    start = Initialization(2)
    start.set(0, "diffuse")
    start.set(1, "known", constant=[0.0], stationary_cov=[[30.0 / (2 * mu)]])
    model.ssm.initialize(start)
    expected = model.ssm.smooth()
    found = RobustFilter(Trend(damped=True), robust=False).fit(np.arange(100), NILE, fixed=parameters)
    assert found.log_likelihood == pytest.approx(expected.llf, abs=1e-6)
    np.testing.assert_allclose(found.smooth().states["trend"], expected.smoothed_state[1], **CLOSE)
    now = found.filter().states
    limit = now["level"][-1] + now["trend"][-1] / mu
    assert found.forecast([1000.0]).mean[0] == pytest.approx(limit)


def test_a_damped_cycle():
    """statsmodels' cycle with a stationary start in the place of its diffuse one."""
    parameters = {"sigma2.irregular": 9000.0, "sigma2.cycle": 4000.0, "frequency.cycle": 0.5, "damping.cycle": 0.8}
    model = sm.tsa.UnobservedComponents(NILE - NILE.mean(), irregular=True, **CYCLE, damped_cycle=True)
    model.loglikelihood_burn = 0
    model.update([parameters[name] for name in model.param_names])
    model.ssm.initialize_stationary()
    expected = model.ssm.smooth()
    found = RobustFilter(Cycle(), robust=False).fit(np.arange(100), NILE - NILE.mean(), fixed=parameters)
    assert found.log_likelihood == pytest.approx(expected.llf, abs=1e-6)
    np.testing.assert_allclose(found.smooth().states["cycle"], expected.smoothed_state[0], **CLOSE)


def test_regression_is_generalised_least_squares():
    """On a level that does not move: the coefficients of least squares. And statsmodels' states with a level."""
    generator = np.random.default_rng(0)
    exog = generator.normal(size=(60, 2))
    values = 3 + exog @ [2.0, -1.0] + generator.normal(size=60)
    fixed = {"sigma2.irregular": 1.0, "sigma2.level": 0.0}
    found = RobustFilter(Level(), robust=False).fit(np.arange(60), values, exog=exog, fixed=fixed)
    design = np.column_stack([np.ones(60), exog])
    expected = scipy.linalg.lstsq(design, values)[0]
    last = found.filter().states
    np.testing.assert_allclose([last[name][-1] for name in ("level", "beta.x1", "beta.x2")], expected, **CLOSE)
    variance = np.linalg.inv(design.T @ design).diagonal()
    np.testing.assert_allclose(found.filter().state_variances["beta.x1"][-1], variance[1], **CLOSE)
    fixed["sigma2.level"] = 0.5
    model = sm.tsa.UnobservedComponents(values, "llevel", exog=exog, mle_regression=False, use_exact_diffuse=True)
    theirs = model.smooth([fixed[name] for name in model.param_names])
    found = RobustFilter(Level(), robust=False).fit(np.arange(60), values, exog=exog, fixed=fixed)
    assert found.log_likelihood == pytest.approx(theirs.llf, abs=1e-6)
    ahead = found.forecast(2, exog=[[1.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(
        ahead.mean, theirs.get_forecast(2, exog=[[1.0, 0.0], [0.0, 1.0]]).predicted_mean, **CLOSE
    )


def test_the_fit_is_statsmodels():
    """Durbin and Koopman's values of the Nile, and statsmodels' maximum of an hourly series."""
    nile = RobustFilter(Level(), robust=False).fit(np.arange(100), NILE)
    assert nile.converged
    assert nile.parameters == pytest.approx({"sigma2.irregular": 15098.5, "sigma2.level": 1469.18}, rel=1e-4)
    found = RobustFilter(Level() + Autoregression(), robust=False).fit(np.arange(100), HOURS[:100])
    model = sm.tsa.UnobservedComponents(HOURS[:100], "llevel", autoregressive=1, use_exact_diffuse=True)
    expected = model.fit([found.parameters[name] for name in model.param_names], disp=False)
    assert found.log_likelihood > expected.llf - 1e-4  # their search starts at ours and finds nothing better


def test_a_long_series_converges():
    """The slope that is left grows as the likelihood does: with 30,000 readings differences leave 0.03 nats."""
    random = np.random.default_rng(0)
    values = (0.5 * random.normal(size=30_000)).cumsum() + random.normal(size=30_000)
    found = RobustFilter(Level(), robust=False).fit(np.arange(30_000.0), values)
    assert found.converged
    assert found.parameters == pytest.approx({"sigma2.irregular": 1.0, "sigma2.level": 0.25}, rel=0.05)
    assert not RobustFilter(Level(), robust=False).fit(np.arange(30_000.0), values, max_steps=1).converged


def test_standard_errors_are_statsmodels():
    """Of variances, and of a factor. None of what is fixed; infinite at zero. Differences keep four digits."""
    nile = RobustFilter(Level(), robust=False).fit(np.arange(100), NILE)
    model = sm.tsa.UnobservedComponents(NILE, "llevel", use_exact_diffuse=True)
    theirs = model.smooth([nile.parameters[name] for name in model.param_names], cov_type="approx").bse
    assert nile.standard_errors == pytest.approx(dict(zip(model.param_names, theirs, strict=True)), rel=1e-3)
    assert nile.standard_errors == pytest.approx({"sigma2.irregular": 3145.6, "sigma2.level": 1280.4}, rel=1e-3)
    fixed = {"sigma2.level": 0.2}
    found = RobustFilter(Level() + Autoregression(), robust=False).fit(np.arange(240), HOURS, fixed=fixed)
    model = sm.tsa.UnobservedComponents(HOURS, "llevel", autoregressive=1, use_exact_diffuse=True)
    with model.fix_params(fixed):
        theirs = model.smooth(
            [found.parameters[name] for name in model.param_names if name not in fixed], cov_type="approx"
        ).bse
    expected = {name: theirs[list(model.param_names).index(name)] for name in found.standard_errors}
    assert found.standard_errors == pytest.approx(expected, rel=1e-3)
    line = RobustFilter(Trend(), robust=False).fit(np.arange(40), np.arange(40.0) + np.cos(3 * np.arange(40.0)))
    at_zero = [name for name, value in line.parameters.items() if value == 0]
    assert at_zero == [name for name, error in line.standard_errors.items() if error == np.inf] != []


def test_the_fit_leaves_a_variance_that_has_gone_to_zero():
    """Its likelihood is flat there. The season's maximum lies at a variance a hundred times below its start."""
    generator, times = np.random.default_rng(0), np.arange(500.0)
    level, turn = generator.normal(0, 0.5, 500).cumsum(), 2 * np.pi * times / 24
    values = 10 + level + 2 * np.sin(turn) + np.cos(2 * turn) + generator.normal(size=500)
    found = RobustFilter(Trend() + Season(24, 2), robust=False).fit(times, values)
    season = "sigma2.freq_seasonal_24(2)"
    assert 1e-4 < found.parameters[season] < 1e-3
    without = RobustFilter(Trend() + Season(24, 2), robust=False).fit(times, values, fixed={season: 0.0})
    assert found.log_likelihood > without.log_likelihood + 0.5
