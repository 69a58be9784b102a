"""What the tile kernels read: tables by lag, states in the common frame, delta and the turned cotangent, constants.

One launch before the forward pass, one program of either kind for a block of 64 tokens or lags. All in float32.
"""

from functools import cache
from typing import Any, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl

from .parameters import GATE, LEAST_GAIN, RICCATI, integrals, load_head, prior_bits, store_effects, variances
from .tiles import BITS, COUNTS, FOLD, IEEE, TABLES, TERMS, WAVES, product

EACH = tl.constexpr(8)  # blocks of tokens of a program
MOST_POWER = tl.constexpr(24.5)  # a larger c multiplies the rounding of g
MOST_MISFIT = tl.constexpr(2.0**-9)  # of T, in bits, or of c, of which gradients of parameters are multiples
MOST_BITS = tl.constexpr(1000.0)  # of T within a tile


@triton.jit
@no_type_check
def head_folds(of_head, fit, functions, FORM: tl.constexpr, LEAST_FACTOR: tl.constexpr):
    """Whether a head is slow enough: keys keep their digits over a tile, T fits, and g does not cancel."""
    mu, freedom, beta = of_head[0], of_head[5], of_head[6]
    n = tl.arange(0, FOLD).to(tl.float32)
    bits = prior_bits(of_head, n, FORM=FORM)
    bits = bits - tl.sum(tl.where(n == 0.0, bits, 0.0), 0)
    coefficients = tl.sum(fit * bits[None, :], 1)
    misfit = tl.max(tl.abs(tl.sum(functions * coefficients[:, None], 0) - bits), 0)
    most = tl.max(tl.abs(coefficients), 0)
    far, _, _, _ = variances(of_head, tl.zeros([FOLD], tl.float32) - (FOLD - 1), FORM=FORM)
    near, _, _, _ = variances(of_head, n, FORM=FORM)
    far, near = tl.min(far, 0), tl.min(near, 0)
    power = beta * (freedom + 1.0)
    good = (
        (tl.exp(mu * -(FOLD - 1)) >= LEAST_FACTOR)
        & (power <= MOST_POWER)
        & (misfit <= MOST_MISFIT * tl.minimum(power, 1.0))
    )
    return good & (most <= MOST_BITS) & (tl.abs(far) * (1.0 + power) <= near * 8192.0) & (near > 1e-30)


