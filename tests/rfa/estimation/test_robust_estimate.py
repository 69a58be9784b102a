"""Weights, objectives, starts and directions of the robust estimator."""

import math

import pytest
import torch
from cover import cover

import rfa
from rfa.estimation import LinearSDE

from .models import EYE, coupled, irregular_times, matrix, papers_estimate, rotating, with_gaps


def consensus(sde, times, observations, i, weight, passes, query_noise=0.0, noise_floor=0.0):
    """The paper's estimator at row i by its formulas, C = I: P_ij = (V + Phi R Phi^T + floor)^-1."""
    lags = times[i] - times[: i + 1]
    transition = sde.transition(lags)
    moved = (transition @ observations[: i + 1, :, None])[..., 0]
    variance = sde.covariance(lags) + transition @ sde.observation_noise @ transition.mT + noise_floor * EYE
    precision, certainty = torch.linalg.inv(variance), torch.linalg.inv(variance + query_noise * EYE)
    state, costs = observations[i], []
    for _ in range(passes):
        apart = state - moved
        distance = torch.einsum("ja,jab,jb->j", apart, certainty, apart)
        weights = weight(distance)
        total = (weights[:, None, None] * precision).sum(0)
        state = torch.linalg.solve(total, (weights[:, None, None] * precision @ moved[..., None])[..., 0].sum(0))
        costs.append(weights)
    return state, costs[-1]


WEIGHTS = {
    "power": ({"nu": 5.0, "kappa": 1.5}, lambda s: (1 + s / 5.0) ** -1.5),
    "default exponent": ({"nu": 6.0}, lambda s: (1 + s / 6.0) ** -4.0),  # (nu + m) / m = 4
    "welsch": ({"penalty": "welsch"}, lambda s: torch.exp(-s / 2)),
    "the paper's limit": ({"nu": math.inf}, lambda s: torch.exp(-s / 2)),
    "gaussian": ({}, torch.ones_like),
}


@cover(1, name=WEIGHTS, passes=[1, 4], noises=[{}, {"query_noise": 0.7, "noise_floor": 0.3}])
def test_the_papers_estimator(name, passes, noises):
    options, weight = WEIGHTS[name]
    sde, times = rotating(), irregular_times(15)
    observations = sde.simulate(times, torch.Generator().manual_seed(0), (0.2, 8.0)).observations
    found = papers_estimate(sde, times, observations, iterations=passes, **options, **noises)
    for i in (0, 4, 14):
        state, weights = consensus(sde, times, observations, i, weight, passes, **noises)
        torch.testing.assert_close(found.mean[i], state, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.weights[i, : i + 1], weights, rtol=1e-7, atol=1e-9)
        assert not found.weights[i, i + 1 :].any()


@cover(1, modes=[1, 3], robustness=[2.0, math.inf])
def test_the_operator_is_one_step(modes, robustness):
    """Complex modes with noises of query and floor; Welsch's weight is the operator's exponential kernel."""
    generator, times, head = torch.Generator().manual_seed(0), irregular_times(30), torch.ones(1, dtype=torch.float64)
    frequency = torch.linspace(2.0, 0.5, modes, dtype=torch.float64)
    seen = torch.randn(30, 2 * modes, generator=generator, dtype=torch.float64) * 2
    kernel = {"robustness": robustness * head}
    if robustness == math.inf:
        kernel = {"robustness": head, "weight": "exponential"}  # `exp(-r / (nu_s d Sigma~))`
    noises = {"process_noise": 0.5, "key_noise": 0.4, "query_noise": 0.7, "noise_floor": 0.3}  # of complex numbers
    expected = rfa.robust_filter_attention(
        *[seen[None, None]] * 3, decay=0.3 * head, frequency=frequency[None], inverse_temperature=head, times=times,
        backend="reference", **{name: value * head for name, value in noises.items()}, **kernel,
    )  # fmt: skip
    eye, turn = torch.eye(2 * modes, dtype=torch.float64), torch.diag(frequency)
    dynamics = torch.kron(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64), turn) - 0.3 * eye
    sde = LinearSDE(dynamics, 0.25 * eye, eye, 0.2 * eye)
    found = papers_estimate(sde, times, seen, nu=robustness * 2 * modes, query_noise=0.35 * eye, noise_floor=0.15)
    torch.testing.assert_close(found.mean, expected[0, 0], rtol=1e-12, atol=1e-12)


@cover(
    1,
    penalty=["power", "welsch"],
    direction=["filter", "smooth"],
    prior=["lyapunov", "riccati"],
    start=["query", "leave_one_out"],
)
def test_the_objective_never_rises(penalty, direction, prior, start):
    sde, times = coupled(), irregular_times(30)
    observations = sde.simulate(times, torch.Generator().manual_seed(1), (0.2, 10.0), sample_shape=(3,)).observations
    found = papers_estimate(
        sde, times, with_gaps(observations), nu=6.0, prior=prior, start=start, direction=direction, penalty=penalty,
        iterations=8,
    )  # fmt: skip
    assert found.objective.shape == (9, 3)
    assert (found.objective.diff(dim=0) <= 1e-9 * found.objective[0].abs()).all()
    assert (found.objective[0] - found.objective[-1] > 0).all()


