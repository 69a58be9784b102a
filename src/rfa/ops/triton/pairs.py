"""The kernels for any times: every number of a pair is formed from numbers of its key and of its query.

They serve what the lean kernels do not: times that are not uniform, content, dot products, exponential weights, both
directions, and gradients of the dynamics. With M, u, C of `rfa.ops.prior.SeparablePath`, for a query i and a key j, of
which l is the later and e the earlier,

    E     = exp(-|M_i - M_j|),    Sigma = (u_l - u_e) + u_e (1 - E^2) + eta^2 E^2 + sigma_0^2
    S     = Sigma + gamma^2, or 1 without the gate
    G     = S + W r,              r = |q|^2 + E (E |k|^2 - 2 q.k)
    z     = b - c log2(G / S)     student_t       z = b - c W r / S    exponential       z = b + c q.k    dot_product
    b     = -B log2 Sigma,        or key_bias_j - |C_i - C_j|

M, u and C come in float64 and are split into two float32, so that a difference keeps the digits of a short lag. FIXED
says that M and u have no gradient: then a seventh scalar, sigma^2, multiplies u.
"""

from typing import no_type_check

import triton
import triton.language as tl

from .frames import (
    LEAST_FLOOR,
    MOST_NORM,
    TILE,
    frame_keys,
    frame_scores,
    load_frame,
    load_path,
    one_less_exponential,
    serves,
)
from .prologue import store_block, turned_block
from .tiles import BITS, COUNTS, IEEE, LEAST, LN2, NONE, log2, product, turn_and_store

LEAST_OF_EXPONENTIAL = tl.constexpr(1.9673781396807392e-24)  # as `least_effective_variance`
SCALARS = tl.constexpr(8)  # c, W, eta^2, sigma_0^2, gamma^2, B, the factor of u, and one of no meaning


@triton.jit
@no_type_check
def pair_product(a, b, QUICK: tl.constexpr, FAST: tl.constexpr):
    """A matrix product in float32: half precisions on tensor cores, others in TF32 where QUICK, else exact."""
    if a.dtype == b.dtype and (not QUICK or a.dtype != tl.float32):
        return product(a, b, FAST=FAST, PRECISION=IEEE)
    else:
        return product(a.to(tl.float32), b.to(tl.float32), FAST=FAST)


@triton.jit
@no_type_check
def gradient_product(a, b, QUICK: tl.constexpr, FAST: tl.constexpr):
    """`pair_product` where a may be rounded as b: not to float16, whose range is too small."""
    return pair_product(a.to(b.dtype) if b.dtype == tl.bfloat16 else a, b, QUICK=QUICK, FAST=FAST)


@triton.jit
@no_type_check
def load_scalars(scalars, head, heads, FIXED: tl.constexpr):
    """c, W, eta^2, sigma_0^2, gamma^2, B and the factor of u of a head."""
    at, factor = scalars + head, 1.0
    if FIXED:
        factor = tl.load(at + 6 * heads).to(tl.float32)
    return (
        tl.load(at).to(tl.float32), tl.load(at + heads).to(tl.float32), tl.load(at + 2 * heads).to(tl.float32),
        tl.load(at + 3 * heads).to(tl.float32), tl.load(at + 4 * heads).to(tl.float32),
        tl.load(at + 5 * heads).to(tl.float32), factor,
    )  # fmt: skip


