"""Outputs and log precisions against the oracle, over every option of the operator."""

import torch
from cover import cover

from .problems import (
    EXACT,
    PRIORS,
    SINGLE,
    WEIGHTS,
    assert_matches_oracle,
    assert_same,
    attend,
    irregular_times,
    problem,
)

TIMING = ("default", "shared", "batched", "queried", "queried per batch")
STRUCTURE = ("plain", "mask", "segments", "mask and segments")
MASK = torch.tensor([[True, False, True, True, True], [False, True, True, False, True]])
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1], [7, -2, -2, 7, 7]])  # the second row is interleaved


def timing_options(timing, queries=4, keys=5):
    """Query times: between keys, before the first one, equal to one, and far beyond the last; in no order."""
    shared = irregular_times(1, keys)
    batched = irregular_times(2, 2, keys)
    asked = torch.stack([shared[-1] + 3.0, shared[1], shared[0] - 0.5, shared[2] + 0.05])[:queries]
    return {
        "default": {},
        "shared": {"times": shared},
        "batched": {"times": batched},
        "queried": {"times": shared, "query_times": asked},
        "queried per batch": {"times": batched, "query_times": torch.stack([asked, asked.flip(0) + 0.3])},
    }[timing]


def structure_options(structure):
    options = {}
    if "mask" in structure:
        options["key_mask"] = MASK
    if "segments" in structure:
        options["segment_ids"] = SEGMENTS
    return options


@cover(
    structure=STRUCTURE,
    timing=TIMING,
    causal=[True, False],
    prior=PRIORS,
    weight=WEIGHTS,
    rotate_values=[True, False],
    gate=[True, False],
    ahead=[True, False],
    dtype=[torch.float64, torch.float32],
)
def test_the_oracle(structure, timing, causal, prior, weight, rotate_values, gate, ahead, dtype, backend):
    options = {"causal": causal, "prior": prior, "weight": weight, "rotate_values": rotate_values, "gate": gate}
    options |= {**timing_options(timing), **structure_options(structure)}
    options["horizon"] = torch.tensor([0.7, 0.0], dtype=torch.float64) if ahead else None
    inputs = problem(3, queries=4, dtype=dtype)
    for x in assert_matches_oracle(inputs, backend, EXACT if dtype == torch.float64 else SINGLE, **options):
        assert x.dtype == dtype


@cover(1, gate=[True, False], causal=[True, False], weight=WEIGHTS)
def test_query_noise_in_bias(weight, causal, gate, backend):
    horizon = torch.tensor([0.0, 1.3], dtype=torch.float64)
    for timing in TIMING:
        options = {"weight": weight, "causal": causal, "gate": gate, **timing_options(timing)}
        inputs = problem(4, queries=4)
        assert_matches_oracle(inputs, backend, query_noise_in_bias=True, **options)
        assert_matches_oracle(inputs, backend, query_noise_in_bias=True, horizon=horizon, **options)


def test_the_default_returns_the_output_alone(backend):
    from rfa.ops import robust_filter_attention

    inputs = problem(11, dtype=torch.float32)
    alone = robust_filter_attention(**inputs, backend=backend)
    assert isinstance(alone, torch.Tensor)
    assert alone.shape == inputs["query"].shape
    assert torch.equal(alone, attend(inputs, backend)[0])
    assert_same(robust_filter_attention(**inputs), alone, backend, SINGLE)  # backend="auto"
