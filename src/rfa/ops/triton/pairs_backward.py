"""The gradients of the pair-by-pair kernels: one sums over the keys of each query, one over the queries of each key.

A sum for M, u or C is later multiplied by times and cancels down to lags: tiles are added up in float64.
"""

from typing import no_type_check

import triton
import triton.language as tl

from .frames import TILE, frame_gradients, load_frame, load_path, serves
from .pairs import (
    SCALARS,
    gradient_product,
    load_log_sum,
    load_scalars,
    order_of,
    pair_gradients,
    pair_product,
    seen_pairs,
    worth,
)
from .tiles import COUNTS, LN2, turn_and_store


@triton.jit
@no_type_check
def signed_third(s, of_query, of_key):
    """The gradient of C at the query, through `-|C_i - C_j|` in bits; at the key it has the other sign."""
    apart = (of_query[4] - of_key[4]) + (of_query[5] - of_key[5])
    return tl.where(apart > 0.0, -LN2 * s, tl.where(apart < 0.0, LN2 * s, 0.0))


@triton.jit
@no_type_check
def path_gradients(of_decay, of_variance, decay, of_query, of_key, later, eta2, VARIANCE: tl.constexpr):
    """Gradients of M at the query, of u at the query and of u at the key, pair by pair, in float64.

    That of M at the key has the other sign. The sums are later multiplied by times, which may be 1e6 lags, and must
    cancel down to the lag. So terms of the order of u are formed in float64, and so is `1 - E^2` while it is small.
    """
    to_decay, to_later = -of_decay.to(tl.float64), of_variance.to(tl.float64)
    to_earlier = to_later
    if VARIANCE:
        high, low = tl.where(later, of_key[2], of_query[2]), tl.where(later, of_key[3], of_query[3])
        apart = (of_query[0].to(tl.float64) - of_key[0]) + (of_query[1].to(tl.float64) - of_key[1])
        near = decay > 0.7071
        less = 2.0 * tl.where(near, tl.abs(apart), 0.0)
        series = 1.0 - less * (1.0 / 6.0) * (1.0 - less * (1.0 / 7.0) * (1.0 - less * (1.0 / 8.0)))
        series = 1.0 - less * (1.0 / 3.0) * (1.0 - less * (1.0 / 4.0) * (1.0 - less * (1.0 / 5.0) * series))
        less = less * (1.0 - less * 0.5 * series)
        square = tl.where(near, 1.0 - less, (decay * decay).to(tl.float64))
        to_earlier = -to_later * square
        to_decay += 2.0 * to_earlier * (eta2.to(tl.float64) - (high.to(tl.float64) + low.to(tl.float64)))
    return (
        tl.where(later, to_decay, -to_decay), tl.where(later, to_later, to_earlier),
        tl.where(later, to_earlier, to_later),
    )  # fmt: skip