@triton.jit
@no_type_check
def order_of(times, at, mask, missing: tl.constexpr):
    """Times as integers of the same order: a GPU compares these faster than float64."""
    number = (tl.load(times + at, mask=mask, other=0.0) + 0.0).to(tl.int64, bitcast=True)
    number = tl.where(number < 0, number ^ 0x7FFFFFFFFFFFFFFF, number)
    return tl.where(mask, number, missing)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def pairs_states_kernel(
    query, key, value, key_groups, key_cos, key_sin, query_cos, query_sin, query_out, query_norms, key_out, value_out,
    key_norms, key_path, key_bias, scalars, key_times, key_frame, value_frame, numbers, good,
    path_batch, time_batch, limit, q_batch, q_head, q_row, q_channel, k_batch, k_head, k_row, k_channel, v_batch,
    v_head, v_row, v_channel,
    kp_batch, kp_head, qp_batch, qp_head, heads, queries, keys, row_length, key_length, query_programs, key_programs,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, TURN: tl.constexpr, TURN_VALUES: tl.constexpr,
    GATE: tl.constexpr, THIRD: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """States in the common frame, zeros where one is not finite or absent, and the squared norms of queries and keys.

    Norms come twice. In the second one NaN marks a state that is not finite; a third row marks such values.
    """
    program = tl.program_id(0) % (query_programs + key_programs)
    pair = (tl.program_id(0) // (query_programs + key_programs)).to(tl.int64)
    batch, head = pair // heads, pair % heads
    pairs = (tl.num_programs(0) // (query_programs + key_programs)).to(tl.int64)
    if program < query_programs:
        token = program * BLOCK + tl.arange(0, BLOCK)
        at = batch * q_batch + head * q_head + token.to(tl.int64) * q_row
        real, imaginary, known = turned_block(
            query, at, token, token < queries, batch * qp_batch + head * qp_head, query_cos, query_sin, q_channel,
            HALF=CHANNELS // 2, TURN=TURN,
        )  # fmt: skip
        place = pair * row_length + token
        norm = store_block(real, imaginary, query_out, place, HALF=CHANNELS // 2)
        tl.store(query_norms + place, norm)
        tl.store(query_norms + pairs * row_length + place, tl.where(known, norm, float("nan")))
    else:
        token = (program - query_programs) * BLOCK + tl.arange(0, BLOCK)
        present, phase, place = token < keys, batch * kp_batch + head * kp_head, pair * key_length + token
        group = token * 0
        if GROUPS:
            group = tl.load(key_groups + batch * keys + token, mask=present, other=-1)
            present &= group >= 0
        at = batch * k_batch + head * k_head + token.to(tl.int64) * k_row
        real, imaginary, known = turned_block(
            key, at, token, present, phase, key_cos, key_sin, k_channel, HALF=CHANNELS // 2, TURN=TURN,
        )  # fmt: skip
        norm = store_block(real, imaginary, key_out, place, HALF=CHANNELS // 2)
        at = batch * v_batch + head * v_head + token.to(tl.int64) * v_row
        real_value, imaginary_value, known_value = turned_block(
            value, at, token, present, phase, key_cos, key_sin, v_channel, HALF=WIDTH // 2, TURN=TURN_VALUES,
        )  # fmt: skip
        store_block(real_value, imaginary_value, value_out, place, HALF=WIDTH // 2)
        tl.store(key_norms + place, norm)
        tl.store(key_norms + pairs * key_length + place, tl.where(known, norm, float("nan")))
        tl.store(key_norms + 2 * pairs * key_length + place, tl.where(known_value, 0.0, float("nan")))
        if FRAME:
            row = (tl.where(path_batch == 1, 0, batch) * heads + head) * keys
            if THIRD:
                key_bias += row
            last = tl.minimum((program - query_programs + 1) * BLOCK, keys) - 1
            _, freedom, eta2, floor, _, _, factor = load_scalars(scalars, head, heads, FIXED=True)
            counts = present & known & known_value & (group == tl.max(group, 0))
            counts &= norm < tl.where(floor >= LEAST_FLOOR, MOST_NORM, 0.0)
            decay, added, third, served = frame_keys(
                key_path + row, key_bias, path_batch * heads * keys, token, last, counts, limit, THIRD=THIRD,
            )  # fmt: skip
            twice, once = (-2.0 * decay)[:, None], decay[:, None]
            number = 0.25 * store_block(real * twice, imaginary * twice, key_frame, place, HALF=CHANNELS // 2)
            store_block(real_value * once, imaginary_value * once, value_frame, place, HALF=WIDTH // 2)
            if GATE:
                number += (factor * added + eta2 * decay * decay) / freedom
            part = pairs * key_length
            tl.store(numbers + place, number)
            tl.store(numbers + part + place, decay)
            tl.store(numbers + 2 * part + place, added)
            if THIRD:
                tl.store(numbers + 3 * part + place, third)
            time = (tl.where(time_batch == 1, 0, batch) * keys) + last
            newest = order_of(key_times, time, served, 9223372036854775807)
            tl.store(good + pair * key_programs + (program - query_programs), newest)


@triton.jit
@no_type_check
def pair_prior(
    of_query, of_key, later, key_bias, scalars,
    SCORE: tl.constexpr, GATE: tl.constexpr, THIRD: tl.constexpr, CAUSAL: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """E, b, Sigma, `Sigma + gamma^2`, S, and what the factor of u multiplies.

    A causal pair whose query is earlier takes no part: any numbers do.
    """
    _, _, eta2, floor, gamma2, power, factor = scalars
    apart = (of_query[0] - of_key[0]) + (of_query[1] - of_key[1])
    apart = tl.maximum(apart, 0.0) if CAUSAL else tl.abs(apart)
    decay = tl.exp2(apart * -BITS)
    variance, effective, divisor, added = decay, decay, decay, decay
    if SCORE != "dot_product":
        added = (of_query[2] - of_key[2]) + (of_query[3] - of_key[3])
        earlier = of_key[2] + tl.zeros_like(decay)
        if not CAUSAL:
            added, earlier = tl.where(later, added, -added), tl.where(later, earlier, of_query[2])
        square = decay * decay
        added = added + earlier * one_less_exponential(2.0 * apart, square)
        variance = factor * added + (eta2 * square + floor)
        if CAUSAL:
            variance = tl.where(later, variance, eta2 + floor)
        effective = variance + gamma2
        divisor = tl.zeros_like(decay) + 1.0
        if GATE:
            divisor = tl.maximum(effective, LEAST_OF_EXPONENTIAL if SCORE == "exponential" else LEAST)
    if THIRD:
        bias = key_bias - tl.abs((of_query[4] - of_key[4]) + (of_query[5] - of_key[5]))
    else:
        bias = -power * log2(tl.maximum(variance, LEAST), FAST=QUICK)
    return decay, bias, variance, effective, divisor, added


@triton.jit
@no_type_check
def pair_score(
    dot, query_norm, key_norm, decay, bias, divisor, scalars,
    SCORE: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """z in bits, what c multiplies in it, r and G."""
    coefficient, freedom = scalars[0], scalars[1]
    residual, total = dot, dot
    if SCORE == "dot_product":
        evidence = -dot
        bias += 0.0 * (query_norm + key_norm)  # NaN where either norm is
    else:
        residual = query_norm + decay * (decay * key_norm - 2.0 * dot)
        total = divisor + freedom * tl.maximum(residual, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if SCORE == "student_t":
            evidence = log2(total, FAST=QUICK) - log2(divisor, FAST=QUICK)
            if not QUICK:  # c may be large
                near = total < divisor * 1048576.0
                ratio = tl.where(near, freedom * residual, 0.0) / divisor
                one_more = 1.0 + tl.maximum(ratio, 0.0)
                precise = tl.log2(one_more) + (ratio - (one_more - 1.0)) * BITS / one_more
                evidence = tl.where(near, tl.where(ratio > 0.0, precise, 0.0), evidence)
        else:
            evidence = tl.maximum(freedom * residual / divisor, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return bias - coefficient * evidence, evidence, residual, total


@triton.jit
@no_type_check
def pair_gradients(
    dot, through, query_norm, key_norm, log_sum, delta, of_query, of_key, later, seen, key_bias, scalars,
    SCORE: tl.constexpr, GATE: tl.constexpr, THIRD: tl.constexpr, CAUSAL: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """What the gradients of a pair are made from; `through` is `dout.v`.

    Returns `A E`; s, the gradient of the score in nats; those of r and of q.k with all else held; E; those of E
    (times E, without Sigma) and of Sigma; those of c, W, B and gamma^2; and what the factor of u multiplies.
    """
    coefficient, freedom, _, _, _, power, _ = scalars
    decay, bias, variance, effective, divisor, added = pair_prior(
        of_query, of_key, later, key_bias, scalars, SCORE=SCORE, GATE=GATE, THIRD=THIRD, CAUSAL=CAUSAL, QUICK=QUICK,
    )  # fmt: skip
    z, evidence, residual, total = pair_score(
        dot, query_norm, key_norm, decay, bias, divisor, scalars, SCORE=SCORE, QUICK=QUICK,
    )  # fmt: skip
    weight = tl.exp2(tl.where(seen, (z - log_sum[0]) - log_sum[1], NONE))
    s = weight * (decay * through - delta)
    of_decay = weight * through
    of_residual, of_variance, of_freedom, of_power, of_effective = s, s, s, s, s
    if SCORE == "dot_product":
        of_dot = coefficient * LN2 * s
    else:
        known = (residual > 0.0) | (query_norm == 0.0)  # where r is 0, q - E k consists of rounding alone
        residual = tl.maximum(residual, 0.0)
        share = coefficient * s / total if SCORE == "student_t" else coefficient * LN2 * s / divisor
        of_freedom = -share * residual
        of_residual = tl.where(known, -share * freedom, 0.0)
        of_dot = -2.0 * decay * of_residual
        of_decay += 2.0 * of_residual * (decay * key_norm - dot)
        if SCORE == "student_t":  # in this order nothing overflows, and a pair without weight has no NaN
            of_effective = coefficient * s * (freedom * residual / total) / divisor
        else:
            of_effective = share * (freedom * residual) / divisor
        least = LEAST_OF_EXPONENTIAL if SCORE == "exponential" else LEAST
        of_effective = tl.where(effective >= least, of_effective, 0.0) if GATE else tl.zeros_like(s)
        of_variance = of_effective
        if not THIRD:
            of_variance -= tl.where(variance >= LEAST, power * s / tl.maximum(variance, LEAST), 0.0)
            of_power = -LN2 * s * log2(tl.maximum(variance, LEAST), FAST=QUICK)
    of_coefficient = -LN2 * s * evidence
    return (
        weight * decay, s, of_residual, of_dot, decay, of_decay * decay, of_variance, of_coefficient, of_freedom,
        of_power, of_effective, added,
    )  # fmt: skip


@triton.jit
@no_type_check
def load_log_sum(log_sum, at, AXIS: tl.constexpr):
    """The log sum as two float32 with an axis more; infinity and 0 for infinity, which marks a row without a part."""
    number = tl.load(log_sum + at)
    high = number.to(tl.float32)
    low = tl.where(high == float("inf"), 0.0, (number - high.to(tl.float64)).to(tl.float32))
    return tl.expand_dims(high, AXIS), tl.expand_dims(low, AXIS)


@triton.jit
@no_type_check
def worth(query_order, key_order, query_groups, key_groups, CAUSAL: tl.constexpr, GROUPS: tl.constexpr):
    """Whether a pair of a block of queries and a block of keys may take part."""
    found = True
    if CAUSAL:
        found = tl.max(query_order, 0) >= tl.min(key_order, 0)
    if GROUPS:
        found &= tl.max(key_groups, 0) >= tl.min(query_groups, 0)
        found &= tl.min(tl.where(key_groups >= 0, key_groups, 2147483647), 0) <= tl.max(query_groups, 0)
    return found


@triton.jit
@no_type_check
def seen_pairs(
    query_order, key_order, in_rows, present, query_groups, key_groups, CAUSAL: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Whether the query is as late as the key, and whether the pair takes part. All broadcast to the tile."""
    later = query_order >= key_order
    seen = present & in_rows
    if CAUSAL:
        seen &= later
    if GROUPS:
        seen &= query_groups == key_groups
    return later, seen


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def pairs_forward_kernel(
    query, query_norm, key, value, key_norm, value_mark, key_times, query_times, key_groups, query_groups, key_path,
    query_path, key_bias, scalars, key_frame, value_frame, numbers, good, cos, sin, out, log_sum, heads, queries, keys,
    row_length, key_length, row_blocks, path_batch, time_batch, phase_batch, phase_head,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCORE: tl.constexpr,
    GATE: tl.constexpr, THIRD: tl.constexpr, CAUSAL: tl.constexpr, GROUPS: tl.constexpr, TURN: tl.constexpr,
    FIXED: tl.constexpr, FRAME: tl.constexpr, QUICK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The estimate and `log2 sum_j 2^z` of a block of rows."""
    block = row_blocks - 1 - tl.program_id(0) % row_blocks  # the longest first
    pair = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    path_row = tl.where(path_batch == 1, 0, batch) * heads + head
    time_row = tl.where(time_batch == 1, 0, batch)
    rows, channel, width = block * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    in_rows, padded = rows < queries, pair * row_length + rows
    q = tl.load(query + padded[:, None] * CHANNELS + channel[None, :])
    q_norm = tl.load(query_norm + padded)[:, None]
    own = load_path(
        query_path, path_batch * heads * queries, path_row * queries + rows[:, None], in_rows[:, None],
        VARIANCE=SCORE != "dot_product", THIRD=THIRD,
    )  # fmt: skip
    of_head = load_scalars(scalars, head, heads, FIXED=FIXED)
    query_order = order_of(query_times, time_row * queries + rows, in_rows, -9223372036854775807)
    groups = rows
    if GROUPS:
        groups = tl.load(query_groups + batch * queries + rows, mask=in_rows, other=-2)
    highest = tl.full([ROWS], NONE, tl.float32)
    total, estimate = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    spoiled = tl.zeros([ROWS], tl.float32)  # NaN where a row sees a value that is not finite: its log sum is a number
    for start in range(0, keys, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        present, of_keys = columns < keys, columns
        if GROUPS:
            of_keys = tl.load(key_groups + batch * keys + columns, mask=present, other=-1)
            present &= of_keys >= 0
        key_order = order_of(key_times, time_row * keys + columns, present, 9223372036854775807)
        in_frame = False
        if FRAME:
            in_frame = serves(good + (pair * key_length + start) // TILE, query_order, groups, of_keys, GROUPS=GROUPS)
        at = pair * key_length + columns
        if in_frame:
            if FRAME:
                of_row, of_key = load_frame(
                    own, q_norm, key_path + path_row * keys, path_batch * heads * keys, start,
                    numbers + pair * key_length, (tl.num_programs(0) // row_blocks).to(tl.int64) * key_length, of_head,
                    AXIS=0, COLUMNS=COLUMNS, GATE=GATE, THIRD=THIRD,
                )  # fmt: skip
                k = tl.load(key_frame + at[:, None] * CHANNELS + channel[None, :])
                z, _, _, _, _ = frame_scores(
                    pair_product(q, tl.trans(k), QUICK=QUICK, FAST=FAST), of_key, of_row, of_head,
                    GATE=GATE, THIRD=THIRD, QUICK=QUICK,
                )  # fmt: skip
                z += of_row[4]
                higher = tl.maximum(highest, tl.max(z, 1))
                weight = tl.exp2(z - higher[:, None])
                rescale = tl.exp2(highest - higher)
                v = tl.load(value_frame + at[:, None] * WIDTH + width[None, :])
                total = total * rescale + tl.sum(weight, 1)
                estimate = estimate * rescale[:, None] + pair_product(weight * of_row[0], v, QUICK=QUICK, FAST=FAST)
                highest = higher
        elif worth(query_order, key_order, groups, of_keys, CAUSAL=CAUSAL, GROUPS=GROUPS):
            k = tl.load(key + at[:, None] * CHANNELS + channel[None, :])
            later, seen = seen_pairs(
                query_order[:, None], key_order[None, :], in_rows[:, None], present[None, :], groups[:, None],
                of_keys[None, :], CAUSAL=CAUSAL, GROUPS=GROUPS,
            )  # fmt: skip
            others = load_path(
                key_path, path_batch * heads * keys, path_row * keys + columns[None, :], present[None, :],
                VARIANCE=SCORE != "dot_product", THIRD=THIRD,
            )  # fmt: skip
            bias = 0.0
            if THIRD:
                bias = tl.load(key_bias + path_row * keys + columns, mask=present, other=0.0)[None, :]
            decay, b, _, _, divisor, _ = pair_prior(
                own, others, later, bias, of_head, SCORE=SCORE, GATE=GATE, THIRD=THIRD, CAUSAL=CAUSAL, QUICK=QUICK,
            )  # fmt: skip
            z, _, _, _ = pair_score(
                pair_product(q, tl.trans(k), QUICK=QUICK, FAST=FAST), q_norm, tl.load(key_norm + at)[None, :], decay, b,
                divisor, of_head, SCORE=SCORE, QUICK=QUICK,
            )  # fmt: skip
            z = tl.where(seen, z, NONE)
            higher = tl.maximum(highest, tl.max(z, 1))
            weight = tl.where(seen, tl.exp2(z - higher[:, None]), 0.0)
            rescale = tl.exp2(highest - higher)
            v = tl.load(value + at[:, None] * WIDTH + width[None, :])
            total = total * rescale + tl.sum(weight, 1)
            estimate = estimate * rescale[:, None] + pair_product(weight * decay, v, QUICK=QUICK, FAST=FAST)
            highest = higher
            spoiled += tl.sum(tl.where(seen, tl.load(value_mark + at)[None, :], 0.0), 1)
    some = total != 0.0  # NaN too
    total = tl.where(some, total, 1.0)
    logarithm = highest.to(tl.float64) + tl.log2(total).to(tl.float64)  # of scores that may be large
    tl.store(log_sum + pair * queries + rows, tl.where(some, logarithm, float("-inf")), mask=in_rows)
    if TURN:
        cos += batch * phase_batch + head * phase_head
        sin += batch * phase_batch + head * phase_head
    estimate = estimate / total[:, None] + spoiled[:, None]
    turn_and_store(estimate, out, pair * queries + rows, rows, in_rows, cos, sin, WIDTH=WIDTH, TURN=TURN)
