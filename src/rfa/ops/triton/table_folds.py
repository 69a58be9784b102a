"""Folds at uniform times: the numbers of each lag and key, and the lags at which the tables are what the formulas say.

The formulas are in `kernels/folds.py`.
"""

import torch
from torch import Tensor

from ..kernel import KernelInputs
from ..prior import UNIT
from .fold_constants import FOLD, TERMS, constant, make_constants
from .fold_numbers import LEAST_GAIN, LEAST_RESIDUAL, MOST_POWER, Folds
from .frame import Frame, turned

MOST_BITS = 1000.0  # of a coefficient of T
LEAST_FACTOR = {torch.bfloat16: 2.0**-12, torch.float16: 2.0**-8}  # of a key at the start of a block
NEVER = 2**30  # no lag is as long


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

    power, longest = inputs.scalars[0], failed.amax(-1)
    folding = torch.arange(keys, device=weight.device) >= longest[:, None]
    least, greatest = 1.0 / (UNIT * torch.where(folding, weight, 0.0).amax(-1)), 1.0 / (UNIT * weight.amin(-1))
    largest = torch.where(frame.query_norm.isnan(), 0.0, frame.query_norm).amax(-1)
    mild = (power <= MOST_POWER) & (least >= 2.0**-40) & (greatest <= 2.0**40)
    mild = mild & (largest * LEAST_GAIN <= least) & (largest >= LEAST_RESIDUAL / (UNIT * weight[:, 0]))
    nearest = torch.where(mild, longest, NEVER).to(torch.int32).contiguous()

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
        least,
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


def gains(weight: Tensor) -> Tensor:
    """G in float64; finite where w is 0, in heads that do not fold."""
    return 1.0 / (UNIT * weight.double().clamp(min=2.0**-120))


def constants_of_keys(tables: Tensor) -> Tensor:
    """C of the distances 0 to FOLD - 1, `(heads, FOLD)` in float64."""
    decay, gain = tables[0, :, :FOLD].double(), gains(tables[2, :, :FOLD])
    start = torch.where(decay[:, :1] > 0.0, decay[:, :1], 1.0)
    return (gain - gain[:, :1]) / start.square()
