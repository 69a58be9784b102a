"""Bad inputs raise `ValueError` that names the argument."""

import re

import numpy as np
import pytest
import torch
from cover import cover

from rfa import robust_filter_attention

from .problems import PARAMETERS, STATES, attend, problem

NONNEGATIVE = ("decay", "process_noise", "key_noise", "query_noise", "noise_floor")
POSITIVE = ("robustness", "inverse_temperature")
TIMES = torch.tensor([0.0, 0.5, 1.5, 2.0, 4.0])


def refuse(name, backend, inputs=None, **options):
    """The message has the argument's name as a word."""
    with pytest.raises(ValueError, match=rf"\b{re.escape(name)}\b"):
        attend(inputs or problem(0, dtype=torch.float32), backend, **options)


def changed(name, change, **shape):
    inputs = problem(0, dtype=torch.float32, **shape)
    inputs[name] = change(inputs[name])
    return inputs


STATE_FAULTS = {
    "rank 3": lambda x: x[0],
    "rank 5": lambda x: x[None],
    "odd channels": lambda x: x[..., :5],
    "no channels": lambda x: x[..., :0],
    "integers": lambda x: x.long(),
    "booleans": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
}


@cover(1, fault=STATE_FAULTS, name=STATES)
def test_states(name, fault, backend):
    refuse(name, backend, changed(name, STATE_FAULTS[fault]))


PAIR_FAULTS = {
    "batch": lambda x: x[:1],
    "more batch": lambda x: torch.cat([x, x]),
    "heads": lambda x: x[:, :1],
    "other device": lambda x: x.to("meta"),
}


@cover(1, fault=PAIR_FAULTS, name=["key", "value"])
def test_states_that_do_not_belong_together(name, fault, backend):
    refuse(name, backend, changed(name, PAIR_FAULTS[fault]))


def test_channels_of_query_and_key_differ(backend):
    refuse("key", backend, changed("key", lambda x: x[..., :4]))


@pytest.mark.parametrize("length", [1, 4])
def test_lengths_of_key_and_value_differ(length, backend):
    refuse("value", backend, changed("value", lambda x: x[:, :, :length]))


def test_rotating_values_needs_equal_widths(backend):
    refuse("value", backend, changed("value", lambda x: x[..., :4]))
    refuse("value", backend, problem(0, value_modes=4), rotate_values=True)
    attend(problem(0, value_modes=4), backend, rotate_values=False)


PARAMETER_FAULTS = {
    "one too many": lambda x: torch.cat([x, x[:1]]),
    "one for all": lambda x: x[:1],
    "more axes": lambda x: x[None],
    "fewer axes": lambda x: x[0],
    "integers": lambda x: torch.ones_like(x, dtype=torch.long),
    "complex": lambda x: x.to(torch.complex64),
    "other device": lambda x: x.to("meta"),
}


@cover(1, fault=PARAMETER_FAULTS, name=PARAMETERS)
def test_parameters(name, fault, backend):
    refuse(name, backend, changed(name, PARAMETER_FAULTS[fault]))


def test_frequency_needs_one_value_a_mode(backend):
    for change in (lambda x: x[:, :2], lambda x: torch.cat([x, x], 1), lambda x: x[:, :1], lambda x: x[:, 0]):
        refuse("frequency", backend, changed("frequency", change))


@pytest.mark.parametrize("name", NONNEGATIVE)
def test_negative_parameters(name, backend):
    refuse(name, backend, changed(name, lambda x: torch.tensor([0.5, -1e-6])))
    attend(changed(name, torch.zeros_like), backend)


@pytest.mark.parametrize("name", POSITIVE)
def test_parameters_that_are_not_positive(name, backend):
    for bad in (0.0, -1.0):
        refuse(name, backend, changed(name, lambda x, bad=bad: torch.tensor([0.5, bad])))


TIME_FAULTS = {
    "too short": TIMES[:4],
    "too long": torch.cat([TIMES, torch.tensor([5.0])]),
    "a scalar": torch.tensor(1.0),
    "rank 3": TIMES.expand(1, 2, 5),
    "wrong batch": TIMES.expand(3, 5),
    "batch of one": TIMES[None],
    "booleans": TIMES > 1,
    "complex": TIMES.to(torch.complex64),
    "nan": torch.tensor([0.0, 0.5, float("nan"), 2.0, 4.0]),
    "inf": torch.tensor([0.0, 0.5, 1.0, 2.0, float("inf")]),
    "-inf": torch.tensor([-float("inf"), 0.5, 1.0, 2.0, 3.0]),
    "other device": TIMES.to("meta"),
}
ORDER_FAULTS = {
    "repeated": torch.tensor([0.0, 0.5, 0.5, 2.0, 4.0]),
    "decreasing": TIMES.flip(0),
    "one back": torch.tensor([0.0, 1.0, 2.0, 1.5, 4.0]),
    "in one sequence only": torch.stack([TIMES, TIMES.flip(0)]),
}


