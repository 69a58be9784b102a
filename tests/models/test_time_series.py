"""The time-series model: invariances, what a query may see, sampling, saving, and errors."""

import math

import pytest
import torch
from cover import cover
from torch.distributions import Normal, StudentT
from transformers import AutoConfig, AutoModel

from rfa.models import RFAForTimeSeries, RFATimeSeriesConfig

from .small import SINGLE, assert_same

BATCH, LENGTH, QUERIES, CHANNELS = 3, 12, 5, 2
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "span": 20.0, "channels": CHANNELS}
KINDS = ["x2-riccati-alibi", "m2-sc-rfa", "b2-alibi", "c9-rotation-fox", "c10-rotation-learned"]


def model(preset="x2-riccati-alibi", **fields):
    torch.manual_seed(0)
    return RFAForTimeSeries(RFATimeSeriesConfig(preset=preset, **{**SIZES, **fields})).eval()


def data(seed=0):
    """Times, values with missing entries and one missing row, and query times before, among and after the readings."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.rand(BATCH, LENGTH, generator=generator, dtype=torch.float64).add(0.1).cumsum(1)
    values = torch.randn(BATCH, LENGTH, CHANNELS, generator=generator)
    values[0, 3], values[1, 2, 0] = math.nan, math.nan
    queries = torch.rand(BATCH, QUERIES, generator=generator, dtype=torch.float64) * 10 - 0.5
    return times, values, queries


def assert_equal(one, other, rows=slice(None)):
    for name in ("location", "deviation", "degrees_of_freedom"):
        if one[name] is not None:
            assert_same(one[name][:, rows], other[name][:, rows])


@pytest.mark.parametrize("preset", KINDS)
def test_a_query_is_a_row_without_a_reading(preset):
    times, values, queries = data()
    network = model(preset)
    asked = network(times, values, query_times=queries)
    rows = torch.cat([values, torch.full((BATCH, QUERIES, CHANNELS), math.nan)], dim=1)
    every, order = torch.cat([times, queries], dim=1).sort(dim=1)
    output = network(every, rows.gather(1, order[..., None].expand(-1, -1, CHANNELS)))
    place = order.argsort(1)[:, LENGTH:, None].expand(-1, -1, CHANNELS)
    assert_same(output.location.gather(1, place), asked.location)


@pytest.mark.parametrize("preset", KINDS)
def test_a_query_changes_no_other(preset):
    times, values, queries = data()
    network = model(preset)
    assert_equal(network(times, values, query_times=queries[:, 2:3]), network(times, values, query_times=queries).__class__(
        **{k: v[:, 2:3] for k, v in network(times, values, query_times=queries).items()}
    ))