def test_smoothing_mirrors_filtering():
    """A process that looks alike in both directions: the smoother of the mirrored series is the mirrored smoother."""
    sde = LinearSDE(matrix([[0.0]]), matrix([[0.3]]), matrix([[1.0]]), matrix([[0.5]]))
    times = irregular_times(20)
    observations = sde.simulate(times, torch.Generator().manual_seed(5), (0.2, 10.0)).observations
    for prior in ("lyapunov", "riccati"):
        options = {"prior": prior, "nu": 5.0, "iterations": 3, "direction": "smooth"}
        forward = papers_estimate(sde, times, observations, **options)
        backward = papers_estimate(sde, -times.flip(0), observations.flip(0), **options)
        torch.testing.assert_close(forward.mean, backward.mean.flip(0), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(forward.weights, backward.weights.flip(0, 1), rtol=1e-7, atol=1e-9)


def test_query_times_in_any_order_and_at_observations():
    sde, times = coupled(), irregular_times(25)
    observations = with_gaps(sde.simulate(times, torch.Generator().manual_seed(6)).observations)
    for options in (
        {"prior": "riccati"},
        {"nu": 4.0, "iterations": 2},
        {"nu": 4.0, "prior": "riccati", "direction": "smooth"},
    ):
        everywhere = papers_estimate(sde, times, observations, **options)
        some = torch.tensor([7, 3, 24])
        between = torch.stack([times[5] + 1e-9, times[-1] + 2.0])
        found = papers_estimate(sde, times, observations, query_times=torch.cat([times[some], between]), **options)
        torch.testing.assert_close(found.mean[:3], everywhere.mean[some], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.weights[:3], everywhere.weights[some], rtol=1e-7, atol=1e-9)
        assert found.mean.isfinite().all()
        assert found.covariance.isfinite().all()


MEANS, COVARIANCES = matrix([[0.0, 0.0], [3.0, 1.0], [-2.0, 5.0]]), matrix([0.5, 1.0, 2.0])[:, None, None] * EYE
STARTS = [None, (MEANS, COVARIANCES), (MEANS, COVARIANCES[0]), (MEANS[0], COVARIANCES)]


@cover(1, nu=[math.inf, 5.0], starts=STARTS, one=[False, True], asked=[False, True])
def test_series_of_a_batch_do_not_meet(nu, starts, one, asked):
    """Three series, or one with three starts, have the estimates that each has alone."""
    sde = rotating()
    times = torch.stack([irregular_times(12, seed) for seed in range(3)])
    draws = [sde.simulate(t, torch.Generator().manual_seed(7)).observations for t in times]
    seen = torch.stack([with_gaps(each, seed=k) for k, each in enumerate(draws)])
    queries = times[:, -1:] * matrix([0.3, 1.2])
    if one and starts is not None:
        times, seen, queries = times[0], seen[0], queries[0]

    def estimate(series, start):
        options = {"prior": "riccati", "nu": nu, "iterations": 2, "query_times": series[2] if asked else None}
        return papers_estimate(sde, *series[:2], initial=start, **options)

    series = times, seen, queries
    together = estimate(series, starts)
    for k in range(3):
        own = None if starts is None else tuple(x[k] if len(x) == 3 else x for x in starts)
        alone = estimate(series if times.dim() == 1 else [x[k] for x in series], own)
        torch.testing.assert_close(together.mean[k], alone.mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(together.covariance[k], alone.covariance, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(together.weights[k], alone.weights, rtol=1e-6, atol=1e-8)


TIMES = torch.arange(5, dtype=torch.float64)


BAD = [
    ({"times": TIMES.flip(0)}, "times: got times that do not increase"),
    ({"times": TIMES[:0]}, r"times: got shape \(0,\)"),
    ({"observations": torch.zeros(5, 3)}, r"observations: got shape \(5, 3\), expected \(..., 5, 2\)"),
    ({"observations": torch.zeros(2, 5, 2), "times": torch.stack([TIMES] * 3)}, "batch dimensions"),
    ({"query_times": TIMES * torch.inf}, "query_times: got NaN or infinite values, expected finite numbers$"),
    ({"nu": 0.0}, "nu: got 0.0, expected degrees of freedom > 0"),
    ({"nu": 1e-300}, "nu: got 1e-300, expected degrees of freedom > 0, at least 1e-06"),
    ({"kappa": -1.0}, "kappa: got -1.0"),
    ({"nu": torch.tensor(4.0, requires_grad=True)}, "nu: got tensor"),
    ({"prior": "flat"}, "prior: got 'flat'"),
    ({"direction": "back"}, "direction: got 'back', expected one of 'filter', 'smooth'$"),
    (
        {"sde": rotating(measurement=1e-100), "nu": 4.0},
        "observation_noise: got 'a standard deviation .* another unit",
    ),
    ({"iterations": 0}, "iterations: got 0"),
    ({"query_noise": -1.0}, "query_noise: .*positive semi-definite"),
    ({"noise_floor": torch.ones(3, 3)}, "noise_floor: .*2, 2"),
    ({"noise_floor": math.nan}, "noise_floor: .*finite"),
    ({"query_noise": 1.0, "prior": "riccati"}, "query_noise: .*expected 'lyapunov'"),
    ({"initial": (torch.zeros(2), torch.zeros(2, 2))}, "initial: got a singular covariance"),
    ({"initial": (torch.zeros(3), torch.eye(2))}, "initial: got a mean of shape"),
    ({"initial": torch.zeros(2)}, "initial: got Tensor, expected a mean and a covariance"),
    ({"initial": (torch.zeros(5, 2), torch.eye(2)), "observations": torch.zeros(3, 5, 2)}, "initial: got batch"),
    ({"initial": (torch.zeros(2), torch.eye(2).expand(4, 2, 2)), "times": TIMES.expand(3, 5)}, "initial: got"),
    (
        {"observations": torch.zeros(0, 5, 2)},
        r"^observations: got batch dimensions \(0,\), expected at least one",
    ),
]


def test_bad_input():
    legal = {"sde": rotating(), "times": TIMES, "observations": torch.zeros(5, 2)}
    for given, message in BAD:
        with pytest.raises(ValueError, match=message):
            papers_estimate(**(legal | given))
