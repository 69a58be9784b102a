"""Estimates on the fused operator are the dense ones: to rounding in float64, to float32's in its kernels."""

import pytest
import torch
from cover import cover
from ops.written import Written

import rfa.estimation.fused
from rfa.estimation import LinearSDE
from rfa.ops.backends import BACKENDS

from .models import EYE, irregular_times, matrix, papers_estimate, rotating

PRIORS, STARTS = ["lyapunov", "riccati"], ["query", "leave_one_out"]
UNIFORM = torch.arange(40, dtype=torch.float64) * 0.1
# r = |q|^2 + E^2 |k|^2 - 2 E q.k of an outlier 60 standard deviations away has an error of 3600 x 1e-7
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


@pytest.fixture(params=TOLERANCE)
def tolerance(request, monkeypatch):
    """With the kernels, and as it runs where there is no compiler."""
    if request.param == "float64":
        monkeypatch.setattr(rfa.estimation.fused, "backend_for", lambda *_: BACKENDS["reference"])
    return TOLERANCE[request.param]


def both(sde, times, observations, **options):
    options = {"return_weights": False, **options}
    dense = papers_estimate(sde, times, observations, **options)
    return dense, papers_estimate(sde, times, observations, backend="fused", **options)


def assert_same(found, tolerance):
    dense, fused = found
    assert fused.weights is None
    assert fused.objective is None
    scale = dense.mean.abs().max()
    torch.testing.assert_close(fused.mean, dense.mean, rtol=tolerance, atol=tolerance * scale)
    size = dense.covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    same = (dense.covariance == fused.covariance) | ((dense.covariance - fused.covariance).abs() <= tolerance * size)
    assert same.all()


def drawn(sde, times, gaps=False, outliers=(0.2, 10.0), shape=(3,)):
    seen = sde.simulate(times, torch.Generator().manual_seed(1), outliers, sample_shape=shape).observations
    if gaps:  # the first series sees nothing at its first two times
        lost = torch.rand(seen.shape[:-1], generator=torch.Generator().manual_seed(2)) < 0.3
        lost[0, :2] = True
        seen = seen.masked_fill(lost[..., None], torch.nan)
    return seen


@cover(gaps=[False, True], start=STARTS, prior=PRIORS)
def test_fused_is_dense(prior, start, gaps, tolerance):
    sde = rotating()
    for times, penalty in ((UNIFORM, "power"), (irregular_times(40), "welsch")):
        options = {"nu": 6.0, "prior": prior, "start": start, "penalty": penalty, "iterations": 2}
        assert_same(both(sde, times, drawn(sde, times, gaps), **options), tolerance)


@pytest.mark.parametrize("prior", PRIORS)
def test_well_behaved_series_to_float32_rounding(prior):
    sde, times = rotating(), irregular_times(60)
    seen = drawn(sde, times, outliers=None)
    for start in STARTS:
        options = {"nu": 16.0, "kappa": 2.0, "iterations": 5, "start": start}
        assert_same(both(sde, times, seen, prior=prior, **options), 1e-5)


@pytest.mark.parametrize("initial", [None, (matrix([1.0, -2.0]), 0.7 * EYE)])
@pytest.mark.parametrize("prior", PRIORS)
def test_query_times_and_a_known_start(prior, initial, tolerance):
    sde, times = rotating(), irregular_times(30)
    queries = matrix([times[3], -0.5, 1.234, times[-1] + 3, times[-1], times[3]])  # in any order, one before all
    for start in STARTS:
        options = {"nu": 6.0, "iterations": 2, "start": start, "query_times": queries, "initial": initial}
        assert_same(both(sde, times, drawn(sde, times, gaps=True), prior=prior, **options), tolerance)


@cover(1, nu=[8.0, torch.inf], prior=PRIORS)
def test_other_isotropic_models(prior, nu, tolerance):
    """Odd sizes, partners that are not neighbours, no decay, C = c I, models and times of each series."""
    dynamics = matrix(
        [[-0.2, 0, 1.5, 0, 0], [0, -0.2, 0, 0, 0], [-1.5, 0, -0.2, 0, 0], [0, 0, 0, -0.2, -4], [0, 0, 0, 4, -0.2]]
    )
    five = torch.eye(5, dtype=torch.float64)
    one = [matrix([[x]]) for x in (0.0, 1469.0, 1.0, 15099.0)]  # the Nile's
    mixed = [torch.stack([model, other]) for model, other in zip(
        (rotating().dynamics, 0.3 * EYE, EYE, 0.2 * EYE), (0 * EYE, 2.0 * EYE, 3 * EYE, 5.0 * EYE), strict=True
    )]  # fmt: skip
    for sde, times, level in (
        (LinearSDE(dynamics, 0.3 * five, -2.0 * five, 0.5 * five), irregular_times(20), 0.0),
        (LinearSDE(*one), UNIFORM, 1e5),
        (LinearSDE(*mixed), torch.stack([irregular_times(20), irregular_times(20, 1)]), 0.0),
    ):
        seen = drawn(sde, times, outliers=None, shape=()) + level
        assert_same(both(sde, times, seen, prior=prior, nu=nu, start="leave_one_out"), tolerance)


