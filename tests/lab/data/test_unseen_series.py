"""Series of unknown structure: their law against the library's exact moments, and their units."""

import math

import numpy as np
import pytest
import torch
from scripts import ROOT

from rfa.estimation import Autoregression, Cycle, Level, Season, StructuralModel, Trend
from rfa_lab.data.unseen_series import UnseenSetting, Waves, drawn_times, drawn_waves, in_own_units

TIMES = torch.tensor([0.0, 0.4, 5.0, 5.0, 12.0], dtype=torch.float64)
# component, its parameters as rates (statsmodels' variances are those of one unit of time), and the same as waves
DECAY = math.log(2) / 4
UNIT = (1 - math.exp(-2 * DECAY)) / (2 * DECAY)
COMPONENTS = {
    "level": (Level(), {"sigma2.level": 0.3}, [(0, 0, 0.3, 0), (0, 0, 0, 0)]),
    "autoregression": (
        Autoregression(),
        {"ar.L1": math.exp(-DECAY), "sigma2.ar": 0.5 * UNIT},
        [(DECAY, 0, 0.5, 0), (0, 0, 0, 0)],
    ),
    "cycle": (
        Cycle(),
        {"sigma2.cycle": 0.5 * UNIT, "frequency.cycle": 0.7, "damping.cycle": math.exp(-DECAY)},
        [(DECAY, 0.7, 0.5, 0), (0, 0, 0, 0)],
    ),
    "season": (Season(7), {"sigma2.freq_seasonal_7(1)": 0.2}, [(0, 2 * math.pi / 7, 0.2, 0), (0, 0, 0, 0)]),
    "trend": (Trend(), {"sigma2.level": 0.3, "sigma2.trend": 0.1}, [(0, 0, 0.3, 0), (0, 0, 0.1, 0)]),
    "slow damping": (
        Trend(damped=True),
        {"sigma2.level": 0.0, "sigma2.trend": 0.1, "damping.trend": math.exp(-1e-3)},
        [(0, 0, 0.0, 0), (1e-3, 0, 0.1, 0)],
    ),
    "damped trend": (
        Trend(damped=True),
        {"sigma2.level": 0.3, "sigma2.trend": 0.1, "damping.trend": math.exp(-DECAY)},
        [(0, 0, 0.3, 0), (DECAY, 0, 0.1, 0)],
    ),
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def waves(rows, series):
    return Waves(*torch.tensor(rows, dtype=torch.float64).T[:, None].expand(4, series, len(rows)))


@pytest.mark.parametrize("name", COMPONENTS)
def test_signals_have_the_covariance_of_the_librarys_components(name):
    """Started at zero: `cov(x(s), x(t)) = H P(s) phi(t - s)^T H^T` with the matrices of `LinearSDE`."""
    component, parameters, rows = COMPONENTS[name]
    sde = StructuralModel(component).to_sde({**parameters, "sigma2.irregular": 1.0})
    seen = sde.observation
    count = 20_000
    found = waves(rows, count).signal(TIMES.expand(count, -1), generator())
    expected = torch.zeros(len(TIMES), len(TIMES), dtype=torch.float64)
    for i, s in enumerate(TIMES):
        for j in range(i, len(TIMES)):
            phi = sde.transition(TIMES[j] - s)
            expected[i, j] = expected[j, i] = (seen @ phi @ sde.covariance(s) @ seen.mT).item()
    size = expected.diagonal().clamp(min=1e-12).sqrt()
    error = ((found.T @ found) / count - expected) / size[:, None] / size
    assert error[1:, 1:].abs().max() < 4.5 * math.sqrt(2 / count)  # standard errors of a variance
    assert (found[:, 0] == 0).all()
    assert (found[:, 2] == found[:, 3]).all()  # the same time twice


def test_starts_are_those_of_stationary_processes_and_slopes():
    rows = [(DECAY, 0.0, 2 * DECAY * 9.0, 3.0), (0.0, 0.0, 0.0, 2.0)]
    found = waves(rows, 20_000).signal(TIMES.expand(20_000, -1), generator(1))
    expected = 9.0 + 4.0 * TIMES.square()
    assert ((found.var(0) / expected - 1).abs() < 0.045).all()


def test_drawn_series_vary_over_orders_of_magnitude():
    found = drawn_waves(4000, generator())
    for part in (found.decay[:, 1], found.frequency[:, 3], found.diffusion[:, 0]):
        low, high = part[part > 0].quantile(torch.tensor([0.02, 0.98], dtype=torch.float64))
        assert high > 20 * low
    some = (found.diffusion > 0) | (found.start > 0)
    assert some.any(1).all()
    share = some.double().mean(0)
    assert ((share > 0.1) & (share < 0.7)).all()
    assert (found.frequency <= math.pi * 1.0001)[found.start > 0].all()


def test_times_increase_and_half_are_regular():
    times = drawn_times(2000, 50, generator())
    gaps = times.diff(dim=1)
    assert (gaps > 0).all()
    assert (times[:, 0] == 0).all()
    regular = (gaps == 1).double().mean(1) >= 48 / 49  # but for a hole
    assert regular.double().mean().item() == pytest.approx(0.5, abs=0.06)
    assert (gaps.amax(1) >= 5).double().mean() > 0.3


def test_wrong_readings_have_the_share_and_size_that_was_asked():
    shape = torch.Size([2000, 60])
    error = UnseenSetting(outliers=0.2, size=30)._errors(shape, generator())
    wrong = error != 0
    assert wrong.double().mean().item() == pytest.approx(0.2, abs=0.005)
    assert error[wrong].square().mean().item() + 1 == pytest.approx(900, rel=0.04)
    drawn = UnseenSetting(outliers=0.3, size=100, varied=True)._errors(shape, generator())
    share = (drawn != 0).double().mean(1)
    assert (share.amin() < 0.02, share.amax() > 0.25) == (True, True)
    assert share.mean().item() == pytest.approx(0.15, abs=0.01)
    assert not UnseenSetting(outliers=0.0)._errors(shape, generator()).any()


def test_units_do_not_matter_and_later_readings_are_not_used():
    rng = generator(4)
    times = torch.rand(6, 30, generator=rng, dtype=torch.float64).cumsum(1)
    values, targets = (torch.randn(6, 30, generator=rng, dtype=torch.float64) for _ in range(2))
    known = (torch.arange(30) < 20).expand(6, -1)
    plain = in_own_units(times, values, targets, known)
    other = in_own_units(60 * times + 1e5, 1e6 * values - 1e7, 1e6 * targets - 1e7, known)
    for one, two in zip(plain[:3], other[:3], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-7)
    middle = plain.values[:, :20, 0].median(1).values  # the lower of two middle numbers
    assert ((middle <= 0) & (middle > -0.3)).all()
    assert plain.times[:, :20].diff(dim=1).quantile(0.5, dim=1).tolist() == pytest.approx([1.0] * 6)
    changed = in_own_units(times, torch.where(known, values, 1e3), targets, known)
    assert torch.equal(changed.values[:, :20], plain.values[:, :20])
    assert torch.equal(changed.targets, plain.targets)
    equal = in_own_units(times, torch.where(torch.arange(30) < 15, 1.0, values), targets, known)
    assert equal.values.isfinite().all()
    assert (in_own_units(times, torch.ones_like(values), targets, known).values == 0).all()


def test_what_is_asked_of_a_series():
    found = UnseenSetting(length=40, left_out=6, forecasts=5, known=1.0).batch(50, generator())
    read, asked = ~found.values[..., 0].isnan(), ~found.targets[..., 0].isnan()
    assert (found.times.diff(dim=1) >= 0).all()
    assert (read.sum(1) == 40).all()
    assert ((asked & read).sum(1) == 1).all()
    assert read[:, 45].all()
    assert asked[:, 45:].all()  # the state now, then forecasts
    half = UnseenSetting(length=40, left_out=6, forecasts=0, known=0.5).batch(400, generator())
    read, asked = ~half.values[..., 0].isnan(), ~half.targets[..., 0].isnan()
    first = (asked & read).double().argmax(1)
    seen = read.cumsum(1).gather(1, first[:, None])
    assert (seen.amin().item(), seen.amax().item()) == (21, 40)
    assert (asked == (torch.arange(46) >= first[:, None])).all()
    assert (asked & ~read).any()


def test_a_batch_is_reproduced_and_lengths_vary():
    setting = UnseenSetting(length=40, shortest=20)
    one, two = (setting.batch(3, generator(5)) for _ in range(2))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one[:3], two[:3], strict=True))
    assert len({setting.batch(3, generator(seed)).times.shape for seed in range(6)}) > 2


