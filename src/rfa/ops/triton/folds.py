"""Lags that are split at the edges of blocks: for causal times, half precision, Student-t weights.

A kernel takes a tile of pairs by these formulas where the numbers of the head allow it, and pair by pair where they do
not. This file makes the numbers of uniform times, whose formulas are in `kernels/folds.py`, and finds out which tiles
these are. `path_folds.py` does so for other times.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernel import KernelInputs
from ..prior import UNIT
from .arguments import Frame, Orders, turned
from .fold_constants import FOLD, TERMS, constant, make_constants

MOST_POWER = 24.0  # a larger c multiplies the rounding of the gradients of the tables
MOST_BITS = 1000.0  # of a coefficient of T
LEAST_FACTOR = {torch.bfloat16: 2.0**-12, torch.float16: 2.0**-8}  # of a key at the start of a block
LEAST_GAIN = 2.0**-14  # of G over |q|^2: a residual may be negative by rounding, but never as far as -G
LEAST_RESIDUAL = 2.0**-5  # of |q|^2 over G(0): gradients of nu_s and c are small differences where r is far below G
NEVER = 2**30  # no lag is as long


class Folds(NamedTuple):
    """What the kernels read of a call's folds.

    Fields, at uniform times and at others:
        key, value: `F k` and `F v` in the common frame, rounded once; F is E_j of `kernels/path_folds.py`.
        rows: `1 / G` and `-2 E / G` of each lag, `(heads, 2, keys)` float32. Else of each query E_i, V_i and, with the
            Riccati prior, `C_i - C_a`, `(b, heads, 2 or 3, queries)`.
        columns: `-(|k'|^2 + C) / 2`, `(batch, heads, keys)` float32. Else `-(|k'|^2 + V_j / W) / 2`.
        bits: the coefficients u of T, high and low parts, `(heads, keys - FOLD + 1, 2 TERMS)` float16. Else of each
            key V_j and, with the Riccati prior, `C_b - C_j + key_bias`, `(b, heads, 1 or 2, keys)` float32.
        terms: the functions of a key's place in its block, `(2 TERMS, FOLD)` float16. Else None.
        nearest: the shortest lag from a row to the edge of a block that folds, `(batch, heads)` int32. Else how many
            blocks of keys fold for each block of queries, `(batch, heads, blocks)` int32; more for later ones.
        blocks: how many blocks may fold, `(batch,)` int32: those of present keys where padding stands at the end. None
            without groups. Packed sequences, and padding elsewhere, do not fold. Else, for the kernel of keys, the
            first block of queries for which each block of keys folds, `(batch, heads, blocks)` int32.
        factors: F of a key's state, `(heads, FOLD)` float32 by its place. Else `(b, heads, keys)`.
    """

    key: Tensor
    value: Tensor
    rows: Tensor
    columns: Tensor
    bits: Tensor
    terms: Tensor | None
    nearest: Tensor
    blocks: Tensor | None
    factors: Tensor


def fold_arguments(folds: Folds | None) -> tuple[Tensor | None, ...]:
    """The arguments of the kernels that hold a block of rows; that of keys takes `factors` too."""
    return (None,) * (len(Folds._fields) - 1) if folds is None else folds[:-1]


def fold_choices(folds: Folds | None) -> dict[str, Any]:
    """The compile-time choices of the kernels."""
    return {"FOLD": 0 if folds is None else FOLD, "PARTS": 2 * TERMS}


def may_fold(inputs: KernelInputs) -> bool:
    """Whether a call has blocks to fold, as far as the host can tell without reading a tensor."""
    return (
        inputs.causal
        and inputs.score_kind == "student_t"
        and (inputs.tables is not None or inputs.gate)
        and inputs.query.dtype != torch.float32
        and min(inputs.query.shape[2], inputs.key.shape[2]) >= 2 * FOLD  # a few queries would not pay for it
    )


def folds_of(inputs: KernelInputs, frame: Frame, order: Orders) -> Folds | None:
    """The folds of a call, or None where it has none. No tensor is read on the host."""
    from .path_folds import path_folds

    if not may_fold(inputs):
        return None
    present = blocks_of_present_keys(inputs)
    return table_folds(inputs, frame, present) if order.key_order is None else path_folds(inputs, frame, order, present)


def table_folds(inputs: KernelInputs, frame: Frame, present: Tensor | None) -> Folds:
    """The folds of uniform times.

    A lag m of a head folds if E, G and T of the lags m to `m + FOLD - 1` are what the formulas make of them, for all
    lags from m on.
    """
    assert inputs.tables is not None
    keys = inputs.key.shape[2]
    tables = inputs.tables[..., :keys]
    decay, _, weight = tables
    factors = decay[:, :FOLD] / decay[:, :1]
    factors = torch.where(factors[:, -1:] >= LEAST_FACTOR[inputs.key.dtype], factors, 1.0).flip(-1).contiguous()
    make_constants(factors.device, inputs.query.shape[2])
    rows, bits, failed = _of_tables(inputs, factors)

    power = inputs.scalars[0]
    least, greatest = 1.0 / (UNIT * weight.amax(-1)), 1.0 / (UNIT * weight.amin(-1))
    largest = torch.where(frame.query_norm.isnan(), 0.0, frame.query_norm).amax(-1)
    mild = (power <= MOST_POWER) & (least >= 2.0**-40) & (greatest <= 2.0**40)
    mild = mild & (largest * LEAST_GAIN <= least) & (largest >= LEAST_RESIDUAL / (UNIT * weight[:, 0]))
    nearest = torch.where(mild, failed.amax(-1), NEVER).to(torch.int32).contiguous()

    constants = constants_of_keys(tables).flip(-1).float().repeat(1, -(-keys // FOLD))[:, :keys]
    cos, sin = (inputs.key_cos, inputs.key_sin) if inputs.rotate_values else (None, None)
    key, key_norm = turned(inputs.key, inputs.key_cos, inputs.key_sin, inputs.key_groups, inverse=True, factors=factors)
    value, _ = turned(inputs.value, cos, sin, inputs.key_groups, inverse=True, factors=factors)
    return Folds(
        key,
        value,
        rows,
        -0.5 * (key_norm + constants),
        bits,
        constant("terms", factors.device),
        nearest,
        present,
        factors,
    )


def _of_tables(inputs: KernelInputs, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Folds.rows`, `Folds.bits`, and the longest lags that do not fold, plus 1, `(heads, blocks)`."""
    from .kernels.fold_tables import fold_tables_kernel

    assert inputs.tables is not None
    heads, keys, device = inputs.tables.shape[1], inputs.key.shape[2], factors.device
    blocks = -(-keys // FOLD)
    rows = factors.new_empty(heads, 2, keys)
    bits = factors.new_empty(heads, keys - FOLD + 1, 2 * TERMS, dtype=torch.float16)
    failed = factors.new_empty(heads, blocks, dtype=torch.int32)
    with torch.cuda.device_of(factors):
        fold_tables_kernel[(heads * blocks,)](
            inputs.tables.contiguous(),
            inputs.scalars[0].float().contiguous(),
            constant("functions", device),
            constant("fit", device),
            factors,
            bits,
            rows,
            failed,
            heads,
            inputs.lags,
            keys,
            blocks,
            FOLD=FOLD,
            TERMS=TERMS,
            MOST_BITS=MOST_BITS,
            PRECISION="ieee" if factors.is_cuda else "interpreted",
            num_warps=8,
        )
    return rows, bits, failed


def blocks_of_present_keys(inputs: KernelInputs) -> Tensor | None:
    """See `Folds.blocks`."""
    groups, query_groups = inputs.key_groups, inputs.query_groups
    if groups is None or query_groups is None:
        return None
    group, count = groups.amax(1, keepdim=True), (groups >= 0).sum(1)
    alone = (query_groups == group).all(1)
    first = torch.arange(groups.shape[1], device=groups.device) < count[:, None]
    ends = (groups == torch.where(first, group, groups.clamp(max=-1))).all(1)
    batch = inputs.query.shape[0]
    return torch.where(alone & ends, count // FOLD, 0).to(torch.int32).expand(batch).contiguous()


def poisoned_before(value_norm: Tensor) -> Tensor:
    """How many values up to the end of each whole block hold NaN or infinity, `(batch, heads, blocks)` int32."""
    whole = value_norm[..., : value_norm.shape[-1] // FOLD * FOLD]
    return whole.unflatten(-1, (-1, FOLD)).isnan().sum(-1).cumsum(-1).to(torch.int32)


def gains(weight: Tensor) -> Tensor:
    """G in float64; finite where w is 0, in heads that do not fold."""
    return 1.0 / (UNIT * weight.double().clamp(min=2.0**-120))


def constants_of_keys(tables: Tensor) -> Tensor:
    """C of the distances 0 to FOLD - 1, `(heads, FOLD)` in float64."""
    decay, gain = tables[0, :, :FOLD].double(), gains(tables[2, :, :FOLD])
    start = torch.where(decay[:, :1] > 0.0, decay[:, :1], 1.0)
    return (gain - gain[:, :1]) / start.square()
