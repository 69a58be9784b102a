"""Shapes against the oracle: one key, no key, odd and unequal lengths, value widths, broadcast times."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .problems import PRIORS, WEIGHTS, assert_matches_oracle, irregular_times, problem


@st.composite
def cases(draw):
    shape = {
        "batch": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 3)),
        "keys": draw(st.integers(0, 6)),
        "modes": draw(st.integers(1, 4)),
    }
    batch, keys = shape["batch"], shape["keys"]
    seed = draw(st.integers(0, 2**20))
    options = {
        "weight": draw(st.sampled_from(WEIGHTS)),
        "prior": draw(st.sampled_from(PRIORS)),
        "causal": draw(st.booleans()),
        "gate": draw(st.booleans()),
        "rotate_values": draw(st.booleans()),
    }
    if not options["rotate_values"]:
        shape["value_modes"] = draw(st.integers(1, 5))
    asked = draw(st.booleans())
    segmented = draw(st.booleans())
    shape["queries"] = draw(st.integers(0, keys if segmented or not asked else 7))
    lead = draw(st.sampled_from([(), (batch,)]))
    if draw(st.booleans()):
        options["times"] = irregular_times(seed, *lead, keys)
    if asked:
        lead = draw(st.sampled_from([(), (batch,)]))
        g = torch.Generator().manual_seed(seed)
        options["query_times"] = 8 * torch.rand(*lead, shape["queries"], generator=g, dtype=torch.float64) - 1
    if draw(st.booleans()):
        g = torch.Generator().manual_seed(seed + 1)
        options["key_mask"] = torch.rand(batch, keys, generator=g) < 0.7
    if segmented:
        g = torch.Generator().manual_seed(seed + 2)
        options["segment_ids"] = torch.randint(0, 3, (batch, keys), generator=g)
    return seed, shape, options


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_any_shape_equals_the_oracle(case, backend):
    seed, shape, options = case
    output, log_precision = assert_matches_oracle(problem(seed, **shape), backend, **options)
    expected = (shape["batch"], shape["heads"], shape["queries"])
    assert log_precision.shape == expected
    assert output.shape == (*expected, 2 * shape.get("value_modes", shape["modes"]))
