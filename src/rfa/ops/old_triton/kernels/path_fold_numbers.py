"""What folded tiles read of a path: numbers of keys, queries and edges, and which blocks fold. See `path_folds.py`."""

from typing import no_type_check

import triton
import triton.language as tl

from .fold_tables import largest_norm

FAR = tl.constexpr(2147483647)  # later than every key


@triton.jit
@no_type_check
def path_numbers_kernel(
    key_path, query_path, key_bias, scalars,
    factors, constants, of_keys, of_queries,  # results
    rows, heads, keys, queries, blocks,
    FOLD: tl.constexpr, RICCATI: tl.constexpr,
):  # fmt: skip
    """One program for a block of keys and a block of queries of a head; `rows` is the paths' batch times heads.

    With M, u and C of the path, b the last key of a key's block and a the first query of a query's block:

        F = exp(M_j - M_b)     V_j = u_b - F^2 (u_j - eta^2)     C_b - C_j + key_bias
        E = exp(M_a - M_i)     V_i = u_i - E^2 u_a               C_i - C_a
    """
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    head = row % heads
    place = block * FOLD + tl.arange(0, FOLD)
    inside, edge = place < keys, tl.minimum(block * FOLD + FOLD - 1, keys - 1)
    at_keys, u_at_keys = key_path + row * keys, key_path + (row + rows) * keys
    to_edge = tl.load(at_keys + edge) - tl.load(at_keys + place, mask=inside, other=0.0)
    factor = tl.exp(-tl.where(to_edge < 0.0, 0.0, to_edge))
    eta2 = tl.load(scalars + 2 * heads + head).to(tl.float64)
    own = tl.load(u_at_keys + place, mask=inside, other=0.0)
    variance = tl.load(u_at_keys + edge) - factor * factor * (own - eta2)
    variance = tl.where(variance < 0.0, 0.0, variance)
    inverse_freedom = tl.load(scalars + heads + head).to(tl.float64)
    parts: tl.constexpr = 2 if RICCATI else 1
    tl.store(factors + row * keys + place, factor.to(tl.float32), mask=inside)
    tl.store(constants + row * keys + place, (variance / inverse_freedom).to(tl.float32), mask=inside)
    result = of_keys + row * parts * keys + place
    tl.store(result, variance.to(tl.float32), mask=inside)
    if RICCATI:
        c_at_keys = key_path + (row + 2 * rows) * keys
        difference = tl.load(c_at_keys + edge) - tl.load(c_at_keys + place, mask=inside, other=0.0)
        bias = difference + tl.load(key_bias + row * keys + place, mask=inside, other=0.0)
        tl.store(result + keys, bias.to(tl.float32), mask=inside)

    inside, edge = place < queries, tl.minimum(block * FOLD, queries - 1)
    at_queries, u_at_queries = query_path + row * queries, query_path + (row + rows) * queries
    from_edge = tl.load(at_queries + place, mask=inside, other=0.0) - tl.load(at_queries + edge)
    decay = tl.exp(-tl.where(from_edge < 0.0, 0.0, from_edge))
    own = tl.load(u_at_queries + place, mask=inside, other=0.0)
    variance = own - decay * decay * tl.load(u_at_queries + edge)
    result = of_queries + row * (parts + 1) * queries + place
    tl.store(result, decay.to(tl.float32), mask=inside)
    tl.store(result + queries, variance.to(tl.float32), mask=inside)
    if RICCATI:
        c_at_queries = query_path + (row + 2 * rows) * queries
        difference = tl.load(c_at_queries + place, mask=inside, other=0.0) - tl.load(c_at_queries + edge)
        tl.store(result + 2 * queries, difference.to(tl.float32), mask=inside)


@triton.jit
@no_type_check
def rising(numbers, length, absent, sign, BLOCK: tl.constexpr, ABSENT: tl.constexpr):
    """Whether no number is less than the one before it, times `sign`, absent ones apart; and the largest of all."""
    good = tl.full([BLOCK], 1, tl.int32)
    most = tl.full([BLOCK], float("-inf"), tl.float64)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        own = tl.load(numbers + place, mask=place < length, other=0)
        before = tl.load(numbers + place - 1, mask=(place < length) & (place > 0), other=0)
        fine = ((own - before) * sign >= 0) | (place == 0) | (place >= length)
        if ABSENT:
            fine |= (tl.load(absent + place, mask=place < length, other=0) < 0) & (place > 0)
        good &= fine.to(tl.int32)
        value = own.to(tl.float64)
        value = tl.where(value == value, value, float("inf"))  # NaN is larger than every limit
        most = tl.maximum(most, tl.where(place < length, value, float("-inf")))
    return tl.min(good, 0) == 1, tl.max(most, 0)


