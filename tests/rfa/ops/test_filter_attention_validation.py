"""Bad inputs raise `ValueError` that names the argument, before a backend is chosen."""

import re

import numpy as np
import pytest
import torch

from rfa import robust_filter_attention

from .problems import PARAMETERS, STATES, attend, problem

NONNEGATIVE = ("decay", "process_noise", "key_noise", "query_noise", "noise_floor")
POSITIVE = ("robustness", "inverse_temperature")
TIMES = torch.tensor([0.0, 0.5, 1.5, 2.0, 4.0])
MASK, SEGMENTS = torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.long)


def inputs_of(**shape):
    return problem(0, dtype=torch.float32, **shape)


def refuse(argument, inputs=None, **options):
    """The message begins with the argument's name."""
    with pytest.raises(ValueError, match=rf"^{re.escape(argument)}: got "):
        robust_filter_attention(**(inputs or inputs_of()), **options)


def refuse_changed(argument, *changes, **options):
    """Each change of this argument."""
    for change in changes:
        inputs = inputs_of()
        refuse(argument, {**inputs, argument: change(inputs[argument])}, **options)


def test_states():
    for name in STATES:
        refuse_changed(name, lambda x: x[0], lambda x: x[None], lambda x: x.long(), lambda x: x > 0)  # ranks and dtypes
        refuse_changed(name, lambda x: x.to(torch.complex64), lambda x: x.tolist())
    refuse_changed("query", lambda x: x[..., :5], lambda x: x[..., :0])  # channels are pairs
    for name in STATES[1:]:
        refuse_changed(name, lambda x: x[:1], lambda x: torch.cat([x, x]), lambda x: x[:, :1], lambda x: x.to("meta"))
        refuse_changed(name, lambda x: x[..., :4], lambda x: x.double())
    refuse_changed("value", lambda x: x[:, :, :1], lambda x: x[:, :, :4])
    refuse("value", inputs_of(value_modes=4))  # rotating them needs equal widths
    attend(inputs_of(value_modes=4), "reference", rotate_values=False)


def test_parameters():
    for name in PARAMETERS:
        refuse_changed(name, lambda x: torch.cat([x, x[:1]]), lambda x: x[:1], lambda x: x[None], lambda x: x[0])
        refuse_changed(name, lambda x: torch.ones_like(x, dtype=torch.long), lambda x: x.to(torch.complex64))
        refuse_changed(name, lambda x: x.to("meta"), lambda x: x * torch.nan, lambda x: x + torch.inf)
        refuse_changed(name, lambda x: x.tolist())
    refuse_changed(
        "frequency", lambda x: x[:, :2], lambda x: torch.cat([x, x], 1), lambda x: x[:, :1], lambda x: x[:, 0]
    )
    for name in (*NONNEGATIVE, *POSITIVE):
        refuse_changed(name, lambda x: torch.tensor([0.5, -1e-6]))
    for name in POSITIVE:
        refuse_changed(name, lambda x: torch.tensor([0.5, 0.0]))


TIME_FAULTS = {
    "too short": TIMES[:4],
    "too long": torch.cat([TIMES, torch.tensor([5.0])]),
    "a scalar": torch.tensor(1.0),
    "rank 3": TIMES.expand(1, 2, 5),
    "wrong batch": TIMES.expand(3, 5),
    "batch of one": TIMES[None],
    "booleans": TIMES > 1,
    "complex": TIMES.to(torch.complex64),
    "bfloat16": TIMES.bfloat16(),
    "float16": TIMES.half(),
    "nan": torch.tensor([0.0, 0.5, float("nan"), 2.0, 4.0]),
    "inf": torch.tensor([0.0, 0.5, 1.0, 2.0, float("inf")]),
    "-inf": torch.tensor([-float("inf"), 0.5, 1.0, 2.0, 3.0]),
    "other device": TIMES.to("meta"),
    "a list": TIMES.tolist(),
}
ORDER_FAULTS = {
    "repeated": torch.tensor([0.0, 0.5, 0.5, 2.0, 4.0]),
    "decreasing": TIMES.flip(0),
    "one back": torch.tensor([0.0, 1.0, 2.0, 1.5, 4.0]),
    "in one sequence only": torch.stack([TIMES, TIMES.flip(0)]),
}


def test_times():
    for times in (TIME_FAULTS | ORDER_FAULTS).values():
        refuse("times", times=times)


def test_query_times():
    for times in TIME_FAULTS.values():
        refuse("query_times", times=TIMES, query_times=times)
        refuse("query_times", query_times=times)
    for times in ORDER_FAULTS.values():  # they need no order
        attend(inputs_of(), "reference", times=TIMES, query_times=times)
    more = inputs_of(queries=6, keys=5)
    refuse("query_times", more)
    refuse("query_times", more, times=TIMES)
    refuse("query_times", more, query_times=torch.arange(6.0), segment_ids=SEGMENTS)


def test_times_must_increase_within_segments_and_among_participants():
    times = torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0])
    refuse("times", times=times)
    attend(inputs_of(), "reference", times=times, segment_ids=torch.tensor([[0, 0, 1, 1, 1]]).expand(2, 5))
    refuse("times", times=times, segment_ids=torch.tensor([[0, 1, 1, 0, 1]]).expand(2, 5))
    mask = torch.tensor([[True, True, False, False, True]]).expand(2, 5)
    attend(inputs_of(), "reference", times=times, key_mask=mask)
    refuse("times", times=times, key_mask=mask.roll(1, 1))


def test_masks_and_segments():
    for wrong in (MASK.float(), MASK.int(), MASK[0], MASK[:1], MASK[:, :4], MASK[:, None], MASK.to("meta"), True):
        refuse("key_mask", key_mask=wrong)
    for wrong in (SEGMENTS.float(), MASK, SEGMENTS[0], SEGMENTS[:1], SEGMENTS[:, :4], SEGMENTS.to("meta"), 3):
        refuse("segment_ids", segment_ids=wrong)


def test_horizon():
    for wrong in (torch.tensor([0.1, -0.1]), torch.ones(3), torch.ones(1), torch.tensor(1.0), torch.ones(2, 1)):
        refuse("horizon", horizon=wrong)


def test_choices_and_switches():
    for name, wrong in {"weight": ["gaussian", "Student_t"], "prior": ["kalman", "Riccati"]}.items():
        for given in (*wrong, "", None):
            refuse(name, **{name: given})
    for name in ("causal", "rotate_values", "gate", "query_noise_in_bias", "return_log_precision"):
        for given in ("yes", None, 1, torch.tensor(True)):
            refuse(name, **{name: given})
        robust_filter_attention(**inputs_of(), **{name: np.True_})
    refuse("query_noise_in_bias", query_noise_in_bias=True, prior="riccati")