@cover(1, fault=[*TIME_FAULTS, *ORDER_FAULTS], prior=["lyapunov", "riccati"])
def test_times(prior, fault, backend):
    refuse("times", backend, times={**TIME_FAULTS, **ORDER_FAULTS}[fault], prior=prior)


@pytest.mark.parametrize("fault", TIME_FAULTS)
def test_query_times(fault, backend):
    refuse("query_times", backend, times=TIMES, query_times=TIME_FAULTS[fault])
    refuse("query_times", backend, query_times=TIME_FAULTS[fault])


@pytest.mark.parametrize("fault", ORDER_FAULTS)
def test_query_times_need_no_order(fault, backend):
    attend(problem(0, dtype=torch.float32), backend, times=TIMES, query_times=ORDER_FAULTS[fault])


def test_times_must_increase_within_segments_and_among_participants(backend):
    times = torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0])
    segments = torch.tensor([[0, 0, 1, 1, 1]]).expand(2, 5)
    refuse("times", backend, times=times)
    attend(problem(0, dtype=torch.float32), backend, times=times, segment_ids=segments)
    refuse("times", backend, times=times, segment_ids=torch.tensor([[0, 1, 1, 0, 1]]).expand(2, 5))
    mask = torch.tensor([[True, True, False, False, True]]).expand(2, 5)
    attend(problem(0, dtype=torch.float32), backend, times=times, key_mask=mask)
    refuse("times", backend, times=times, key_mask=mask.roll(1, 1))


def test_more_queries_than_keys_need_query_times(backend):
    refuse("query_times", backend, problem(0, queries=6, keys=5))
    refuse("query_times", backend, problem(0, queries=6, keys=5), times=TIMES)


MASK = torch.ones(2, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    "mask", [MASK.float(), MASK.int(), MASK[0], MASK[:1], MASK[:, :4], MASK[:, None], MASK.to("meta")],
    ids=["float", "int", "rank 1", "batch", "length", "rank 3", "other device"],
)  # fmt: skip
def test_key_mask(mask, backend):
    refuse("key_mask", backend, key_mask=mask)


SEGMENTS = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    "ids", [SEGMENTS.float(), SEGMENTS[0], SEGMENTS[:1], SEGMENTS[:, :4], SEGMENTS[:, None], SEGMENTS.to("meta")],
    ids=["float", "rank 1", "batch", "length", "rank 3", "other device"],
)  # fmt: skip
def test_segment_ids(ids, backend):
    refuse("segment_ids", backend, segment_ids=ids)


def test_segments_need_no_more_queries_than_keys(backend):
    asked = torch.arange(6.0)
    refuse("segment_ids", backend, problem(0, queries=6, keys=5), query_times=asked, segment_ids=SEGMENTS)


@pytest.mark.parametrize(
    "horizon", [torch.tensor([0.1, -0.1]), torch.ones(3), torch.ones(1), torch.tensor(1.0), torch.ones(2, 1)],
    ids=["negative", "too many", "too few", "scalar", "rank 2"],
)  # fmt: skip
def test_horizon(horizon, backend):
    refuse("horizon", backend, horizon=horizon)


@pytest.mark.parametrize("weight", ["gaussian", "", "Student_t", None])
def test_weight(weight, backend):
    refuse("weight", backend, weight=weight)


@pytest.mark.parametrize("prior", ["kalman", "", "Riccati", None])
def test_prior(prior, backend):
    refuse("prior", backend, prior=prior)


@cover(1, name=["causal", "rotate_values", "gate", "query_noise_in_bias"], given=["yes", None, 1, torch.tensor(True)])
def test_switches(name, given, backend):
    refuse(name, backend, **{name: given})
    attend(problem(0, dtype=torch.float32), backend, **{name: np.True_})


def test_the_log_precision_is_wanted_or_not():
    with pytest.raises(ValueError, match="return_log_precision: got 'x', expected True or False"):
        robust_filter_attention(**problem(0), return_log_precision="x")
    assert isinstance(robust_filter_attention(**problem(0), return_log_precision=np.True_), tuple)


def test_query_noise_in_the_bias_needs_the_lyapunov_prior(backend):
    refuse("query_noise_in_bias", backend, query_noise_in_bias=True, prior="riccati")


def test_bad_arguments_are_named_whatever_the_backend(backend):
    """A fault is found before dispatch: with backend="auto" the message is the same."""
    inputs = changed("decay", lambda x: -x - 1)
    with pytest.raises(ValueError, match="decay") as one:
        attend(inputs, backend)
    with pytest.raises(ValueError, match="decay") as other:
        attend(inputs, "auto")
    assert str(one.value) == str(other.value)
