"""The bound that stands in for a row's maximum: rows far below it, empty rows, and numbers that are none."""

import torch
from cover import cover

from ..problems import PRIORS, WEIGHTS, assert_same, attend, irregular_times, problem
from .random_problems import errors

LENGTH = 150  # more than one block of queries and of keys
ROWS = (3, 60, 149)
FAR = {"student_t": 2.0**24, "exponential": 2.0**7}


def far(weight, timed):
    """A problem in which some queries lie hundreds or thousands of bits below the bound, between ordinary ones."""
    inputs = problem(1, batch=1, keys=LENGTH, modes=4, dtype=torch.float32)
    inputs["inverse_temperature"].fill_(3.0)
    inputs["query"][:, :, ROWS, :] *= FAR[weight]
    return inputs, {"weight": weight, **({"times": irregular_times(1, LENGTH)} if timed else {})}


def below_the_bound(inputs, options):
    """How many bits the log precision of the far rows lies below that of the others, at least."""
    log_precision = attend({n: x.double() for n, x in inputs.items()}, "reference", **options)[1]
    others = [i for i in range(LENGTH) if i not in ROWS]
    return float(log_precision[..., others].amin() - log_precision[..., ROWS].amax()) / 0.693


@cover(weight=WEIGHTS, prior=PRIORS, timed=[False, True])
def test_rows_far_below_the_bound_and_their_neighbours(weight, prior, timed):
    inputs, options = far(weight, timed)
    options["prior"] = prior
    assert below_the_bound(inputs, options) > 150  # 2^-150 is 0 in float32
    for name, (error, dense, scale, _) in errors(inputs, options, ["value", "inverse_temperature"], "cpu").items():
        assert error <= 4 * dense + 1e-5 * scale, name  # as in test_random.py
    rounded = {n: x.double() for n, x in inputs.items()}
    near = [i for i in range(LENGTH) if i not in ROWS]
    for found, expected in zip(attend(inputs, "cpu", **options), attend(rounded, "reference", **options), strict=True):
        # float32 scores of up to 1e3 bits, of which the neighbours know nothing
        assert_same(found[:, :, near].double(), expected[:, :, near], "cpu", 1e-4)


def test_masked_near_keys_leave_only_far_ones():
    """What takes part lies 1e4 standard deviations off: residuals of 1e8 under the exponential weight."""
    inputs = problem(2, batch=1, keys=LENGTH, modes=4, dtype=torch.float32)
    mask = torch.ones(1, LENGTH, dtype=torch.bool)
    mask[:, 20:] = False
    inputs["key"][:, :, :20] += 1e4
    inputs["decay"].zero_()
    options = {"weight": "exponential", "key_mask": mask, "causal": False}
    output, log_precision = attend(inputs, "cpu", **options)
    expected, expected_log = attend({n: x.double() for n, x in inputs.items()}, "reference", **options)
    dense, _ = attend(inputs, "reference", **options)
    assert float(expected_log.max()) < -1e5
    torch.testing.assert_close(log_precision.double(), expected_log, rtol=1e-5, atol=0)
    assert (output - expected).abs().max() <= 4 * (dense - expected).abs().max() + 1e-5


@cover(1, prior=PRIORS, timed=[False, True])
def test_the_far_rows_leave_their_neighbours_bit_for_bit(timed, prior):
    """Causality to the last bit: a query's own outlier is nobody else's business, in the same block either."""
    inputs, options = far("student_t", timed)
    options["prior"] = prior
    first = attend(inputs, "cpu", **options)
    inputs["query"][:, :, ROWS, :] /= FAR["student_t"]
    near = [i for i in range(LENGTH) if i not in ROWS]
    for one, other in zip(first, attend(inputs, "cpu", **options), strict=True):
        assert torch.equal(one[:, :, near], other[:, :, near])


@cover(weight=WEIGHTS, prior=PRIORS, timed=[False, True])
def test_empty_rows_among_others(weight, prior, timed):
    inputs = problem(3, keys=LENGTH, dtype=torch.float32)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :50], mask[1] = False, False
    options = {"weight": weight, "prior": prior, "key_mask": mask}
    options.update({"times": irregular_times(3, LENGTH)} if timed else {})
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    output, log_precision = attend(leaves, "cpu", **options)
    empty = torch.zeros(2, LENGTH, dtype=torch.bool)
    empty[0, :50] = empty[1] = True
    empty = empty[:, None].expand(2, 2, LENGTH)
    assert bool((output[empty] == 0).all())
    assert torch.equal(log_precision == -torch.inf, empty)
    (output.sum() + log_precision[~empty].sum()).backward()
    assert all(bool(x.grad.isfinite().all()) for x in leaves.values())
    assert bool((leaves["query"].grad[empty] == 0).all())


@cover(
    name=["query", "key", "value"],
    bad=[torch.nan, torch.inf, -torch.inf],
    weight=WEIGHTS,
    prior=PRIORS,
    timed=[False, True],
)
def test_what_is_no_number_is_not_hidden(name, bad, weight, prior, timed):
    """A NaN, or an infinity that has no place in a sum, comes out as one, wherever it takes part."""
    inputs = problem(4, batch=1, keys=LENGTH, dtype=torch.float32)
    inputs[name][0, 1, 40] = bad
    options = {"weight": weight, "prior": prior, **({"times": irregular_times(4, LENGTH)} if timed else {})}
    output, log_precision = attend(inputs, "cpu", **options)
    affected = slice(40, 41) if name == "query" else slice(40, None)
    assert not bool(output[0, 1, affected].isfinite().all(-1).any())
    if name != "value":
        assert bool(log_precision[0, 1, affected].isnan().all())
    others = slice(0, 40) if name != "value" else slice(0, 0)  # 0 times NaN is NaN, in the dense computation too
    assert bool(output[0, 1, others].isfinite().all())
    assert bool(output[0, 0].isfinite().all())


def test_denormal_weights_are_flushed_and_the_mode_of_the_thread_stays():
    """A denormal number costs 100 cycles. A sum over values that all are denormal is 0, in the kernel alone."""
    inputs = problem(3, batch=1, keys=LENGTH, modes=4, dtype=torch.float32)
    least = torch.finfo(torch.float32).tiny
    inputs["value"] = torch.full_like(inputs["value"], least / 8)
    inputs["frequency"].zero_()
    output, _ = attend(inputs, "cpu")
    assert output.eq(0).all()
    assert float(torch.tensor(least) / 8) > 0
    assert (torch.full((10_000,), least) / 8).gt(0).all()
