"""Networks for comparison: what an output may see, and each against its formula on plain loops."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from rfa.models.series_tokens import logarithmic_beyond
from rfa_lab.training.series_controls import DLinear, GatedDecay, SeasonalMean, SeasonalNaive

SEEN, HORIZON, CHANNELS = 30, 8, 2


def gru(channels=1, time_features=0):
    torch.manual_seed(0)
    known = {"location": [0.3] * channels, "spread": [1.5] * channels, "span": 4.5}
    return GatedDecay(channels, 0.5, **known, hidden_size=8, time_features=time_features)


def readings(channels=1, length=7):
    generator = torch.Generator().manual_seed(1)
    times = torch.rand(2, length, generator=generator, dtype=torch.float64).add(0.1).cumsum(1)
    return times, torch.randn(2, length, channels, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("time_features", [0, 3])
def test_gru_d_is_its_formula(time_features):
    network, (times, values) = gru(2, time_features), readings(2)
    values[:, 2, 1] = values[:, 5] = math.nan
    found = network(times, values)
    with torch.no_grad():
        for series in range(2):
            state, last, last_time = torch.zeros(1, 8), torch.zeros(2), times[series, :1].expand(2)
            before = None
            scale = network.scaling(values[series : series + 1], tokens=7)
            for row in range(7):
                delta = ((times[series, row] - last_time) / 0.5).float()
                seen = ~values[series, row].isnan()
                x = (values[series, row].nan_to_num() - scale.location[0, row]) / scale.spread[0, row]
                x = logarithmic_beyond(x).float()
                kept = torch.exp(-F.relu(network.value_decay * delta + network.value_bias)) * last
                gap = 1.0 if before is None else float((times[series, row] - before) / 0.5) + 0.05
                angle = (times[series, row] - times[series, 0]) / 0.5 / torch.tensor([1, 3, 9])[:time_features]
                entered = [torch.where(seen, x, kept), seen, torch.tensor([math.log(gap)]), angle.sin(), angle.cos()]
                inputs = torch.cat([part.float() for part in entered])[None]
                state_here = network.cell(inputs, state * torch.exp(-F.relu(network.state_decay(delta))))
                expected = scale.location[0, row] + scale.spread[0, row] * network.head(state_here)[0, :2]
                torch.testing.assert_close(found.location[series, row], expected, atol=1e-5, rtol=1e-5)
                if bool(seen.any()):
                    state, before = state_here, times[series, row]
                    last = torch.where(seen, x, last)
                    last_time = torch.where(seen, times[series, row], last_time)


def test_a_row_without_a_reading_changes_no_other():
    network, (times, values) = gru(), readings()
    values[:, 4] = math.nan
    keep = [0, 1, 2, 3, 5, 6]
    alone = network(times[:, keep], values[:, keep]).location
    torch.testing.assert_close(network(times, values).location[:, keep], alone, atol=1e-6, rtol=1e-6)


def grid(channels=CHANNELS):
    generator = torch.Generator().manual_seed(2)
    times = torch.arange(SEEN + HORIZON).double().expand(3, -1)
    values = torch.randn(3, SEEN + HORIZON, channels, generator=generator, dtype=torch.float64)
    values[:, SEEN:] = math.nan
    return times, values


def test_the_seasonal_naive_forecast_is_the_last_season():
    times, values = grid()
    network = SeasonalNaive(CHANNELS, SEEN, HORIZON, period=7)
    found = network(times, values).location[:, SEEN:]
    for step in range(HORIZON):
        assert found[:, step].equal(values[:, SEEN + step - 7 * (1 + step // 7)])
    values[:, SEEN - 7] = math.nan  # the phase of the first step was last seen a season earlier
    assert network(times, values).location[:, SEEN].equal(values[:, SEEN - 14])
    kept = [k for k in range(SEEN + HORIZON) if k % 7 != 2 or k >= SEEN]  # a phase that was never seen
    assert network(times[:, kept], values[:, kept]).location[:, -HORIZON].equal(values[:, SEEN - 1])


@pytest.mark.parametrize("width", [0, 2])
def test_the_seasonal_mean_is_over_values_of_about_the_same_phase(width):
    times, values = grid()
    values[:, 4:9, 0] = values[0, :SEEN, 1] = math.nan
    found = SeasonalMean(CHANNELS, SEEN, HORIZON, period=7, width=width)(times, values).location
    for series, step, channel in itertools.product(range(3), range(HORIZON), range(CHANNELS)):
        seen = {row: float(x) for row, x in enumerate(values[series, :SEEN, channel]) if not math.isnan(x)}
        near = [x for row, x in seen.items() if any((SEEN + step - row + k) % 7 == 0 for k in range(-width, width + 1))]
        mean = sum(seen.values()) / max(1, len(seen))
        expected = (sum(near) + mean) / (len(near) + 1)
        assert float(found[series, SEEN + step, channel]) == pytest.approx(expected, abs=1e-12)


def test_dlinear_is_two_maps_of_the_filled_values():
    times, values = grid()
    network = DLinear(CHANNELS, SEEN, HORIZON, kernel=5)
    filled = values[:, :SEEN].clone()
    values[:, 0, 0] = values[:, 10:12, 0] = math.nan
    filled[:, 0, 0], filled[:, 10:12, 0] = filled[:, 1, 0], filled[:, 9:10, 0]
    padded = torch.cat([filled[:, :1], filled[:, :1], filled, filled[:, -1:], filled[:, -1:]], dim=1).float()
    average = torch.stack([padded[:, k : k + 5].mean(1) for k in range(SEEN)], dim=1)
    expected = network.of_average(average.mT) + network.of_rest((filled.float() - average).mT)
    found = network(times, values).location[:, SEEN:]
    torch.testing.assert_close(found, expected.mT.double(), atol=1e-5, rtol=1e-5)


def test_outputs_may_be_some_of_the_rows():
    times, values = grid()
    network = DLinear(CHANNELS, SEEN, HORIZON)
    rows = [*range(SEEN), SEEN + 1, SEEN + 6]
    whole, some = network(times, values), network(times[:, rows], values[:, rows])
    for name in ("location", "deviation", "degrees_of_freedom"):
        assert some[name].equal(whole[name][:, rows])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: DLinear(1, SEEN, HORIZON, kernel=4), "^kernel: got 4"),
        (lambda: SeasonalNaive(1, SEEN, HORIZON, period=31), "^period: got 31"),
        (lambda: SeasonalMean(1, SEEN, HORIZON, period=7, width=4), "^width: got 4"),
        (lambda: DLinear(1, SEEN, HORIZON)(torch.tensor([[0.5]]), torch.zeros(1, 1, 1)), "^times: got 'times between"),
        (lambda: DLinear(1, SEEN, HORIZON)(torch.tensor([[38.0]]), torch.zeros(1, 1, 1)), "^times: got 38"),
    ],
)
def test_bad_input(made, message):
    with pytest.raises(ValueError, match=message):
        made()


def test_gru_d_reads_gaps_of_unix_seconds():
    """In float32 a second since 1970 is known to 128 s. Times in multiples of 1/8, so that sums are exact."""
    network, (times, values) = gru(), readings()
    times = (times * 8).round() / 8 + torch.arange(7) / 8
    expected, found = (network(times + origin, values).location for origin in (0.0, 1.7e9))
    assert torch.equal(found, expected)
