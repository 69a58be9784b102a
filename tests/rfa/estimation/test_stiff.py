"""Modes of very different decay, gaps beyond all time constants, states in very different units."""

import math

import pytest
import torch
from cover import cover

from rfa.estimation import LinearSDE

from .models import EYE, irregular_times, matrix, papers_estimate, with_gaps

ROBUST = {"prior": "riccati", "nu": 16.0, "kappa": 2.0, "iterations": 5, "start": "leave_one_out"}


def lagging() -> LinearSDE:
    """A slow quantity, seen through a sensor that follows it within one unit of time."""
    noise = matrix([[1e-3, 0.0], [0.0, 1e-4]])
    return LinearSDE(matrix([[-1.0, 1.0], [0.0, -1e-5]]), noise, matrix([[1.0, 0.0]]), matrix([[0.01]]))


@cover(
    1,
    gap=[0.1, 2.0, 8.0, 30.0, 3600.0],
    direction=["filter", "smooth"],
    start=[None, (matrix([0.0, 0.0]), EYE)],
)
def test_a_lagging_sensor(gap, direction, start):
    """With weights of nearly 1 the estimator is the Kalman filter; with others it stays near it."""
    observations = matrix([[0.1], [0.2], [0.3], [0.2], [0.1], [0.4]])
    times = gap * torch.arange(6, dtype=torch.float64)
    options = {"prior": "riccati", "direction": direction, "initial": start}
    kalman = papers_estimate(lagging(), times, observations, **options)
    believing = papers_estimate(lagging(), times, observations, nu=1e12, kappa=1.0, start="leave_one_out", **options)
    # weights differ from 1 by 1e-12 d^2, shares are up to 10 times the estimate
    torch.testing.assert_close(believing.mean, kalman.mean, rtol=0, atol=1e-7)
    torch.testing.assert_close(believing.covariance, kalman.covariance, rtol=1e-5, atol=1e-7)
    robust = papers_estimate(lagging(), times, observations, **{**ROBUST, **options})
    known = kalman.covariance.isfinite()
    assert robust.covariance[known].isfinite().all()
    error = (robust.mean - kalman.mean).abs()
    variance = kalman.covariance.diagonal(dim1=-2, dim2=-1)
    assert variance.isfinite().sum() >= 10
    assert (error < 3 * variance.sqrt())[variance.isfinite()].all()


@cover(1, nu=[math.inf, 5.0], gap=[30.0, 1e6])
def test_a_level_beside_a_fast_mode(gap, nu):
    """The level wanders on, `P + q gap`, while the fast mode has settled at `q / (2 mu)`."""
    sde = LinearSDE(matrix([[-1e3, 0.0], [0.0, 0.0]]), EYE, matrix([[1.0, 1.0]]), matrix([[1.0]]))
    found = papers_estimate(
        sde, matrix([0.0]), matrix([[1.0]]), prior="riccati", nu=nu, initial=(matrix([0.0, 0.0]), EYE),
        start="leave_one_out", query_times=matrix([gap]),
    )  # fmt: skip
    if math.isinf(nu):  # the gain is P h / (h P h + R) = 1 / 3
        torch.testing.assert_close(found.mean[0], matrix([0.0, 1 / 3]), rtol=1e-9, atol=1e-300)
        torch.testing.assert_close(
            found.covariance[0], torch.diag(matrix([0.5e-3, 2 / 3 + gap])), rtol=1e-9, atol=1e-12
        )
    variances = found.covariance[0].diagonal()
    assert variances[0] < 1e-3
    assert gap < variances[1] < 1 + gap + 0.1 * gap


