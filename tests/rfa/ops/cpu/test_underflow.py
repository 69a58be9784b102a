"""The bound that stands in for a row's maximum: rows far below it, and sums of the smallest numbers."""

import torch
from cover import cover

from ..problems import PRIORS, WEIGHTS, assert_same, attend, irregular_times, problem, with_gradients

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
    learned, exact = ("value", "inverse_temperature"), {n: x.double() for n, x in inputs.items()}
    expected, dense, found = (
        with_gradients(given, backend, learned, **options)
        for given, backend in ((exact, "reference"), (inputs, "reference"), (inputs, "cpu"))
    )
    for name, wanted in expected.items():  # as good as the dense computation in float32: other orders of the same sums
        error, of_dense = ((x[name].double() - wanted).abs().max() for x in (found, dense))
        assert error <= 4 * of_dense + 1e-5 * wanted.abs().max(), name
    near = [i for i in range(LENGTH) if i not in ROWS]
    for found, expected in zip(attend(inputs, "cpu", **options), attend(exact, "reference", **options), strict=True):
        # float32 scores of up to 1e3 bits, of which the neighbours know nothing
        assert_same(found[:, :, near].double(), expected[:, :, near], "cpu", 1e-4)


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
