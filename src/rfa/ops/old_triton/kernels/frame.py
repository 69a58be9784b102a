"""Linear work around the attention: turn states into the common frame and back, and the rows' constants."""

from typing import no_type_check

import triton
import triton.language as tl

BITS = tl.constexpr(1.4426950408889634)  # a nat


@triton.jit
@no_type_check
def store_states(
    real, imaginary, target, row, mode, stored,
    MODES: tl.constexpr, INVERSE: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Store states as the target rounds them; returns squared norms, NaN of poisoned states."""
    real = real.to(target.dtype.element_ty)
    imaginary = imaginary.to(target.dtype.element_ty)
    if INVERSE:
        known = tl.sum(0.0 * real.to(tl.float32) + 0.0 * imaginary.to(tl.float32), 1) == 0.0
        real = tl.where(known[:, None], real, 0.0)
        imaginary = tl.where(known[:, None], imaginary, 0.0)
    index = row[:, None] * (2 * MODES) + mode[None, :]
    tl.store(target + index, real, mask=stored[:, None])
    tl.store(target + index + MODES, imaginary, mask=stored[:, None])
    # of the rounded states: a residual |q - E k|^2 is then negative by rounding at most
    real, imaginary = real.to(tl.float32), imaginary.to(tl.float32)
    squares = tl.sum(real * real + imaginary * imaginary, 1)
    if INVERSE and not KNOWN:
        squares = tl.where(known, squares, float("nan"))
    return squares


@triton.jit
@no_type_check
def frame_kernel(
    source,
    target,
    norm,
    cos,
    sin,
    groups,
    folded,
    columns,
    factors,
    constants,
    source_batch,
    source_head,
    source_time,
    source_channel,
    phase_batch,
    phase_head,
    phase_time,
    phase_mode,
    factor_batch,
    period,
    heads,
    length,
    blocks,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    INVERSE: tl.constexpr,
    GROUPS: tl.constexpr,
    FOLDED: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """Rotate states by the phase, or with INVERSE against it, into a contiguous tensor.

    Absent states, of group -1, become zero. On the way into the frame, which is INVERSE, so does a state that holds NaN
    or infinity, or that leaves the range of float16 by its rotation. `norm` gets the squared norms there, NaN for such
    states, or with KNOWN 0.

    With FOLDED, `folded` gets each state times the factor of its place in a period, and `columns`, where it is given,
    `-(|k'|^2 + C) / 2` of that state, with the constant C of the place.
    """
    block = tl.program_id(0) % blocks
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    time = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mode = tl.arange(0, MODES)
    stored = time < length
    present = stored
    if GROUPS:
        present &= tl.load(groups + batch * length + time, mask=present, other=-1) >= 0
    inside = present[:, None] & (mode < MODES)[None, :]

    start = source + batch * source_batch + head * source_head
    offsets = time[:, None] * source_time + mode[None, :] * source_channel
    real = tl.load(start + offsets, mask=inside, other=0.0).to(tl.float32)
    imaginary = tl.load(start + MODES * source_channel + offsets, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        phase = batch * phase_batch + head * phase_head + time[:, None] * phase_time + mode[None, :] * phase_mode
        c = tl.load(cos + phase, mask=inside, other=0.0)
        s = tl.load(sin + phase, mask=inside, other=0.0)
        if INVERSE:
            s = -s
        real, imaginary = c * real - s * imaginary, s * real + c * imaginary

    row = pair * length + time
    squares = store_states(real, imaginary, target, row, mode, stored, MODES=MODES, INVERSE=INVERSE, KNOWN=KNOWN)
    if INVERSE:
        tl.store(norm + row, squares, mask=stored)
    if FOLDED:
        place = batch * factor_batch + head * period + time % period
        factor = tl.load(factors + place, mask=stored, other=0.0)[:, None]
        squares = store_states(
            real * factor, imaginary * factor, folded, row, mode, stored,
            MODES=MODES, INVERSE=INVERSE, KNOWN=KNOWN,
        )  # fmt: skip
        if columns is not None:
            constant = tl.load(constants + place, mask=stored, other=0.0)
            tl.store(columns + row, -0.5 * (squares + constant), mask=stored)


@triton.jit
@no_type_check
def delta_kernel(
    grad_out,
    out,
    grad_log_sum,
    log_sum,
    high,
    rest,
    delta,
    delta_rest,
    grad_batch,
    grad_head,
    grad_time,
    grad_channel,
    heads,
    length,
    blocks,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The terms that a row subtracts in the gradients of its scores, in nats: `<dout_i, out_i>`, `-log2(e) dlog_sum_i`.

    They are kept apart, because float32 would lose the smaller one in their sum. The log2 sum is given as two float32.
    It is NaN where the row holds NaN, and infinite where the row has no incoming gradient: its weights are then zero.
    """
    block = tl.program_id(0) % blocks
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    time = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    present = time < length
    inside = present[:, None] & (channel < CHANNELS)[None, :]
    offsets = batch * grad_batch + head * grad_head + time[:, None] * grad_time + channel[None, :] * grad_channel
    gradient = tl.load(grad_out + offsets, mask=inside, other=0.0).to(tl.float32)
    row = pair * length + time
    estimate = tl.load(out + row[:, None] * CHANNELS + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.load(log_sum + row, mask=present, other=0.0)
    through_sum = tl.load(grad_log_sum + row, mask=present, other=0.0)
    through_sum = tl.where(total > float("-inf"), through_sum, 0.0)  # log 0 has no gradient
    asked = (tl.max(tl.where(gradient != 0.0, 1, 0), 1) > 0) | (through_sum != 0.0)
    inner = tl.sum(gradient * estimate, 1)
    known = 0.0 * inner + 0.0 * through_sum == 0.0
    total = tl.where(known, total, float("nan"))
    total = tl.where(asked, total, float("inf"))
    first = total.to(tl.float32)
    left = tl.where(0.0 * first == 0.0, (total - first.to(tl.float64)).to(tl.float32), 0.0)
    tl.store(high + row, first, mask=present)
    tl.store(rest + row, left, mask=present)
    tl.store(delta + row, tl.where(known, inner, 0.0), mask=present)
    tl.store(delta_rest + row, tl.where(known, -through_sum * BITS, 0.0), mask=present)
