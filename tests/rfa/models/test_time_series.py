"""The time-series model: invariances, what an output may see, gradients and saving."""

import math

import pytest
import torch
from cover import cover, slow
from transformers import AutoConfig, AutoModel

from rfa.models import RFAForTimeSeries, RFATimeSeriesConfig, TimeSeriesCollator

from .small import assert_same

BATCH, LENGTH, QUERIES, CHANNELS = 3, 12, 5, 2
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "span": 20.0, "channels": CHANNELS}
KINDS = ["x2-riccati-alibi", "m2-sc-rfa", "b2-alibi", "x7-gated-roper"]
NAMES = ("location", "deviation", "degrees_of_freedom")


def network(preset="x2-riccati-alibi", **fields):
    torch.manual_seed(0)
    return RFAForTimeSeries(RFATimeSeriesConfig(preset=preset, **{**SIZES, **fields})).eval()


def data(seed=0):
    """Times, values with missing entries and one missing row, and queries before, among and after the readings."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.rand(BATCH, LENGTH, generator=generator, dtype=torch.float64).add(0.1).cumsum(1)
    values = torch.randn(BATCH, LENGTH, CHANNELS, generator=generator)
    values[0, 3], values[1, 2, 0] = math.nan, math.nan
    queries = torch.rand(BATCH, QUERIES, generator=generator, dtype=torch.float64) * 10 - 0.5
    return times, values, queries


def assert_equal(one, other, rows=slice(None), of_other=None):
    """In the rows, all numbers of two outputs."""
    for name in NAMES:
        if name in one:
            assert_same(one[name][:, rows], other[name][:, rows if of_other is None else of_other])


def pick(x, index):
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


@cover(preset=KINDS, causal=[True, False], scaling=["window", "training"], likelihood=["student_t", "gaussian"])
def test_a_query_is_a_row_without_a_reading(preset, causal, scaling, likelihood):
    times, values, queries = data()
    causal = causal or "gated" in preset
    model = network(preset, causal=causal, scaling=scaling, likelihood=likelihood)
    asked = model(times, values, query_times=queries)
    every, order = torch.cat([times, queries], dim=1).sort(dim=1)
    rows = pick(torch.cat([values, torch.full((BATCH, QUERIES, CHANNELS), math.nan)], dim=1), order)
    place = order.argsort(1)[:, LENGTH:]
    assert_same(pick(model(every, rows).location, place), asked.location)
    assert_equal(model(times, values, query_times=queries[:, 2:3]), asked, slice(0, 1), slice(2, 3))  # nor the others


@pytest.mark.parametrize("preset", KINDS)
def test_later_readings_change_nothing(preset):
    times, values, _ = data()
    model = network(preset, scaling="training")
    later = values.clone()
    later[:, 8:] = 100.0
    before = model(times, values)
    assert_equal(before, model(times, later), slice(0, 8))
    assert_equal(before, model(times[:, :8], values[:, :8]), slice(0, 8))
    assert not torch.allclose(before.location[:, 8:], model(times, later).location[:, 8:])
    smoothed = network("m2-sc-rfa", scaling="training", causal=False)
    assert not torch.allclose(smoothed(times, values).location[:, :8], smoothed(times, later).location[:, :8])


@pytest.mark.parametrize("preset", KINDS[:3:2])
def test_units_and_origins_of_time_and_values_do_not_matter(preset):
    times, values, queries = data()
    values = values.double()
    expected = network(preset)(times, values, query_times=queries)
    location, spread = [0.0] * CHANNELS, [8.0] * CHANNELS
    other = network(preset, typical_gap=60.0, span=1200.0, location=location, spread=spread)
    scale = torch.tensor([8.0, 8.0], dtype=torch.float64)
    actual = other(60 * times + 1e6, values * scale - 300, query_times=60 * queries + 1e6)
    assert_same((actual.location + 300) / scale, expected.location)
    assert_same(actual.deviation / scale, expected.deviation)
    assert_same(actual.degrees_of_freedom, expected.degrees_of_freedom)


def test_whole_numbers_of_nanoseconds_are_times():
    times, values, queries = data()
    exact = (times * 1e9).long() + 1_700_000_000_000_000_000  # since 1970: too large for a float
    asked = (queries * 1e9).long() + 1_700_000_000_000_000_000
    other = network(typical_gap=1e9, span=20e9)
    assert_equal(other(exact, values, query_times=asked), network()(times, values, query_times=queries))


@pytest.mark.parametrize("preset", KINDS[:3:2])
def test_padded_series_are_series_alone(preset):
    times, values, queries = data()
    model = network(preset)
    lengths, examples = (12, 7, 9), []
    for row, length in enumerate(lengths):
        asked = {"query_times": queries[row, : row + 2], "targets": torch.zeros(row + 2, CHANNELS)}
        examples.append({"times": times[row, :length], "values": values[row, :length], **asked})
    alone = [model(e["times"][None], e["values"][None], query_times=e["query_times"][None]) for e in examples]
    padded = model(**TimeSeriesCollator()(examples))
    for row, one in enumerate(alone):
        assert_same(padded.location[row, : one.location.shape[1]], one.location[0])
    likelihood = torch.cat([one.distribution.log_prob(torch.zeros(())).flatten() for one in alone])
    assert_same(padded.loss, -likelihood.mean())


@slow
def test_gradients_reach_values_and_times():
    """Through the medians by which windows are scaled."""
    times, values, queries = data()
    model = network(hidden_size=8, num_attention_heads=2, num_hidden_layers=1).double()
    given = times[:1, :5].clone().requires_grad_(), values[:1, :5].double().clone().requires_grad_()

    def predicted(times, values):
        return model(times, values, query_times=times[:, -1:] + queries[:1, :2].abs()).location

    assert torch.autograd.gradcheck(predicted, given, eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("preset", KINDS[:3:2])
def test_a_query_comes_after_the_reading_of_its_time(preset):
    times, values, _ = data()
    model = network(preset, scaling="training")
    asked = model(times, values, query_times=times[:, 5:6])
    changed = values.clone()
    changed[:, 5] += 1.0
    assert not torch.allclose(model(times, changed, query_times=times[:, 5:6]).location, asked.location)
    changed[:, 6:] += 1.0
    changed[:, 5] -= 1.0
    assert_equal(model(times, changed, query_times=times[:, 5:6]), asked)
    assert_equal(model(times, values, query_times=times[:, 5:6] + 1e-9), asked)


def test_rows_without_a_reading_may_have_any_time():
    times, values, queries = data()
    expected = network()(times, values, query_times=queries)
    odd = torch.tensor([-1e9, 1e9, 0.0]).expand(BATCH, 3).double()
    nothing = torch.full((BATCH, 3, CHANNELS), math.nan)
    every = torch.cat([odd[:, :2], times, odd[:, 2:]], dim=1)
    rows = torch.cat([nothing[:, :2], values, nothing[:, 2:]], dim=1)
    assert_equal(network()(every, rows, query_times=queries), expected)


def test_masked_entries_are_missing_entries():
    times, values, queries = data()
    mask = ~values.isnan()
    mask[2, 5:7] = False
    expected = network()(times, values.masked_fill(~mask, math.nan), query_times=queries)
    assert_equal(network()(times, values.nan_to_num(7.0), observed_mask=mask, query_times=queries), expected)


@pytest.mark.parametrize("preset", KINDS)
def test_gradients_are_finite_and_reach_every_parameter(preset):
    times, values, queries = data()
    model = network(preset).train()
    targets = torch.randn(BATCH, QUERIES, CHANNELS)
    targets[0, 0] = math.nan
    values[2, 4] = 1e6  # a far outlier
    model(times, values, query_times=queries, targets=targets).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # keys' biases turn with nothing: a constant added to all keys leaves a softmax of dot products as it is
        assert parameter.grad.abs().max() > 0 or "key_projection.bias" in name, name


@pytest.mark.parametrize("likelihood", ["gaussian", "student_t"])
def test_a_batch_without_a_seen_target_costs_nothing(likelihood):
    """Loss 0 and gradients 0. A hidden target of another size than its channel leaves the other gradients finite."""
    times, values, queries = data()
    model = network(likelihood=likelihood)
    targets = torch.zeros(3, queries.shape[-1], 2, dtype=values.dtype)
    hidden = torch.zeros_like(targets, dtype=torch.bool)
    for given in ({"targets": targets + torch.nan}, {"targets": targets, "target_mask": hidden}):
        model.zero_grad()
        loss = model(times, values, query_times=queries, **given).loss
        assert loss.item() == 0
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert not any(gradient.count_nonzero() for gradient in gradients)
    hidden[..., 0] = True
    far = network(likelihood=likelihood, location=[0.0, 1e30], spread=[1.0, 1.0], scaling="training")
    values[..., 1] += 1e30
    far(times, values, query_times=queries, targets=targets, target_mask=hidden).loss.backward()
    assert all(p.grad.isfinite().all() for p in far.parameters() if p.grad is not None)


def test_saved_models_are_the_same(tmp_path):
    times, values, queries = data()
    model = network("x3-rotation-riccati", location=[1.0, 2.0], spread=[3.0, 4.0])
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, RFAForTimeSeries)
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert loaded.config.attention == model.config.attention
    one, other = (m(times, values, query_times=queries) for m in (model, loaded))
    assert all(torch.equal(one[name], other[name]) for name in NAMES)
