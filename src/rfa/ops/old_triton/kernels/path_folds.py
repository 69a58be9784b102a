"""Scores of a tile on folds at times of any distance, from numbers of its rows, of its keys and of two edges.

Times do not fall along the sequence, and all is causal. As in `folds.py` the edge b of a block of keys is its last key.
The edge a of a block of queries is its first query. With M, u and C of `rfa.ops.prior.SeparablePath`:

    E_i = exp(-(M_i - M_a))    E_ab = exp(-(M_a - M_b))    E_j = exp(-(M_b - M_j))             E = E_i E_ab E_j
    V_i = u_i - E_i^2 u_a      V_ab = u_a - E_ab^2 u_b     V_j = u_b - E_j^2 u_j + eta^2 E_j^2
    Sigma = sigma_0^2 + V_i + E_i^2 (V_ab + E_ab^2 V_j)
    g     = Sigma + gamma^2 + W |q - E k|^2,    W |q - E k|^2 = W |q|^2 - 2 W E_i E_ab (q.k' - E_i E_ab |k'|^2 / 2)
    z     = c log2(Sigma + gamma^2) - B log2 Sigma - c log2 g

All terms of Sigma but V_i and V_ab of a process whose noise falls are positive, so nothing cancels. With the Riccati
prior `(C_i - C_a) + (C_a - C_b) + (C_b - C_j) + key_bias` takes the place of `-B log2 Sigma`: C does not rise.
A kernel with the rows of a tile in its first dimension adds the edges to the rows, and one with keys there to the keys.
"""

from typing import no_type_check

import triton
import triton.language as tl

from .pairs import log2
from .prior import BITS, one_less_exponential


@triton.jit
@no_type_check
def load_edge(path, pair, length, place, RICCATI: tl.constexpr):
    """M, u and C of one key or query, each a high and a low float32."""
    parts = path + pair * (6 if RICCATI else 4) * length + place
    riccati_high, riccati_low = 0.0, 0.0
    if RICCATI:
        riccati_high, riccati_low = tl.load(parts + 4 * length), tl.load(parts + 5 * length)
    return (
        tl.load(parts),
        tl.load(parts + length),
        tl.load(parts + 2 * length),
        tl.load(parts + 3 * length),
        riccati_high,
        riccati_low,
    )


@triton.jit
@no_type_check
def between_edges(at_queries, at_keys, FAST_LOG: tl.constexpr):
    """`M_a - M_b`, E_ab, V_ab and `C_a - C_b`."""
    apart = tl.maximum((at_queries[0] - at_keys[0]) + (at_queries[1] - at_keys[1]), 0.0)
    decay = tl.exp2(apart * -BITS)
    added = (at_queries[2] - at_keys[2]) + (at_queries[3] - at_keys[3])
    complement = one_less_exponential(2.0 * apart, decay * decay, FAST_LOG=FAST_LOG)
    return apart, decay, added + at_keys[2] * complement, (at_queries[4] - at_keys[4]) + (at_queries[5] - at_keys[5])


@triton.jit
@no_type_check
def load_path_rows(rows, pair, length, index, present, floor, RICCATI: tl.constexpr):
    """E_i, `V_i + sigma_0^2` and `C_i - C_a`."""
    parts = rows + pair * (3 if RICCATI else 2) * length + index
    decay = tl.load(parts, mask=present, other=0.0)
    variance = tl.load(parts + length, mask=present, other=0.0) + floor
    bias = tl.load(parts + 2 * length, mask=present, other=0.0) if RICCATI else tl.zeros_like(decay)
    return decay, variance, bias


@triton.jit
@no_type_check
def path_fold_bits(
    variance, start, bias, gamma2, coefficient, bias_factor, RICCATI: tl.constexpr, FAST_LOG: tl.constexpr
):
    """T and what it starts from, and the logarithms in it: of `Sigma + gamma^2` and of Sigma."""
    of_effective = log2(variance + gamma2, FAST_LOG=FAST_LOG)
    bits = coefficient * of_effective + start
    if RICCATI:
        return bits + bias, of_effective, of_effective
    else:
        of_variance = log2(variance, FAST_LOG=FAST_LOG)
        return bits - bias_factor * of_variance, of_effective, of_variance


@triton.jit
@no_type_check
def path_fold_rows(of_rows, at_queries, key_path, pair, keys, edge, RICCATI: tl.constexpr, FAST_LOG: tl.constexpr):
    """Of rows, towards the keys of an edge: E, `Sigma - E^2 V_j`, `C_i - C_b`; and `M_a - M_b`, V_ab."""
    at_edge = load_edge(key_path, pair, keys, edge, RICCATI=RICCATI)
    apart, edge_decay, edge_variance, edge_bias = between_edges(at_queries, at_edge, FAST_LOG=FAST_LOG)
    variance = of_rows[1] + of_rows[0] * of_rows[0] * edge_variance
    return of_rows[0] * edge_decay, variance, of_rows[2] + edge_bias, apart, edge_variance


@triton.jit
@no_type_check
def load_path_columns(fold_bits, pair, keys, columns, present, RICCATI: tl.constexpr):
    """V_j and `C_b - C_j + key_bias`."""
    parts = fold_bits + pair * (2 if RICCATI else 1) * keys + columns
    variance = tl.load(parts, mask=present, other=0.0)
    bias = tl.load(parts + keys, mask=present, other=0.0) if RICCATI else tl.zeros_like(variance)
    return variance, bias