@triton.jit
@no_type_check
def sums_of(
    scalar, coefficient, freedom, square, variance, effective, power, added, THIRD: tl.constexpr, FIXED: tl.constexpr
):
    """The sums over a tile for each scalar of a head, in its place."""
    parts = tl.where(scalar == 0, tl.sum(tl.sum(coefficient, 1), 0), 0.0)
    parts += tl.where(scalar == 1, tl.sum(tl.sum(freedom, 1), 0), 0.0)
    parts += tl.where(scalar == 2, tl.sum(tl.sum(square, 1), 0), 0.0)
    parts += tl.where(scalar == 3, tl.sum(tl.sum(variance, 1), 0), 0.0)
    parts += tl.where(scalar == 4, tl.sum(tl.sum(effective, 1), 0), 0.0)
    if not THIRD:
        parts += tl.where(scalar == 5, tl.sum(tl.sum(power, 1), 0), 0.0)
    if FIXED:
        parts += tl.where(scalar == 6, tl.sum(tl.sum(added, 1), 0), 0.0)
    return parts.to(tl.float64)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def pairs_query_kernel(
    query, query_norm, key, value, key_norm, gradient, delta, log_sum, key_times, query_times, key_groups, query_groups,
    key_path, query_path, key_bias, scalars, key_frame, value_frame, numbers, good, cos, sin, query_gradient,
    path_gradient, sums, heads, queries, keys,
    row_length, key_length, row_blocks, path_batch, time_batch, phase_batch, phase_head,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCORE: tl.constexpr,
    GATE: tl.constexpr, THIRD: tl.constexpr, CAUSAL: tl.constexpr, GROUPS: tl.constexpr, TURN: tl.constexpr,
    PRIOR: tl.constexpr, PATH: tl.constexpr,
    FIXED: tl.constexpr, FRAME: tl.constexpr, QUICK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries; with PATH also of M, u and C at them, with PRIOR of the scalars, in parts."""
    block = row_blocks - 1 - tl.program_id(0) % row_blocks
    pair = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    path_row = tl.where(path_batch == 1, 0, batch) * heads + head
    time_row = tl.where(time_batch == 1, 0, batch)
    rows, channel, width = block * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    in_rows, padded = rows < queries, pair * row_length + rows
    q = tl.load(query + padded[:, None] * CHANNELS + channel[None, :])
    do = tl.load(gradient + padded[:, None] * WIDTH + width[None, :])
    q_norm, row_sum = tl.load(query_norm + padded)[:, None], load_log_sum(log_sum, padded, AXIS=1)
    row_delta = tl.load(delta + padded)[:, None]
    own = load_path(
        query_path, path_batch * heads * queries, path_row * queries + rows[:, None], in_rows[:, None],
        VARIANCE=SCORE != "dot_product", THIRD=THIRD,
    )  # fmt: skip
    of_head = load_scalars(scalars, head, heads, FIXED=FIXED)
    query_order = order_of(query_times, time_row * queries + rows, in_rows, -9223372036854775807)
    groups = rows
    if GROUPS:
        groups = tl.load(query_groups + batch * queries + rows, mask=in_rows, other=-2)
    of_dots, of_norm = tl.zeros([ROWS, CHANNELS], tl.float32), tl.zeros([ROWS], tl.float32)
    of_decay, of_variance, of_third = (
        tl.zeros([ROWS], tl.float64), tl.zeros([ROWS], tl.float64), tl.zeros([ROWS], tl.float64),
    )  # fmt: skip
    scalar, of_scalars = tl.arange(0, SCALARS), tl.zeros([SCALARS], tl.float64)
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
                v = tl.load(value_frame + at[:, None] * WIDTH + width[None, :])
                _, s, residual, variance, effective, coefficient, freedom, power = frame_gradients(
                    pair_product(q, tl.trans(k), QUICK=QUICK, FAST=FAST),
                pair_product(do, tl.trans(v), QUICK=QUICK, FAST=FAST),
                    of_key, of_row, row_sum, row_delta, of_head, GATE=GATE, THIRD=THIRD, PRIOR=PRIOR, QUICK=QUICK,
                )  # fmt: skip
                of_dots += gradient_product(residual * of_row[0], k, QUICK=QUICK, FAST=FAST)
                of_norm += tl.sum(residual, 1)
                if PATH and THIRD:
                    of_third += tl.sum(s * LN2, 1).to(tl.float64)
                if PRIOR:
                    square = variance * of_key[1] * of_key[1] * of_row[1]
                    added = variance * (of_row[5] + of_row[1] * of_key[2])
                    of_scalars += sums_of(
                        scalar, coefficient, freedom, square, variance, effective, power, added,
                        THIRD=THIRD, FIXED=True,
                    )  # fmt: skip
        elif worth(query_order, key_order, groups, of_keys, CAUSAL=CAUSAL, GROUPS=GROUPS):
            k = tl.load(key + at[:, None] * CHANNELS + channel[None, :])
            v = tl.load(value + at[:, None] * WIDTH + width[None, :])
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
            found = pair_gradients(
                pair_product(q, tl.trans(k), QUICK=QUICK, FAST=FAST),
                pair_product(do, tl.trans(v), QUICK=QUICK, FAST=FAST),
                q_norm, tl.load(key_norm + at)[None, :], row_sum, row_delta, own, others, later, seen, bias, of_head,
                SCORE=SCORE, GATE=GATE, THIRD=THIRD, CAUSAL=CAUSAL, QUICK=QUICK,
            )  # fmt: skip
            _, s, residual, dot, decay, by_decay, variance, coefficient, freedom, power, effective, added = found
            of_dots += gradient_product(dot, k, QUICK=QUICK, FAST=FAST)
            if SCORE != "dot_product":
                of_norm += tl.sum(residual, 1)
            if PATH and not FIXED:
                to_decay, to_variance, _ = path_gradients(
                    by_decay, variance, decay, own, others, later, of_head[2], VARIANCE=SCORE != "dot_product",
                )  # fmt: skip
                of_decay += tl.sum(to_decay, 1)
                if SCORE != "dot_product":
                    of_variance += tl.sum(to_variance, 1)
            if PATH and THIRD:
                of_third += tl.sum(signed_third(s, own, others).to(tl.float64), 1)
            if PRIOR:
                if SCORE == "dot_product":
                    of_scalars += tl.where(scalar == 0, tl.sum(tl.sum(coefficient, 1), 0), 0.0).to(tl.float64)
                else:
                    of_scalars += sums_of(
                        scalar, coefficient, freedom, decay * decay * variance, variance, effective, power,
                        variance * added, THIRD=THIRD, FIXED=FIXED,
                    )  # fmt: skip
    if SCORE != "dot_product":
        of_dots += (2.0 * of_norm)[:, None] * q.to(tl.float32)
    if TURN:
        cos += batch * phase_batch + head * phase_head
        sin += batch * phase_batch + head * phase_head
    turn_and_store(
        of_dots, query_gradient, pair * queries + rows, rows, in_rows, cos, sin, WIDTH=CHANNELS, TURN=TURN,
    )  # fmt: skip
    if PRIOR:
        tl.store(sums + (pair * row_blocks + block) * SCALARS + scalar, of_scalars)
    if PATH:
        part = (tl.num_programs(0) // row_blocks).to(tl.int64) * queries
        at_path = path_gradient + pair * queries + rows
        tl.store(at_path, of_decay, mask=in_rows)
        tl.store(at_path + part, of_variance, mask=in_rows)
        if THIRD:
            tl.store(at_path + 2 * part, of_third, mask=in_rows)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def pairs_key_kernel(
    query, query_norm, key, value, key_norm, gradient, delta, log_sum, key_times, query_times, key_groups, query_groups,
    key_path, query_path, key_bias, scalars, key_frame, value_frame, numbers, good, cos, sin, key_gradient,
    value_gradient, path_gradient, bias_gradient,
    heads, queries, keys, row_length, key_length, key_blocks, path_batch, time_batch, phase_batch, phase_head,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCORE: tl.constexpr,
    GATE: tl.constexpr, THIRD: tl.constexpr, CAUSAL: tl.constexpr, GROUPS: tl.constexpr, TURN: tl.constexpr,
    TURN_VALUES: tl.constexpr, PATH: tl.constexpr,
    FIXED: tl.constexpr, FRAME: tl.constexpr, QUICK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values; with PATH also of M, u, C and the bias at them."""
    block = tl.program_id(0) % key_blocks
    pair = (tl.program_id(0) // key_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    path_row = tl.where(path_batch == 1, 0, batch) * heads + head
    time_row = tl.where(time_batch == 1, 0, batch)
    columns, channel, width = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    in_columns, padded = columns < keys, pair * key_length + columns
    k = tl.load(key + padded[:, None] * CHANNELS + channel[None, :])
    v = tl.load(value + padded[:, None] * WIDTH + width[None, :])
    k_norm, present = tl.load(key_norm + padded)[:, None], in_columns
    groups = columns
    if GROUPS:
        groups = tl.load(key_groups + batch * keys + columns, mask=in_columns, other=-1)
        present &= groups >= 0
    own = load_path(
        key_path, path_batch * heads * keys, path_row * keys + columns[:, None], in_columns[:, None],
        VARIANCE=SCORE != "dot_product", THIRD=THIRD,
    )  # fmt: skip
    bias = 0.0
    if THIRD:
        bias = tl.load(key_bias + path_row * keys + columns, mask=in_columns, other=0.0)[:, None]
    of_head = load_scalars(scalars, head, heads, FIXED=FIXED)
    key_order = order_of(key_times, time_row * keys + columns, present, 9223372036854775807)
    of_dots, of_norm = tl.zeros([COLUMNS, CHANNELS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    of_value, of_bias = tl.zeros([COLUMNS, WIDTH], tl.float32), tl.zeros([COLUMNS], tl.float32)
    of_decay, of_variance, of_third = (
        tl.zeros([COLUMNS], tl.float64), tl.zeros([COLUMNS], tl.float64), tl.zeros([COLUMNS], tl.float64),
    )  # fmt: skip
    of_frame, near = tl.zeros([COLUMNS], tl.float32), tl.full([COLUMNS], 1.0, tl.float32)
    frame_k, frame_v = k, v
    if FRAME:  # sums are those of the gradients of k' and v': -2 f times these are those of k
        near = tl.load(numbers + (tl.num_programs(0) // key_blocks).to(tl.int64) * key_length + padded)
        frame_k = tl.load(key_frame + padded[:, None] * CHANNELS + channel[None, :])
        frame_v = tl.load(value_frame + padded[:, None] * WIDTH + width[None, :])
    for start in range(0, queries, ROWS):
        rows = start + tl.arange(0, ROWS)
        in_rows, of_rows = rows < queries, rows
        if GROUPS:
            of_rows = tl.load(query_groups + batch * queries + rows, mask=in_rows, other=-2)
        query_order = order_of(query_times, time_row * queries + rows, in_rows, -9223372036854775807)
        in_frame = False
        if FRAME:
            tile = good + (pair * key_length + block * COLUMNS) // TILE
            in_frame = serves(tile, query_order, of_rows, groups, GROUPS=GROUPS)
        at = pair * row_length + rows
        if in_frame:
            if FRAME:
                others = load_path(
                    query_path, path_batch * heads * queries, path_row * queries + rows[None, :], in_rows[None, :],
                    VARIANCE=True, THIRD=THIRD,
                )  # fmt: skip
                of_row, of_key = load_frame(
                    others, tl.load(query_norm + at)[None, :], key_path + path_row * keys, path_batch * heads * keys,
                    block * COLUMNS, numbers + pair * key_length,
                    (tl.num_programs(0) // key_blocks).to(tl.int64) * key_length, of_head,
                    AXIS=1, COLUMNS=COLUMNS, GATE=GATE, THIRD=THIRD,
                )  # fmt: skip
                q = tl.load(query + at[:, None] * CHANNELS + channel[None, :])
                do = tl.load(gradient + at[:, None] * WIDTH + width[None, :])
                weight, s, residual, _, _, _, _, _ = frame_gradients(
                    pair_product(frame_k, tl.trans(q), QUICK=QUICK, FAST=FAST),
                    pair_product(frame_v, tl.trans(do), QUICK=QUICK, FAST=FAST), of_key, of_row,
                    load_log_sum(log_sum, at, AXIS=0), tl.load(delta + at)[None, :], of_head,
                    GATE=GATE, THIRD=THIRD, PRIOR=False, QUICK=QUICK,
                )  # fmt: skip
                of_dots += gradient_product(residual * of_row[0], q, QUICK=QUICK, FAST=FAST)
                of_value += gradient_product(weight, do, QUICK=QUICK, FAST=FAST)
                of_frame += tl.sum(residual * of_row[1], 1)
                if PATH and THIRD:
                    of_third -= tl.sum(s * LN2, 1).to(tl.float64)
                    of_bias += tl.sum(s, 1)
        elif worth(query_order, key_order, of_rows, groups, CAUSAL=CAUSAL, GROUPS=GROUPS):
            q = tl.load(query + at[:, None] * CHANNELS + channel[None, :])
            do = tl.load(gradient + at[:, None] * WIDTH + width[None, :])
            later, seen = seen_pairs(
                query_order[None, :], key_order[:, None], in_rows[None, :], present[:, None], of_rows[None, :],
                groups[:, None], CAUSAL=CAUSAL, GROUPS=GROUPS,
            )  # fmt: skip
            others = load_path(
                query_path, path_batch * heads * queries, path_row * queries + rows[None, :], in_rows[None, :],
                VARIANCE=SCORE != "dot_product", THIRD=THIRD,
            )  # fmt: skip
            weight, s, residual, dot, decay, by_decay, variance, _, _, _, _, _ = pair_gradients(
                pair_product(k, tl.trans(q), QUICK=QUICK, FAST=FAST),
                pair_product(v, tl.trans(do), QUICK=QUICK, FAST=FAST),
                tl.load(query_norm + at)[None, :], k_norm, load_log_sum(log_sum, at, AXIS=0),
                tl.load(delta + at)[None, :], others, own, later, seen, bias, of_head,
                SCORE=SCORE, GATE=GATE, THIRD=THIRD, CAUSAL=CAUSAL, QUICK=QUICK,
            )  # fmt: skip
            if FRAME:
                dot, weight = dot * (-0.5 / near)[:, None], weight / near[:, None]
            of_dots += gradient_product(dot, q, QUICK=QUICK, FAST=FAST)
            of_value += gradient_product(weight, do, QUICK=QUICK, FAST=FAST)
            if SCORE != "dot_product":
                of_norm += tl.sum(residual * decay * decay, 1)
            if PATH and not FIXED:
                to_decay, _, to_variance = path_gradients(
                    by_decay, variance, decay, others, own, later, of_head[2], VARIANCE=SCORE != "dot_product",
                )  # fmt: skip
                of_decay -= tl.sum(to_decay, 1)
                if SCORE != "dot_product":
                    of_variance += tl.sum(to_variance, 1)
            if PATH and THIRD:
                of_third -= tl.sum(signed_third(s, others, own).to(tl.float64), 1)
                of_bias += tl.sum(s, 1)
    if FRAME:
        of_dots, of_value = of_dots * (-2.0 * near)[:, None], of_value * near[:, None]
        of_norm += of_frame * near * near
    if SCORE != "dot_product":
        of_dots += (2.0 * of_norm)[:, None] * k.to(tl.float32)
    if TURN:
        cos += batch * phase_batch + head * phase_head
        sin += batch * phase_batch + head * phase_head
    at_key = pair * keys + columns
    turn_and_store(of_dots, key_gradient, at_key, columns, in_columns, cos, sin, WIDTH=CHANNELS, TURN=TURN)
    turn_and_store(of_value, value_gradient, at_key, columns, in_columns, cos, sin, WIDTH=WIDTH, TURN=TURN_VALUES)
    if PATH:
        part = (tl.num_programs(0) // key_blocks).to(tl.int64) * keys
        tl.store(path_gradient + at_key, of_decay, mask=in_columns)
        tl.store(path_gradient + part + at_key, of_variance, mask=in_columns)
        if THIRD:
            tl.store(path_gradient + 2 * part + at_key, of_third, mask=in_columns)
            tl.store(bias_gradient + at_key, of_bias * LN2, mask=in_columns)