def test_what_is_forgotten_does_not_count(monkeypatch):
    """With gains each block of queries takes the keys that it still remembers: the same numbers as with all of them."""
    sde, times = rotating(), irregular_times(1000)
    seen = drawn(sde, times, gaps=True)
    options = {"nu": 16.0, "kappa": 2.0, "iterations": 3, "prior": "riccati", "start": "leave_one_out"}
    taken, blocks = [], rfa.estimation.fused._blocks
    monkeypatch.setattr(rfa.estimation.fused, "_blocks", lambda *given: taken.append(blocks(*given)) or taken[-1])

    def found():
        given = seen.clone().requires_grad_()
        estimate = papers_estimate(sde, times, given, backend="fused", return_weights=False, **options)
        (estimate.mean.square().sum() + estimate.covariance.sum()).backward()
        return estimate.mean, estimate.covariance, given.grad.nan_to_num()

    remembered = found()
    assert all(keys.start > rows.start - 200 for rows, keys in taken[0])
    monkeypatch.setattr(rfa.estimation.fused, "_NEGLIGIBLE", torch.inf)
    whole = found()
    assert all(keys.start == 0 for _, keys in taken[-1])
    for one, other in zip(remembered, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@cover(1, prior=PRIORS, forcing=[0.0, 0.5])
def test_next_to_nothing_to_see(prior, forcing, tolerance):
    """One time, nothing seen at all, a state without forcing, a gap after which a driven state is a new one."""
    sde = rotating(process=forcing)
    late = 200.0 if forcing else 2.0
    gap = torch.tensor([0.0, 0.1, 0.2, late, late + 0.1], dtype=torch.float64)
    for times, seen in (
        (UNIFORM[:1], EYE[:1]), (UNIFORM[:3], torch.full((3, 2), torch.nan)), (gap, drawn(sde, gap, outliers=None)),
    ):  # fmt: skip
        for start in STARTS:
            found = both(sde, times, seen, prior=prior, start=start, nu=6.0)
            if forcing or not seen.isnan().all():  # the stationary variance without forcing is 0; dense: unknown
                assert_same(found, tolerance)


@pytest.mark.parametrize("prior", PRIORS)
def test_gradients(prior, monkeypatch):
    """Of the noises, the decay, the frequency and the observations, against those of the dense estimator."""
    times = irregular_times(15)
    seen = drawn(rotating(), times, outliers=None, shape=())

    def gradients(backend):
        leaves = [matrix(x).requires_grad_() for x in (0.3, 2.0, 0.5, 0.5)]
        decay, frequency, process, measurement = leaves
        turn = matrix([[0.0, -1.0], [1.0, 0.0]])
        sde = LinearSDE(-decay * EYE + frequency * turn, process * EYE, EYE, measurement * EYE)
        given = seen.clone().requires_grad_()
        options = {"nu": 6.0, "iterations": 2, "start": "leave_one_out", "return_weights": False}
        found = papers_estimate(sde, times, given, prior=prior, backend=backend, **options)
        (found.mean.square().sum() + found.covariance.sum()).backward()
        return [x.grad for x in (*leaves, given)]

    dense, fused = gradients("dense"), gradients("fused")
    for one, other in zip(dense, fused, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(rfa.estimation.fused, "backend_for", lambda *_: BACKENDS["reference"])
    for one, other in zip(dense, gradients("fused"), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-8)


TURN = matrix([[0.0, -1.0], [1.0, 0.0]])
OBLONG = matrix([[1.0, 0.0], [0.0, 2.0]])
REFUSED = [
    ({"return_weights": True}, "return_weights: got True"),
    ({"direction": "smooth"}, "direction: got 'smooth'"),
    ({"backend": "quick"}, "backend: got 'quick'"),
    ({"initial": (torch.zeros(2), OBLONG)}, "initial: got a covariance"),
    ({"observations": matrix([[1.0, torch.nan], [0.0, 1.0]])}, "observations: got a row"),
    ({"sde": LinearSDE(matrix([[-0.1, 1.0], [0.0, -0.1]]), EYE, EYE, EYE)}, "dynamics: got states that do more"),
    ({"sde": LinearSDE(-0.1 * OBLONG, EYE, EYE, EYE)}, "dynamics: got states that decay"),
    ({"sde": LinearSDE(0.1 * EYE + TURN, EYE, EYE, EYE)}, "dynamics: got states that grow"),
    ({"sde": LinearSDE(TURN, OBLONG, EYE, EYE)}, "diffusion: got a matrix"),
    ({"sde": LinearSDE(TURN, EYE, TURN, EYE)}, "observation: got a matrix"),
    ({"sde": LinearSDE(TURN, EYE, 0 * EYE, EYE)}, "observation: got zero"),
    ({"sde": LinearSDE(TURN, EYE, EYE, matrix([[1.0, 0.5], [0.5, 1.0]]))}, "observation_noise: got a matrix"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals(given, message):
    legal = {
        "sde": rotating(), "times": UNIFORM[:2], "observations": EYE, "backend": "fused", "return_weights": False,
        "nu": 4.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        papers_estimate(**(legal | given))


@pytest.mark.parametrize("prior", PRIORS)
def test_memory_grows_with_the_length_not_with_its_square(prior):
    """All numbers that are written bound those that are kept; the kernels' own memory is tested with them.

    Bytes for a mask of 1024 x 1024 alone would make it three times as many, not twice; with gains it is a tenth more
    than twice, for early queries have fewer keys to remember.
    """
    totals = []
    for length in (8, 512, 1024):  # the first time constants are computed, too
        times = torch.arange(length, dtype=torch.float64) * 0.1
        seen = drawn(rotating(), times, outliers=None, shape=()).requires_grad_()
        options = {"nu": 16.0, "prior": prior, "start": "leave_one_out", "return_weights": False}
        with Written() as written:
            found = papers_estimate(rotating(), times, seen, backend="fused", **options)
            (found.mean.sum() + found.covariance.sum()).backward()
        totals.append(written.total)
    assert totals[2] / totals[1] < 2.2, totals