@triton.jit
@no_type_check
def path_blocks_kernel(
    key_path, query_path, scalars, key_order, query_order, key_groups, present, query_norm,
    counts, first_blocks, least_gain,  # results
    rows, heads, keys, queries, path_batched, order_batched,
    FOLD: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RICCATI: tl.constexpr, GROUPS: tl.constexpr,
    MOST_POWER: tl.constexpr, LEAST_VARIANCE: tl.constexpr, MOST_GAIN: tl.constexpr, MOST_RATIO: tl.constexpr,
    LEAST_GAIN: tl.constexpr, LEAST_RESIDUAL: tl.constexpr, LEAST_FLOOR: tl.constexpr,
):  # fmt: skip
    """One program for a batch and head: how many blocks of keys fold for each block of queries, and the reverse.

    A head folds if its c is small, its squared states and variances are of like size, no present key or query falls in
    time, C does not rise, and u falls only beside a large floor.
    """
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row = batch * heads * path_batched + head
    groups = key_groups + batch * keys if GROUPS else key_groups
    keys_in_order = key_order + batch * order_batched * keys
    queries_in_order = query_order + batch * order_batched * queries
    good, _ = rising(keys_in_order, keys, groups, 1, BLOCK=BLOCK, ABSENT=GROUPS)
    sorted_queries, _ = rising(queries_in_order, queries, groups, 1, BLOCK=BLOCK, ABSENT=False)
    rises, most = rising(key_path + (row + rows) * keys, keys, groups, 1, BLOCK=BLOCK, ABSENT=GROUPS)
    query_rises, query_most = rising(query_path + (row + rows) * queries, queries, groups, 1, BLOCK=BLOCK, ABSENT=False)
    power, inverse_freedom = tl.load(scalars + head).to(tl.float64), tl.load(scalars + heads + head).to(tl.float64)
    eta2, floor = tl.load(scalars + 2 * heads + head).to(tl.float64), tl.load(scalars + 3 * heads + head).to(tl.float64)
    gamma2 = tl.load(scalars + 4 * heads + head).to(tl.float64)
    good &= sorted_queries & ((rises & query_rises) | (floor >= LEAST_FLOOR * tl.maximum(most, query_most)))
    if RICCATI:
        falls, _ = rising(key_path + (row + 2 * rows) * keys, keys, groups, -1, BLOCK=BLOCK, ABSENT=GROUPS)
        query_falls, _ = rising(query_path + (row + 2 * rows) * queries, queries, groups, -1, BLOCK=BLOCK, ABSENT=False)
        good &= falls & query_falls

    norm = largest_norm(query_norm + pair * queries, queries, BLOCK=BLOCK).to(tl.float64)
    least, of_key = (floor + gamma2) / inverse_freedom, eta2 / inverse_freedom
    greatest = (most + query_most + eta2 + floor + gamma2) / inverse_freedom
    good &= (power <= MOST_POWER) & (floor >= LEAST_VARIANCE) & (least >= LEAST_VARIANCE) & (greatest <= MOST_GAIN)
    if MOST_RATIO > 0:  # in float16, or gradients of scores would be too small for it: see `fold_scales`
        good &= of_key <= MOST_RATIO * least
    good &= (norm * LEAST_GAIN <= least) & (norm >= LEAST_RESIDUAL * (least + of_key))
    if pair < heads:
        tl.store(least_gain + head, least.to(tl.float32))

    key_blocks, query_blocks = keys // FOLD, tl.cdiv(queries, FOLD)
    whole = key_blocks
    if GROUPS:  # absent keys may have any time
        whole = tl.load(present + batch)
    for start in range(0, query_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        first = tl.load(queries_in_order + block * FOLD, mask=block < query_blocks, other=0)
        count = tl.zeros([BLOCKS], tl.int32)
        for other in range(0, key_blocks, BLOCKS):
            of_keys = other + tl.arange(0, BLOCKS)
            last = tl.load(keys_in_order + of_keys * FOLD + FOLD - 1, mask=of_keys < key_blocks, other=FAR)
            last = tl.where(of_keys < whole, last, FAR)
            count += tl.sum((last[None, :] <= first[:, None]).to(tl.int32), 1)
        tl.store(counts + pair * query_blocks + block, tl.where(good, count, 0), mask=block < query_blocks)
    for start in range(0, key_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        last = tl.load(keys_in_order + block * FOLD + FOLD - 1, mask=block < key_blocks, other=FAR)
        last = tl.where(block < whole, last, FAR)
        earlier = tl.zeros([BLOCKS], tl.int32)
        for other in range(0, query_blocks, BLOCKS):
            of_queries = other + tl.arange(0, BLOCKS)
            first = tl.load(queries_in_order + of_queries * FOLD, mask=of_queries < query_blocks, other=FAR)
            earlier += tl.sum((first[None, :] < last[:, None]).to(tl.int32), 1)
        tl.store(
            first_blocks + pair * key_blocks + block, tl.where(good, earlier, query_blocks), mask=block < key_blocks
        )