@triton.jit
@no_type_check
def turned_block(
    source, at, token, inside, modes_at, cos, sin, channel_stride,
    HALF: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Real and imaginary parts turned backwards; zeros and 0 where a state holds NaN or infinity."""
    mode = tl.arange(0, HALF)
    real = tl.load(source + at[:, None] + mode[None, :] * channel_stride, mask=inside[:, None], other=0.0).to(
        tl.float32
    )
    imaginary = tl.load(
        source + at[:, None] + (mode + HALF)[None, :] * channel_stride, mask=inside[:, None], other=0.0
    ).to(tl.float32)  # fmt: skip
    if TURN:
        phase = modes_at + token[:, None] * HALF + mode[None, :]
        c = tl.load(cos + phase, mask=inside[:, None], other=0.0)
        s = tl.load(sin + phase, mask=inside[:, None], other=0.0)
        real, imaginary = c * real + s * imaginary, c * imaginary - s * real
    kind = source.dtype.element_ty  # turned, a state may leave the range of float16
    known = tl.sum(0.0 * real.to(kind).to(tl.float32) + 0.0 * imaginary.to(kind).to(tl.float32), 1) == 0.0
    return tl.where(known[:, None], real, 0.0), tl.where(known[:, None], imaginary, 0.0), known


@triton.jit
@no_type_check
def store_block(real, imaginary, target, row, HALF: tl.constexpr):
    """Store as rounded; returns the squared norms of what was stored."""
    real, imaginary = real.to(target.dtype.element_ty), imaginary.to(target.dtype.element_ty)
    index = target + row[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    tl.store(index, real)
    tl.store(index + HALF, imaginary)
    real, imaginary = real.to(tl.float32), imaginary.to(tl.float32)
    return tl.sum(real * real + imaginary * imaginary, 1)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def prologue_kernel(
    query, key, value, key_cos, key_sin, query_cos, query_sin, key_groups, decay, process_noise, key_noise,
    query_noise, noise_floor, robustness, inverse_temperature, horizon, fit_matrix, function_matrix, spread, query_out,
    query_norm, query_marked, key_out, value_out, key_number, key_marked, tables, bits, numbers, folds, factors,
    effects, pair_effects, q_batch, q_head, q_row, q_channel, k_batch, k_head, k_row, k_channel, v_batch, v_head,
    v_row, v_channel, kp_batch, kp_head, qp_batch, qp_head, heads, queries, keys, row_length, key_length, length,
    modes, table_blocks, key_programs, query_programs, effect_blocks, distances,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TURN: tl.constexpr, TURN_VALUES: tl.constexpr, GROUPS: tl.constexpr,
    FORM: tl.constexpr, HORIZON: tl.constexpr, FOLDS: tl.constexpr, EFFECTS: tl.constexpr, LEAST_FACTOR: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Tables of each head, the effects of its parameters, then keys and values, then queries."""
    program = tl.program_id(0)
    of_tables, of_effects = heads * table_blocks, heads * effect_blocks
    n, part = tl.arange(0, FOLD), tl.arange(0, 2 * TERMS)
    each = key_programs + query_programs
    beside, later = program - of_tables, program - of_tables - of_effects
    kind = tl.where(beside < 0, 0, tl.where(later < 0, 3, tl.where(later % each < key_programs, 1, 2)))
    block = tl.where(kind == 2, later % each - key_programs, later % each)
    pair = tl.where(kind == 0, program // table_blocks, later // each)
    block = tl.where(kind == 0, program % table_blocks, block)
    if EFFECTS:
        pair = tl.where(kind == 3, beside // effect_blocks, pair)
        block = tl.where(kind == 3, beside % effect_blocks, block)
    pair = pair.to(tl.int64)
    batch, head = pair // heads, pair % heads
    of_head = load_head(
        decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, horizon, head,
        keys, modes, FORM=FORM, HORIZON=HORIZON,
    )  # fmt: skip
    if kind == 3:
        if EFFECTS:
            store_effects(
                block, head, of_head, spread, effects, pair_effects, length, distances,
                FORM=FORM, FOLDS=FOLDS, FAST=FAST,
            )  # fmt: skip
    elif kind == 2:
        for each_block in range(block * EACH, tl.minimum((block + 1) * EACH, row_length // FOLD)):
            token = each_block * FOLD + n
            inside = token < queries
            at = batch * q_batch + head * q_head + token.to(tl.int64) * q_row
            real, imaginary, known = turned_block(
                query, at, token, inside, batch * qp_batch + head * qp_head, query_cos, query_sin, q_channel,
                HALF=CHANNELS // 2, TURN=TURN,
            )  # fmt: skip
            row = pair * row_length + token  # rows of no query hold zeros
            norm = store_block(real, imaginary, query_out, row, HALF=CHANNELS // 2)
            tl.store(query_norm + row, norm)
            tl.store(query_marked + row, tl.where(known, norm, float("nan")))
    else:
        mu, sigma2, eta2, freedom, beta, ahead = of_head[0], of_head[1], of_head[2], of_head[5], of_head[6], of_head[7]
        if FOLDS:
            fit = tl.load(fit_matrix + part[:, None] * FOLD + n[None, :])
            functions = tl.load(function_matrix + part[:, None] * FOLD + n[None, :])
            good = head_folds(of_head, fit, functions, FORM=FORM, LEAST_FACTOR=LEAST_FACTOR)
        distance = n.to(tl.float32) * -1.0 + (FOLD - 1)  # of a key to its tile's last one
        phi, square = integrals(2.0 * mu, distance)
        scale = freedom * modes
        if not FORM[GATE]:
            scale = 0.0
        factor, constant = tl.exp(-mu * distance), scale * (sigma2 * phi - eta2 * (1.0 - square))
        fine = (tl.zeros([FOLD], tl.int32) + good.to(tl.int32) != 0) if FOLDS else distance < 0.0
        factor, constant = tl.where(fine, factor, 1.0), tl.where(fine, constant, 0.0)
        if kind == 1:
            for each_block in range(block * EACH, tl.minimum((block + 1) * EACH, key_length // FOLD)):
                key_token = each_block * FOLD + n
                in_keys = key_token < keys
                present = in_keys
                if GROUPS:
                    present &= tl.load(key_groups + batch * keys + key_token, mask=in_keys, other=-1) >= 0
                phase = batch * kp_batch + head * kp_head
                key_row = pair * key_length + key_token
                key_at = batch * k_batch + head * k_head + key_token.to(tl.int64) * k_row
                key_real, key_imaginary, known_key = turned_block(
                    key, key_at, key_token, present, phase, key_cos, key_sin, k_channel,
                    HALF=CHANNELS // 2, TURN=TURN,
                )  # fmt: skip
                twice = (-2.0 * factor)[:, None]
                key_norm = store_block(key_real * twice, key_imaginary * twice, key_out, key_row, HALF=CHANNELS // 2)
                value_at = batch * v_batch + head * v_head + key_token.to(tl.int64) * v_row
                value_real, value_imaginary, known_value = turned_block(
                    value, value_at, key_token, present, phase, key_cos, key_sin, v_channel,
                    HALF=WIDTH // 2, TURN=TURN_VALUES,
                )  # fmt: skip
                once = factor[:, None]
                store_block(value_real * once, value_imaginary * once, value_out, key_row, HALF=WIDTH // 2)
                number = 0.25 * key_norm + constant
                tl.store(key_number + key_row, number)
                tl.store(key_marked + key_row, tl.where(known_key & known_value, number, float("nan")))
        else:
            lag = (block * FOLD + n - (FOLD - 1)).to(tl.float32)
            index = block * FOLD + n
            in_tables = index < length
            gain, _, phi_at, _ = variances(of_head, lag, FORM=FORM)
            start = prior_bits(of_head, tl.maximum(lag, 0.0), FORM=FORM)
            result = tables + head * TABLES * length + index
            exponent = -mu * BITS * (lag + ahead)
            tl.store(result, gain, mask=in_tables)
            tl.store(result + length, start, mask=in_tables)
            tl.store(result + 2 * length, phi_at, mask=in_tables)
            tl.store(result + 3 * length, tl.exp2(exponent), mask=in_tables)
            tl.store(result + 4 * length, start + exponent, mask=in_tables)
            if FOLDS:
                within = tl.maximum(lag[:, None] + n[None, :].to(tl.float32), 0.0)
                coefficients = product(
                    prior_bits(of_head, within, FORM=FORM) - start[:, None], tl.trans(fit), FAST=FAST, PRECISION=IEEE
                )
                high = coefficients.to(tl.float16)
                rest = (coefficients - high.to(tl.float32)).to(tl.float16)
                kept = in_tables[:, None] & (lag >= 0.0)[:, None] & (part < TERMS)[None, :]
                at_bits = (head * length + index - (FOLD - 1))[:, None] * (2 * TERMS) + part[None, :]
                tl.store(bits + at_bits, high, mask=kept)
                tl.store(bits + at_bits + TERMS, rest, mask=kept)
            if block == 0:
                place = factors + head * 3 * FOLD + n
                tl.store(place, factor)
                tl.store(place + FOLD, tl.where(fine, phi, 0.0))
                tl.store(place + 2 * FOLD, tl.where(fine, square, 1.0))
                ends = tl.where(n == 0, 0, keys - 1).to(tl.float32)
                least = variances(of_head, ends, FORM=FORM)[0]
                tl.store(numbers + head, -mu * BITS)
                tl.store(numbers + heads + head, beta * (freedom + 1.0))
                tl.store(numbers + 2 * heads + head, tl.maximum(tl.min(least, 0), LEAST_GAIN))
                if FORM[RICCATI]:  # of `windows_kernel`: what a lag costs, and the mass of all keys together
                    slope = -beta * of_head[10]
                    mass = -tl.log2(integrals(1.0, slope + tl.zeros([1], tl.float32))[0])
                    tl.store(numbers + 3 * heads + head, slope * BITS)
                    tl.store(numbers + 4 * heads + head, beta * BITS * of_head[9] + tl.sum(mass, 0))
                if FOLDS:
                    tl.store(folds + head, good.to(tl.int32))


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def delta_kernel(
    gradient, out, low, log_sum, grad_log_sum, cos, sin,
    turned, delta, total, largest,
    stride_batch, stride_head, stride_row, stride_channel,
    heads, queries, row_length, blocks, phase_batch, phase_head,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr, LOG_SUM: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """`<dout_i, out_i>` less what comes through the log sum, and dout in the common frame."""
    block = tl.program_id(0) % blocks
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    in_rows = rows < queries
    at_row = pair * queries + rows
    half: tl.constexpr = WIDTH // 2
    mode = tl.arange(0, half)
    mask = in_rows[:, None]
    at_gradient = gradient + batch * stride_batch + head * stride_head
    at_gradient += rows.to(tl.int64)[:, None] * stride_row + mode[None, :] * stride_channel
    index = at_row[:, None] * WIDTH + mode[None, :]
    real = tl.load(at_gradient, mask=mask, other=0.0).to(tl.float32)
    imaginary = tl.load(at_gradient + half * stride_channel, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(out + index, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(out + index + half, mask=mask, other=0.0).to(tl.float32)
    if LOW:
        first += tl.load(low + index, mask=mask, other=0.0)
        second += tl.load(low + index + half, mask=mask, other=0.0)
    if TURN:
        phase = batch * phase_batch + head * phase_head + rows[:, None] * half + mode[None, :]
        c = tl.load(cos + phase, mask=mask, other=0.0)
        s = tl.load(sin + phase, mask=mask, other=0.0)
        real, imaginary = c * real + s * imaginary, c * imaginary - s * real
        first, second = c * first + s * second, c * second - s * first
    real, imaginary = real.to(turned.dtype.element_ty), imaginary.to(turned.dtype.element_ty)
    # of dout as rounded: or s would not sum to 0 over a row
    inner = tl.sum(real.to(tl.float32) * first + imaginary.to(tl.float32) * second, 1)
    logarithm = tl.load(log_sum + at_row, mask=in_rows, other=float("-inf"))
    known = (inner == inner) & (logarithm > float("-inf"))
    inner = tl.where(known, inner, 0.0)
    if LOG_SUM:
        through = tl.load(grad_log_sum + at_row, mask=in_rows, other=0.0)
        inner -= tl.where(known, through * BITS, 0.0)
    padded = pair * row_length + rows  # rows of no query take no part either
    tl.store(delta + padded, inner)
    tl.store(total + padded, tl.where(known, logarithm, float("inf")))
    real, imaginary = tl.where(known[:, None], real, 0.0), tl.where(known[:, None], imaginary, 0.0)
    if LOW:  # the lean kernels alone scale by it
        most = tl.maximum(tl.max(tl.abs(real), 1), tl.max(tl.abs(imaginary), 1)).to(tl.float32)
        tl.store(largest + pair * blocks + block, tl.max(most, 0))
    index = turned + padded[:, None] * WIDTH + mode[None, :]
    tl.store(index, real.to(turned.dtype.element_ty))
    tl.store(index + half, imaginary.to(turned.dtype.element_ty))


# Of the host: strides, and constants of a device


def phase_strides(phases: torch.Tensor | None) -> tuple[int, int]:
    """Strides of `(b, heads or 1, length, modes)` over samples and heads; 0 where all share the phases."""
    if phases is None:
        return 0, 0
    batch, head = (0 if phases.shape[dim] == 1 else phases.stride(dim) for dim in (0, 1))
    return batch, head


@cache
def _matrices() -> dict[str, Any]:
    fold, terms = FOLD.value, TERMS.value
    n = np.arange(fold)
    legendre = np.polynomial.legendre.legvander(2.0 * n / (fold - 1) - 1.0, terms - 1).T
    functions = (n / fold * legendre).astype(np.float16).astype(np.float64)
    fit = np.linalg.pinv(functions.T)
    made = {
        "functions": np.pad(functions, ((0, terms), (0, 0))).astype(np.float32),
        "fit": np.pad(fit, ((0, terms), (0, 0))).astype(np.float32),
        "terms": np.tile(functions[:, ::-1], (2, 1)).astype(np.float16),  # by a key's place
        "polynomials": np.pad(legendre, ((0, terms), (0, 0))).astype(np.float32),
    }
    pairs = (legendre[:, None, :, None] * legendre[None, :, None, ::-1]).reshape(terms * terms, fold, fold)
    lag = n[:, None] + (fold - 1 - n)[None, :]  # from 1 - fold on, of a row and a key's place
    spread = np.zeros((2, terms * terms, 2 * fold))
    for distance, seen in enumerate((lag >= fold - 1, lag >= 0)):
        weight = np.linalg.pinv(pairs[:, seen].T, rcond=1e-5)
        for row, of_row in zip(spread[distance], weight, strict=True):
            np.add.at(row, lag[seen], of_row)
    made["spread"] = spread.astype(np.float32)
    made["places"] = legendre[:, ::-1].T.copy()  # (place, term)
    return made


@cache
def _waves(lags: int) -> dict[str, Any]:
    """The functions of the lag by which effects of parameters are summed over full tiles, and what fits them."""
    fold, count = FOLD.value, WAVES.value
    rate = np.concatenate([[0.0, 0.0], np.geomspace(1.5 / lags, 0.7, count - 2)])
    near = (fold - 1 - np.arange(fold))[:, None]
    waves = np.exp(-rate * near)
    waves[:, 1] = near[:, 0] / fold
    lag = np.unique(np.round(np.concatenate([np.arange(1, 32), np.geomspace(32, max(lags - 1, 33), 65)])))
    basis = np.exp(-rate * lag[:, None])
    basis[:, 1] = 0.0
    fit = np.pad(np.linalg.pinv(basis, rcond=1e-5), ((0, 0), (0, 2 * fold - len(lag))))
    lag = np.pad(lag, (0, 2 * fold - len(lag)), constant_values=1.0)
    rates = np.stack([np.exp(-rate * fold), -rate * np.log2(np.e)])
    return {
        "waves": waves,
        "rates": rates.astype(np.float32),
        "fit": fit.astype(np.float32),
        "lags": lag.astype(np.float32),
    }


_made: dict[tuple[str, torch.device], torch.Tensor] = {}


def constant(name: str, device: torch.device) -> torch.Tensor:
    """A constant on a device, copied to it once."""
    if (name, device) not in _made:
        if "-" in name:
            what, kind, *size = name.split("-")
            dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[kind]
            source = _waves(int(size[0]))[what] if size else _matrices()["places"]
            made = whole = torch.from_numpy(source)
            if what in ("waves", "moments"):  # in two parts
                high = whole.to(dtype)
                made = torch.cat([high, (whole - high.double()).to(dtype)], dim=1).contiguous()
        else:
            made = torch.from_numpy(_matrices()[name])
        made = made.to(device)
        if type(made) is not torch.Tensor:  # of a tracer
            return made
        _made[name, device] = made
    return _made[name, device]
