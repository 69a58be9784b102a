"""Maximum likelihood of the noises: published values, recovery, robustness."""

from pathlib import Path

import pytest
import torch

from rfa.estimation import LinearSDE, fit, log_likelihood
from rfa.estimation.fit import _standard_errors

from .models import matrix, rotating

NILE = Path(__file__).parents[3] / "shared" / "data" / "series" / "nile.csv"


def level(process: float, measurement: float) -> LinearSDE:
    return LinearSDE(matrix([[0.0]]), matrix([[process]]), matrix([[1.0]]), matrix([[measurement]]))


@pytest.mark.skipif(not NILE.exists(), reason=f"no {NILE}")
def test_the_published_values_of_the_nile():
    """Durbin and Koopman's local level: 15,099 and 1,469, standard errors 3,146 and 1,280."""
    rows = [line.split(",") for line in NILE.read_text().split()[1:]]
    times, flow = matrix([float(row[0]) for row in rows]), matrix([[float(row[1])] for row in rows])
    found = fit(level(1000.0, 10000.0), times, flow)
    assert found.converged
    assert found.parameters["observation_noise[0]"] == pytest.approx(15099, rel=0.01)
    assert found.parameters["diffusion[0]"] == pytest.approx(1469, rel=0.01)
    assert found.standard_errors["observation_noise[0]"] == pytest.approx(3146, rel=0.01)
    assert found.standard_errors["diffusion[0]"] == pytest.approx(1280, rel=0.01)
    assert found.log_likelihood == pytest.approx(-632.5456, abs=1e-3)
    assert found.sde.diffusion.item() == pytest.approx(found.parameters["diffusion[0]"])


def test_recovery_of_tied_parameters():
    """Equal entries stay equal: one decay, one process and one measurement noise, within three standard errors."""
    true, times = rotating(), torch.arange(150, dtype=torch.float64) * 0.2
    observations = true.simulate(times, torch.Generator().manual_seed(0), sample_shape=(4,)).observations
    found = fit(rotating(decay=0.6, process=0.2, measurement=1.0), times, observations)
    assert found.converged
    assert list(found.parameters) == ["decay[0,1]", "diffusion[0,1]", "observation_noise[0,1]"]
    for (name, value), expected in zip(found.parameters.items(), (0.3, 0.25, 0.25), strict=True):
        assert abs(value - expected) < 3 * found.standard_errors[name], name
    assert found.sde.dynamics[0, 1].item() == -2.0  # the frequency is not free
    assert found.log_likelihood >= log_likelihood(true, times, observations).sum().item()


def test_student_t_predictions_resist_outliers():
    times = torch.arange(80, dtype=torch.float64)
    observations = level(0.2, 1.0).simulate(times, torch.Generator().manual_seed(1)).observations
    observations[[15, 40, 60]] += 30.0
    start = level(0.5, 2.0)
    gaussian, robust = (fit(start, times, observations, nu=nu, iterations=2) for nu in (torch.inf, 4.0))
    key = "observation_noise[0]"
    assert gaussian.parameters[key] > 15
    assert robust.parameters[key] < 3


def test_standard_errors_where_the_curvature_says_nothing():
    """It is NaN where the search ended at the edge, with noises of 1e-8; the documented answer is infinite."""
    for curvature in ([[1.0, 0.0], [0.0, -1.0]], [[1.0, 1.0], [1.0, 1.0]], [[torch.nan, 0.0], [0.0, 1.0]]):
        assert _standard_errors(matrix(curvature)).isinf().all()
    torch.testing.assert_close(_standard_errors(matrix([[4.0, 0.0], [0.0, 0.25]])), matrix([0.5, 2.0]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"free": ()}, "free: got nothing"),
        ({"free": ("drift",)}, "free: got"),
        ({"free": ("decay",)}, "expected positive entries"),
        ({"observations": torch.full((5, 1), torch.nan)}, "nothing but missing"),
        (
            {"sde": LinearSDE(torch.zeros(2, 1, 1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))},
            "batch dimensions",
        ),
        ({"nu": -1.0}, "nu: got -1"),
    ],
)
def test_bad_input(given, message):
    legal = {"sde": level(1.0, 1.0), "times": torch.arange(5.0), "observations": torch.zeros(5, 1)}
    with pytest.raises(ValueError, match=message):
        fit(**(legal | given))
