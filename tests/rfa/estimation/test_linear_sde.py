"""Transition, covariance and samples of a linear SDE, against scipy."""

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.integrate import quad_vec

from rfa.estimation import LinearSDE

from .models import EYE, coupled, matrix, rotating, trend

DYNAMICS = {
    "rotating": [[-0.3, -2.0], [2.0, -0.3]],
    "not diagonalisable": [[0.0, 1.0], [0.0, 0.0]],
    "diagonal": [[-1.0, 0.0], [0.0, -0.01]],
    "unstable, not diagonalisable": [[0.5, 1.0], [0.0, 0.5]],
    "stiff": [[-50.0, 3.0], [0.0, -0.1]],
    "still": [[0.0, 0.0], [0.0, 0.0]],
}
DIFFUSION = matrix([[0.5, 0.1], [0.1, 0.3]])


@pytest.mark.parametrize("name", DYNAMICS)
def test_transition_and_covariance_are_scipys(name):
    dynamics = np.array(DYNAMICS[name])
    sde = LinearSDE(matrix(DYNAMICS[name]), DIFFUSION, EYE, EYE)
    lags = matrix([0.0, 1e-6, 0.1, 3.0, 30.0])
    transitions, covariances = sde.transition(lags), sde.covariance(lags)
    for lag, transition, covariance in zip(lags.tolist(), transitions, covariances, strict=True):
        expected = scipy.linalg.expm(dynamics * lag)
        np.testing.assert_allclose(transition, expected, atol=1e-10 * abs(expected).max())

        def moving(s):
            return scipy.linalg.expm(dynamics * s) @ DIFFUSION.numpy() @ scipy.linalg.expm(dynamics * s).T

        integral = quad_vec(moving, 0, lag, epsrel=1e-11, limit=2000)[0]
        np.testing.assert_allclose(covariance, integral, rtol=1e-8, atol=1e-8 * abs(integral).max())
        torch.testing.assert_close(sde.covariance(lag), covariance, rtol=1e-10, atol=1e-10 * abs(integral).max())


def test_lags_have_the_dimensions_that_are_given():
    """Lists and arrays of one lag too."""
    models = [LinearSDE(matrix(DYNAMICS[name]), DIFFUSION, EYE, EYE) for name in ("diagonal", "rotating")]
    for of in (each for sde in models for each in (sde.transition, sde.covariance)):
        for number in (0.5, np.float64(0.5), matrix(0.5)):
            assert of(number).shape == (2, 2)
        for one in ([0.5], np.array([0.5]), matrix([0.5])):
            assert torch.equal(of(one), of(0.5)[None])


def test_stationary_covariance():
    sde = coupled()
    expected = scipy.linalg.solve_continuous_lyapunov(sde.dynamics.numpy(), -sde.diffusion.numpy())
    np.testing.assert_allclose(sde.stationary_covariance(), expected, rtol=1e-10)
    torch.testing.assert_close(sde.covariance(2000.0), sde.stationary_covariance(), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="dynamics: got an eigenvalue with real part 0"):
        trend().stationary_covariance()


BORDER = {
    "a jordan block": [[0.0, 1.0], [0.0, 0.0]],
    "a level": [[-1.0, 0.0], [0.0, 0.0]],
    "a triple integrator": [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]],
}
STABLE = {
    "critically damped": [[-1.0, 1.0], [0.0, -1.0]],
    "hardly damped": [[-1e-11, 1.0], [-1.0, -1e-11]],
    "a damped triple integrator": [[-0.01, 1.0, 0.0], [0.0, -0.01, 1.0], [0.0, 0.0, -0.01]],
}


def in_random_bases(dynamics, count: int = 8):
    """The process in other coordinates, in which its eigenvalues have rounding errors."""
    for seed in range(count):
        size = len(dynamics)
        basis = np.random.default_rng(seed).normal(size=(size, size)) + 2 * np.eye(size)
        noise, eye = torch.from_numpy(basis @ basis.T), torch.eye(size, dtype=torch.float64)
        turned = torch.from_numpy(basis @ np.array(dynamics) @ np.linalg.inv(basis))
        yield LinearSDE(turned, (noise + noise.T) / 2, eye, eye), basis


def test_a_process_at_the_border_of_stability_has_no_stationary_covariance():
    for sde, _ in (each for dynamics in BORDER.values() for each in in_random_bases(dynamics)):
        with pytest.raises(ValueError, match="dynamics: got an eigenvalue with real part"):
            sde.stationary_covariance()
        assert sde.simulate(matrix([0.0, 1.0]), torch.Generator().manual_seed(0)).states[0].eq(0).all()


def test_a_stable_process_has_one_in_any_coordinates():
    for dynamics in map(np.array, STABLE.values()):
        own = scipy.linalg.solve_continuous_lyapunov(dynamics, -np.eye(len(dynamics)))
        for sde, basis in in_random_bases(dynamics):
            expected = basis @ own @ basis.T
            np.testing.assert_allclose(sde.stationary_covariance(), expected, atol=1e-2 * abs(expected).max())