@cover(1, prior=["lyapunov", "riccati"], direction=["filter", "smooth"], nu=[math.inf, 5.0])
def test_units_of_states_and_components_do_not_matter(prior, direction, nu):
    """A change of units of the states and of what is seen changes nothing but the units."""
    times, states, seen = irregular_times(15), matrix([1e-7, 1e7]), matrix([1e5, 1e-6])
    mixed = matrix([[1.0, 1.0], [1.0, -0.5]])
    plain = LinearSDE(torch.diag(matrix([-0.3, -0.1])), EYE, mixed, 0.25 * EYE)
    outer = states[:, None] / states
    scaled = LinearSDE(
        outer * plain.dynamics,
        states[:, None] * states * plain.diffusion,
        seen[:, None] / states * plain.observation,
        seen[:, None] * seen * plain.observation_noise,
    )
    observations = with_gaps(plain.simulate(times, torch.Generator().manual_seed(0)).observations)
    options = {"prior": prior, "direction": direction, "nu": nu, "start": "leave_one_out", "iterations": 3}
    expected = papers_estimate(plain, times, observations, **options)
    found = papers_estimate(scaled, times, seen * observations, **options)
    torch.testing.assert_close(found.mean / states, expected.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.covariance / (states[:, None] * states), expected.covariance, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-6, atol=1e-6)


def test_what_is_seen_in_part_stays_unknown_in_part():
    """A stationary start is used where nothing is seen; after the first look the velocity is unknown, then known."""
    sde = LinearSDE(
        matrix([[0.0, 1.0], [-4.0, -0.4]]), torch.diag(matrix([0.0, 1.0])), matrix([[1.0, 0.0]]), matrix([[0.1]])
    )
    times, observations = (
        0.05 * torch.arange(6, dtype=torch.float64),
        matrix([[math.nan], [0.1], [0.2], [0.3], [0.2], [0.1]]),
    )
    for nu in (math.inf, 5.0):
        found = papers_estimate(sde, times, observations, prior="riccati", nu=nu)
        torch.testing.assert_close(found.covariance[0], sde.stationary_covariance())
        variance = found.covariance[:, 1, 1]
        assert variance[1].isinf()
        assert variance[2:].isfinite().all()
        assert (variance[2:].diff() < 0).all()


def test_times_that_an_unstable_model_outgrows_step_by_step():
    sde = LinearSDE(*(matrix([[1.0]]),) * 4)
    observations = matrix([[1.0], [math.nan], [math.nan], [2.0]])
    for direction in ("filter", "smooth"):
        with pytest.raises(
            ValueError, match=r"^times: got a time by which the state overflows \(number 2 of all times\), expected"
        ):
            papers_estimate(sde, 300 * torch.arange(4.0), observations, prior="riccati", direction=direction)
        with pytest.raises(ValueError, match=r"^times: got a gap of 400, over which .* overflows$"):
            papers_estimate(sde, matrix([0.0, 1.0, 401.0]), observations[:3], prior="riccati", direction=direction)


def test_an_unstable_model_seen_rarely():
    """x grows by e^20 between readings of variance 1, and so does what the next one says of this one."""
    sde, times, observations = (
        LinearSDE(*(matrix([[1.0]]),) * 4),
        matrix([0.0, 20.0, 40.0]),
        matrix([[1.0], [2.0], [3.0]]),
    )
    found = papers_estimate(sde, times, observations, prior="riccati")
    torch.testing.assert_close(found.mean, observations, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.covariance[:, 0, 0], torch.ones(3).double(), rtol=1e-9, atol=0)
    # backward the state shrinks to V' = q / (2 mu) = 1/2, so that the future says N(0, 1/2) of it
    smoothed = papers_estimate(sde, times, observations, prior="riccati", direction="smooth")
    torch.testing.assert_close(smoothed.mean[:, 0], matrix([1 / 3, 2 / 3, 3.0]), rtol=0, atol=1e-7)
    torch.testing.assert_close(smoothed.covariance[:, 0, 0], matrix([1 / 3, 1 / 3, 1.0]), rtol=1e-7, atol=0)


def test_a_query_before_everything_changes_nothing():
    """Also where a state decays by more than numbers can on the way."""
    sde, observations = LinearSDE(*(matrix([[x]]) for x in (-1.0, 2.0, 1.0, 1.0))), matrix([[4.0], [5.0]])
    for gap in (1.0, 380.0, 2000.0):
        times = matrix([gap, gap + 1.0])
        expected = papers_estimate(sde, times, observations, prior="riccati")
        found = papers_estimate(sde, times, observations, prior="riccati", query_times=matrix([0.0, gap, gap + 1.0]))
        torch.testing.assert_close(found.mean[1:], expected.mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.covariance[1:], expected.covariance, rtol=1e-12, atol=0)