def test_windows_of_real_series_are_rows_of_the_file():
    path = ROOT / "examples" / "nile.csv"
    volume = np.loadtxt(path, delimiter=",", skiprows=1)[:, 1]
    setting = UnseenSetting(unseen="nile", path=str(path), length=30, left_out=4, forecasts=3, horizon=10)
    found = setting.batch(20, generator())
    rows = torch.where(found.values.isnan(), found.targets, found.values)[..., 0].numpy()
    times = found.times.numpy()
    for row, time in zip(rows, times, strict=True):
        here, time = row[~np.isnan(row)], time[~np.isnan(row)].round().astype(int)
        windows = [volume[start + time] for start in range(100 - time.max())]
        assert max(np.corrcoef(here, window)[0, 1] for window in windows) > 1 - 1e-9


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("unseen", "walk"),
        ("length", 3),
        ("shortest", 300),
        ("known", 0.0),
        ("outliers", 1.0),
        ("size", 2),
    ],
)
def test_bad_settings(name, given):
    with pytest.raises(ValueError, match=rf"^{name}: got"):
        UnseenSetting(**{name: given})


def test_a_series_that_is_too_short():
    setting = UnseenSetting(unseen="nile", path=str(ROOT / "examples" / "nile.csv"), length=90)
    with pytest.raises(ValueError, match=r"^length: got 90, expected windows of at most 100 rows"):
        setting.batch(2, generator())