@pytest.mark.parametrize("decay", [1e-18, 1e3])
def test_states_that_turn_beside_their_decay_have_one_in_closed_form(decay):
    sde = LinearSDE(matrix([[-decay, 2.0], [-2.0, -decay]]), 0.3 * EYE, EYE, EYE)
    torch.testing.assert_close(sde.stationary_covariance(), 0.15 / decay * EYE, rtol=1e-12, atol=0)


def test_gradients():
    def covariance(dynamics, diffusion, lag):
        sde = LinearSDE(dynamics, (diffusion + diffusion.mT) / 2, EYE, EYE)
        return sde.covariance(lag), sde.transition(lag), sde.stationary_covariance()

    inputs = (matrix([[-0.3, -2.0], [2.0, -0.4]]), DIFFUSION.clone(), matrix([0.2, 1.7]))
    assert torch.autograd.gradcheck(covariance, [x.requires_grad_() for x in inputs])


def test_samples_have_the_moments_of_the_process():
    sde = rotating()
    times = matrix([0.0, 0.5, 1.5])
    states, observations = sde.simulate(times, torch.Generator().manual_seed(0), sample_shape=(20000,))
    settled = sde.stationary_covariance()
    across = states[:, 1].T @ states[:, 0] / len(states)  # Cov(x(t + h), x(t)) = Phi(h) P
    torch.testing.assert_close(across, sde.transition(0.5) @ settled, rtol=0, atol=0.015)
    error = observations - states
    torch.testing.assert_close(error.square().mean((0, 1)), sde.observation_noise.diagonal(), rtol=0.03, atol=0)
    wild = sde.simulate(times, torch.Generator().manual_seed(0), (0.1, 10.0), sample_shape=(20000,))
    assert torch.equal(wild.states, states)
    assert (wild.observations - states).square().mean().item() == pytest.approx(0.25 * (0.9 + 0.1 * 100), rel=0.05)


def test_series_that_differ_in_their_start_have_random_numbers_of_their_own():
    """Also where only the covariance has a batch: the three first states were one vector."""
    sde, times = rotating(), matrix([0.0, 1.0])
    start = torch.zeros(2), EYE.expand(3, 2, 2)
    states, observations = sde.simulate(times, torch.Generator().manual_seed(0), initial=start, sample_shape=(20000,))
    assert states.shape == observations.shape == (20000, 3, 2, 2)
    across = torch.einsum("sia,sjb->iajb", states[:, :, 0], states[:, :, 0]).reshape(6, 6) / len(states)
    torch.testing.assert_close(across, torch.eye(6, dtype=torch.float64), rtol=0, atol=0.04)  # 4 / sqrt(20000) = 0.03


BAD_MATRICES = [
    ({"dynamics": matrix([[0.0, 1.0]])}, r"^dynamics: got shape \(1, 2\), expected \(..., n, n\)$"),
    ({"dynamics": EYE * torch.nan}, "^dynamics: got NaN or infinite values, expected finite numbers$"),
    ({"diffusion": matrix([[1.0, 0.5], [0.0, 1.0]])}, "diffusion: got a matrix that is not symmetric"),
    ({"diffusion": matrix([[1.0, 2.0], [2.0, 1.0]])}, "diffusion: got an eigenvalue of -1"),
    ({"dynamics": EYE > 0}, "^dynamics: got dtype torch.bool, expected real numbers$"),
    ({"observation_noise": -EYE}, "observation_noise: got an eigenvalue of -1"),
    ({"observation_noise": matrix([[1.0]])}, r"observation_noise: got shape \(1, 1\)"),
    ({"diffusion": matrix([[1.0]])}, r"diffusion: got shape \(1, 1\), expected \(..., 2, 2\)"),
    ({"dynamics": torch.zeros(3, 2, 2), "diffusion": torch.zeros(2, 2, 2)}, "batch dimensions"),
]


def test_bad_matrices():
    legal = {"dynamics": -EYE, "diffusion": EYE, "observation": EYE, "observation_noise": EYE}
    for given, message in BAD_MATRICES:
        with pytest.raises(ValueError, match=message):
            LinearSDE(**(legal | given))


def test_bad_lags_times_and_outliers():
    sde = rotating()
    fast = LinearSDE(1e200 * matrix([[0.0, 1.0], [-1.0, 0.0]]), EYE, EYE, EYE)
    for call, message in [
        (lambda: fast.transition(1e120), r"dt: got 1e\+120, expected lags with a finite .A. dt, where .A. is 1e\+200"),
        (lambda: sde.covariance(-0.1), "dt: got -0.1, expected lags >= 0"),
        (lambda: sde.transition(torch.nan), "^dt: got NaN or infinite values, expected finite lags$"),
        (lambda: sde.transition("x"), "dt: got 'x', expected a number or a tensor"),
        (lambda: sde.simulate(matrix([1.0, 0.0])), "times: got NaN, infinite or decreasing"),
        (lambda: sde.simulate(matrix([0.0, 1.0]), outliers=(2.0, 10.0)), "outliers: got"),
        (lambda: sde.simulate(torch.zeros(0)), r"times: got shape \(0,\), expected"),
        (lambda: sde.simulate(torch.zeros(2), initial=(torch.zeros(3), EYE)), r"initial: got a mean of shape \(3,\)"),
        (lambda: sde.simulate(torch.zeros(2, 4), initial=(torch.zeros(3, 2), EYE)), "times: got batch dimensions"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
