"""What must not change the result: the clock's origin and unit, padding, batching, the future, packing."""

import pytest
import torch
from cover import cover

from .problems import PRIORS, assert_same, attend, irregular_times, problem, with_gradients

# The same float64 arithmetic in another order or at another offset, on numbers of order one.
ROUNDING = 1e-11
# A shift of all times by 1e6 changes nothing beyond this, relative; in float32.
SHIFTED = 1e-4


@cover(
    1, dtype=[torch.float32, torch.float64], prior=PRIORS, causal=[True, False], lead=[(), (2,)], asked=[False, True]
)
def test_time_shift(asked, lead, causal, prior, dtype, backend):
    """Inputs in float32; irregular times in float64, or in float32 on its grid of 1/16 around 1e6. Gradients too."""
    inputs = problem(1, keys=9, dtype=torch.float32)
    times = irregular_times(1, *lead, 9)
    times = ((times * 16).round() / 16).to(dtype) if dtype == torch.float32 else times
    places = {"times": times, "query_times": times.flip(-1) + 0.0625} if asked else {"times": times}
    here, there, back = (
        with_gradients(inputs, backend, causal=causal, prior=prior, **{n: t + shift for n, t in places.items()})
        for shift in (0.0, 1e6, -1e6)
    )
    assert here["output"].dtype == torch.float32
    for name, wanted in here.items():
        for found in (there[name], back[name]):
            error = (found - wanted).masked_fill(wanted.isinf() & (found == wanted), 0.0).abs().max()
            assert error <= SHIFTED * (1 + wanted[wanted.isfinite()].abs().max()), name


@cover(1, prior=PRIORS, causal=[True, False], side=["left", "both"])
def test_padding_with_masked_garbage(side, causal, prior, backend):
    inputs = problem(6, keys=5)
    left, right = (3 if side != "right" else 0), (4 if side != "left" else 0)
    times = irregular_times(6, 5)
    expected = attend(inputs, backend, times=times, query_times=times, causal=causal, prior=prior)
    g = torch.Generator().manual_seed(6)

    def garbage(length):
        return 1e4 * torch.randn(2, 2, length, 6, generator=g, dtype=torch.float64)

    padded = {n: torch.cat([garbage(left), inputs[n], garbage(right)], 2) for n in ("key", "value")}
    clock = torch.cat([torch.full((left,), 77.0), times, torch.zeros(right)]).double()  # nothing increasing about it
    mask = torch.zeros(2, left + 5 + right, dtype=torch.bool)
    mask[:, left : left + 5] = True
    options = {"times": clock, "query_times": times, "key_mask": mask, "causal": causal, "prior": prior}
    assert_same(attend({**inputs, **padded}, backend, **options), expected, backend, ROUNDING)


@cover(1, prior=PRIORS, asked=[False, True])
def test_whole_numbers_of_any_size_keep_their_differences(asked, prior, backend):
    """Nanoseconds since 1970 (1.8e18): a float64 would make neighbours equal, and let a query see its future."""
    inputs, steps = problem(20, keys=7), 10 * torch.arange(7)
    for name in ("decay", "process_noise"):
        inputs[name] = inputs[name] / 10
    for origin in (2**60, -(2**60)):
        near = {"query_times": steps + 3} if asked else {}
        far = {"query_times": origin + steps + 3} if asked else {}
        first = attend(inputs, backend, times=steps, prior=prior, **near)
        second = attend(inputs, backend, times=origin + steps, prior=prior, **far)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_times_that_a_float_cannot_tell_apart_are_refused(backend):
    inputs = problem(21, keys=4)
    with pytest.raises(ValueError, match=r"times: .* expected strictly increasing"):
        attend(inputs, backend, times=2**60 + torch.arange(4), query_times=torch.arange(4.0, dtype=torch.float64))


@cover(1, prior=PRIORS, dtype=[torch.float32, torch.float64], where=[0, 3, 6], time=[-1e18, 1e18, 77.0])
def test_a_masked_key_may_carry_any_time(time, where, dtype, prior, backend):
    inputs, times = problem(22, keys=7, dtype=dtype), irregular_times(22, 7, dtype=dtype)
    mask = torch.arange(7).expand(2, 7) != where
    asked = {"query_times": times[-1] + torch.arange(7, dtype=dtype), "key_mask": mask, "prior": prior}
    expected = attend(inputs, backend, times=times, **asked)
    moved = times.clone()
    moved[where] = time
    for x, y in zip(attend(inputs, backend, times=moved, **asked), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=0)
