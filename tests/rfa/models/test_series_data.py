"""What a series is read as: robust scales, the configuration from data, the collator, and errors."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from shapes import only_our_own_checks
from transformers import AutoConfig

from rfa.models import DotProductAttentionConfig, RFATimeSeriesConfig, TimeSeriesCollator
from rfa.models.time_series import logarithmic_beyond, scale_of_windows
from rfa.models.time_series_data import median, robust_location_and_spread, times_and_values

from .test_time_series import BATCH, CHANNELS, LENGTH, QUERIES, SIZES, data, network

NAN = math.nan


def test_median_and_spread_are_those_of_numpy():
    values = torch.randn(3, 9, 4, dtype=torch.float64)
    values[0, 2:, 0], values[1, :3, 1], values[2, :, 2] = NAN, NAN, NAN
    location, spread = robust_location_and_spread(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a channel without readings
        expected = np.nanmedian(values.numpy(), axis=1)
        deviation = np.nanmedian(abs(values.numpy() - expected[:, None]), axis=1)
    np.testing.assert_allclose(location, expected, rtol=1e-14)
    np.testing.assert_allclose(spread, deviation / 0.6744897501960817, rtol=1e-14)  # the normal quartile
    assert torch.equal(median(values[:, :1]).nan_to_num(), values[:, 0].nan_to_num())


def test_each_mark_of_a_missing_value_is_nan():
    """The mask of NumPy, None, and the NA of pandas."""
    read = [[1.0, NAN], [3.0, 4.0]]
    for given in (
        np.ma.masked_invalid(read),
        np.ma.masked_equal([[1, -9999], [3, 4]], -9999),
        [[1.0, None], [3.0, 4.0]],
        pd.DataFrame({"a": [1.0, 3.0], "b": pd.array([None, 4], dtype="Int64")}),
    ):
        np.testing.assert_array_equal(times_and_values(([0, 1], given))[1], read)


@pytest.mark.parametrize(("length", "wrong", "size"), [(4, 1, -1e30), (5, 2, 1e12), (12, 5, 1e3), (41, 20, 1e12)])
def test_wrong_readings_move_the_scale_by_as_many_ranks_as_they_are(length, wrong, size):
    """However far they are, the medians stay among the right readings: k wrong ones move a median by k ranks."""
    values = torch.randn(1, length, 1, dtype=torch.float64)
    moved = values.clone()
    moved[0, :wrong] = size * torch.arange(1, wrong + 1, dtype=torch.float64)[:, None]
    location, spread = (part.item() for part in scale_of_windows(moved, RFATimeSeriesConfig()))
    lowest, highest = (length - 1) // 2 - wrong, length // 2 + wrong
    ordered = values.flatten().sort().values
    assert ordered[max(lowest, 0)] <= location <= ordered[highest]
    deviations = (values.flatten() - location).abs().sort().values / 0.6744897501960817  # the normal quartile
    assert deviations[max(lowest, 0)] * (1 - 1e-12) <= spread <= deviations[highest] * (1 + 1e-12)  # rounding


def test_channels_that_a_window_hardly_shows_take_the_training_data():
    values = torch.tensor([[[NAN, 3.0, 5.0, 1.0]] * 2 + [[NAN, NAN, 5.0, 2.0]] * 3], dtype=torch.float64)
    values[0, :, 3] = torch.arange(5)
    of_training = {"location": [1.0, 2.0, 3.0, 4.0], "spread": [5.0, 6.0, 7.0, 8.0]}
    scale = scale_of_windows(values, RFATimeSeriesConfig(channels=4, **of_training))
    assert scale.location.flatten().tolist() == [1.0, 2.0, 5.0, 2.0]
    # never seen; seen twice; always the same number; seen
    assert scale.spread.flatten().tolist() == pytest.approx([5.0, 6.0, 7.0, 1.4826022])


def test_far_readings_enter_by_their_logarithm():
    x = torch.tensor([-1e6, -4.0, 0.5, 4.0, 8.0], dtype=torch.float64, requires_grad=True)
    expected = [-4 * (1 + math.log(1e6 / 4)), -4.0, 0.5, 4.0, 4 * (1 + math.log(2))]
    assert logarithmic_beyond(x).tolist() == pytest.approx(expected)
    logarithmic_beyond(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([4e-6, 1, 1, 1, 0.5])


def test_the_bank_runs_from_the_typical_gap_to_the_span():
    config = RFATimeSeriesConfig(**{**SIZES, "typical_gap": 0.5, "span": 50.0})
    frequency = network(typical_gap=0.5, span=50.0).layers[0].attention.dynamics()["frequency"]
    assert frequency.max().item() == pytest.approx(1.0)  # radians per typical gap
    assert frequency.abs().min().item() == pytest.approx(1 / 100 ** (15 / 16))  # sixteen pairs of modes
    assert (config.attention.learn_frequencies, config.attention.learn_decay) == (True, True)
    control = RFATimeSeriesConfig(preset="b1-rope", prior="alibi", base=1e4)
    assert isinstance(control.attention, DotProductAttentionConfig)
    assert (control.attention.prior, control.attention.frequencies.base) == ("alibi", 1e4)
    assert not RFATimeSeriesConfig(preset="m2.5-no-rotation").attention.learn_frequencies
    assert RFATimeSeriesConfig(learn_decay=False).attention.learn_decay is False


def test_the_configuration_reads_the_data():
    generator = torch.Generator().manual_seed(0)
    series = []
    for length in (50, 80):
        times = torch.rand(length, generator=generator, dtype=torch.float64).cumsum(0) * 10
        values = torch.randn(length, 2, generator=generator) * torch.tensor([2.0, 30.0]) + torch.tensor([0.0, 100.0])
        values[3], values[5, 0] = NAN, NAN
        series.append((times, values))
    config = RFATimeSeriesConfig.from_data(series, hidden_size=32)
    gaps = np.concatenate([np.diff(np.delete(times.numpy(), 3)) for times, _ in series])
    assert config.typical_gap == pytest.approx(np.median(gaps), rel=0.02)  # of two middle gaps the lower one
    assert config.span == pytest.approx(float(series[1][0][-1] - series[1][0][0]))
    every = np.concatenate([values.numpy() for _, values in series])
    assert config.location == pytest.approx(np.nanmedian(every, axis=0), rel=1e-6)
    assert config.spread == pytest.approx([2.0, 30.0], rel=0.3)  # 130 normal numbers
    assert (config.channels, config.hidden_size) == (2, 32)


def test_the_collator_holds_readings_back():
    torch.manual_seed(0)
    times, values = torch.arange(20.0), torch.arange(40.0).reshape(20, 2)
    values[7] = NAN
    batch = TimeSeriesCollator(forecast=0.25, hold_out=0.2)([{"times": times.numpy(), "values": values.tolist()}] * 2)
    assert batch["query_times"].shape == (2, 8)  # five of nineteen readings, and three of the other fourteen
    assert batch["query_times"][0, -5:].tolist() == [15, 16, 17, 18, 19]
    for row in range(2):
        asked = batch["query_times"][row].long()
        assert torch.equal(batch["targets"][row], values[asked])
        assert batch["values"][row, asked].isnan().all()
        assert int((~batch["values"][row].isnan()).all(-1).sum()) == 11
    own = TimeSeriesCollator()([{"times": times, "values": values, "targets": values}])
    assert set(own) == {"times", "values", "targets"}
    assert torch.equal(own["values"].isnan(), values.isnan()[None])
    assert set(TimeSeriesCollator(forecast=0)([{"times": times, "values": values}])) == {"times", "values"}


def test_a_high_level_keeps_what_the_readings_say():
    """A wave of 10 +- 4 above 1e9, in multiples of 1/64, so that sums are exact: the same but for the level."""
    hours = np.arange(60.0)
    wave = np.round(64 * (10 + 4 * np.sin(2 * np.pi * hours / 24)))[:, None] / 64
    collator, model, found = TimeSeriesCollator(), network(channels=1), []
    for level in (0.0, 1e9):
        examples = [{"times": hours, "values": level + wave}, {"times": hours[:40], "values": level + wave[:40]}]
        batch = collator(examples)
        found.append(model(**batch))
    low, high = found
    assert high.loss.item() == pytest.approx(low.loss.item(), rel=1e-6)
    torch.testing.assert_close(high.location - 1e9, low.location, rtol=0, atol=1e-6)  # a step of float64 there: 1e-7
    torch.testing.assert_close(high.deviation, low.deviation, rtol=1e-9, atol=0)
    again = TimeSeriesCollator()(
        [{"times": hours, "values": 1e9 + wave, "targets": (10**9 + 3 * hours[:, None]).astype(int)}]
    )
    assert again["targets"].flatten().tolist() == (10**9 + 3 * hours).tolist()  # whole numbers stay exact


T, V, Q = data()
BAD_INPUT = [
    ("times", {"times": T.flip(1)}),
    ("times", {"times": T[:, [0, *range(11)]]}),  # one time twice
    ("times", {"times": T[:, :5]}),
    ("times", {"times": T.tolist()}),
    ("times", {"times": T.masked_fill(T[0, 5] == T, NAN)}),
    ("values", {"values": V[..., :1]}),
    ("values", {"values": V.masked_fill(V[0, 0, 0] == V, math.inf)}),
    ("values", {"values": V.masked_fill(torch.arange(BATCH)[:, None, None] == 1, NAN)}),
    ("values", {"values": V.nan_to_num().long()}),
    ("values", {"values": V.tolist()}),
    ("observed_mask", {"observed_mask": torch.ones(BATCH, LENGTH, dtype=torch.bool)}),
    ("query_times", {"query_times": Q.masked_fill(Q[0, 0] == Q, math.inf)}),
    ("query_times", {"query_times": Q[:2]}),
    ("query_times", {"query_times": [1.0]}),
    ("targets", {"targets": V}),
    ("targets", {"targets": torch.full((BATCH, QUERIES, CHANNELS), math.inf)}),
    ("target_mask", {"target_mask": torch.ones(BATCH, QUERIES, CHANNELS, dtype=torch.bool)}),
    ("target_mask", {"targets": torch.zeros(BATCH, QUERIES, CHANNELS), "target_mask": torch.ones(BATCH, QUERIES)}),
    ("observed_mask", {"observed_mask": [True]}),
    ("target_mask", {"targets": torch.zeros(BATCH, QUERIES, CHANNELS), "target_mask": [True]}),
]
BAD_CONFIG = [
    ("channels", {"channels": 0}),
    ("chanels", {"chanels": 3}),
    ("preset", {"preset": "m9"}),
    ("typical_gap", {"typical_gap": 0.0}),
    ("span", {"span": 0.5}),
    ("location", {"location": [0.0]}),
    ("spread", {"spread": [1.0, 0.0]}),
    ("scaling", {"scaling": "minmax"}),
    ("likelihood", {"likelihood": "cauchy"}),
    ("learn_decay", {"preset": "b1-rope", "learn_decay": True}),
    ("base", {"preset": "b2-alibi", "base": 100.0}),
    ("hidden_sizee", {"model_type": "rfa_time_series", "hidden_sizee": 3}),
    ("channels", {"channels": 10**10}),
]
BAD_DATA = [
    ("series", []),
    ("series", [(T[0, :1], V[0, :1])]),
    ("times", [(T[0].flip(0), V[0])]),
    ("values", [(T[0], V[0] * torch.tensor([1.0, NAN]))]),
    ("values", [(T[0], V[0] / 0)]),
    ("values", [(T[0], V[0, :3])]),
    ("values", [(T[0], V[0]), (T[0], V[0, :, :1])]),
    ("times", [("text", V[0])]),
    ("times", [(None, V[0])]),
    ("times", [(T[0] > 0, V[0])]),
    ("series", [T[0]]),
    ("series", [{"values": V[0]}]),
]
BAD_EXAMPLES = [
    ("examples", {}, []),
    ("series", {}, [{"times": T[0]}]),
    ("examples", {}, [{"times": T[0], "values": V[0], "target": V[0]}]),  # a misspelt entry
    ("targets", {}, [{"times": T[0], "values": V[0], "targets": V[0, :4]}]),
    ("targets", {}, [{"times": T[0], "values": V[0], "query_times": Q[0, :2], "targets": V[0]}]),
    ("values", {}, [{"times": T[0], "values": V[0]}, {"times": T[0], "values": V[0, :, :1]}]),
    ("values", {}, [{"times": T[0], "values": "text"}]),
    ("times", {}, [{"times": [], "values": []}]),
    ("examples", {}, [{"times": T[0], "values": V[0]}, {"times": T[0], "values": V[0], "targets": V[0]}]),
    ("values", {}, [{"times": T[0, :3], "values": V[0]}]),
    ("values", {}, [{"times": T[0, :1], "values": V[0, :1]}]),
    ("forecast", {"forecast": 1.0}, []),
]


def collated(fields, examples):
    return TimeSeriesCollator(**fields)(examples)


def refused(name, call):
    with only_our_own_checks(), pytest.raises(ValueError, match=rf"^{name}: ") as caught:
        call()
    assert "expected" in str(caught.value)


FAULTS = [
    *(
        (name, network(num_hidden_layers=1), {"times": T, "values": V, "query_times": Q, **given})
        for name, given in BAD_INPUT
    ),
    *((name, RFATimeSeriesConfig, {**SIZES, **given}) for name, given in BAD_CONFIG),
    *((name, lambda series: RFATimeSeriesConfig.from_data(series), {"series": series}) for name, series in BAD_DATA),
    *((name, collated, {"fields": fields, "examples": given}) for name, fields, given in BAD_EXAMPLES),
]


@pytest.mark.parametrize(("name", "call", "given"), FAULTS)
def test_faults_are_named(name, call, given):
    refused(name, lambda: call(**given))


def test_training_data_may_be_arrays_lists_frames_and_dictionaries():
    values = V[0].nan_to_num().double()
    expected = RFATimeSeriesConfig.from_data([(T[0], values)]).to_dict()
    forms = [
        (T[0].numpy(), values.numpy()),
        (T[0].tolist(), values.tolist()),
        (pd.Series(T[0].numpy()), pd.DataFrame(values.numpy())),
        {"times": T[0], "values": values, "targets": None},
    ]
    for form in forms:
        assert RFATimeSeriesConfig.from_data([form]).to_dict() == expected
    one = RFATimeSeriesConfig.from_data([(T[0].tolist(), values[:, 0].tolist())])
    assert (one.channels, one.location) == (1, expected["location"][:1])
    assert RFATimeSeriesConfig(typical_gap=1, span=64, location=[0], spread=[2]).span == 64  # whole numbers too


def test_a_finished_configuration_keeps_what_attention_was_made_of(tmp_path):
    config = RFATimeSeriesConfig(**SIZES)
    for name, value in (("preset", "b1-rope"), ("span", 500.0), ("typical_gap", 2.0)):
        refused(name, lambda name=name, value=value: setattr(config, name, value))
    config.save_pretrained(tmp_path)
    refused("preset", lambda: AutoConfig.from_pretrained(tmp_path, preset="b1-rope"))
    assert AutoConfig.from_pretrained(tmp_path).attention == config.attention
