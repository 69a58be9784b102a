"""Folds at uniform times: the numbers of each lag and key, and the lags at which the tables are what the formulas say.

The formulas are in `kernels/folds.py`.
"""

import torch
from torch import Tensor

from rfa.ops.kernel import KernelInputs

from .fold_constants import FOLD, TERMS, constant, make_constants
from .fold_numbers import LEAST_GAIN, LEAST_RESIDUAL, MOST_POWER, Folds
from .frame import Frame, to_frame_and_folds

MOST_BITS = 1000.0  # of a coefficient of T
LEAST_FACTOR = {torch.bfloat16: 2.0**-12, torch.float16: 2.0**-8}  # of a key at the start of a block
NEVER = 2**30  # no lag is as long
_BLOCK = 1024  # numbers that a program reads at once


def table_folds(inputs: KernelInputs, present: Tensor | None, *, known: bool) -> tuple[Frame, Folds]:
    """The states in the frame, and the folds of uniform times.

    A lag m of a head folds if E, G and T of the lags m to `m + FOLD - 1` are what the formulas make of them, for all
    lags from m on.
    """
    from .kernels.fold_tables import fold_tables_kernel, nearest_kernel

    assert inputs.tables is not None
    batch, heads, queries, _ = inputs.query.shape
    keys, device = inputs.key.shape[2], inputs.query.device
    make_constants(device, queries)
    tables, scalars = inputs.tables.contiguous(), inputs.scalars[0].float().contiguous()
    blocks = -(-keys // FOLD)
    factors, constants = tables.new_empty(2, heads, FOLD)
    rows = tables.new_empty(heads, 2, keys)
    bits = tables.new_empty(heads, keys - FOLD + 1, 2 * TERMS, dtype=torch.float16)
    failed = tables.new_empty(heads, blocks, dtype=torch.int32)
    nearest = tables.new_empty(batch, heads, dtype=torch.int32)
    least_gain = tables.new_empty(heads)
    with torch.cuda.device_of(tables):
        fold_tables_kernel[(heads * blocks,)](
            tables,
            scalars,
            constant("functions", device),
            constant("fit", device),
            factors,
            constants,
            bits,
            rows,
            failed,
            heads,
            inputs.lags,
            keys,
            blocks,
            FOLD=FOLD,
            TERMS=TERMS,
            LEAST_FACTOR=LEAST_FACTOR[inputs.key.dtype],
            MOST_BITS=MOST_BITS,
            PRECISION="ieee" if tables.is_cuda else "interpreted",
            num_warps=8,
        )
    frame, states = to_frame_and_folds(inputs, factors, constants, known=known)
    with torch.cuda.device_of(tables):
        nearest_kernel[(batch * heads,)](
            tables,
            scalars,
            failed,
            frame.query_norm,
            nearest,
            least_gain,
            heads,
            inputs.lags,
            queries,
            keys,
            blocks,
            BLOCK=_BLOCK,
            MOST_POWER=MOST_POWER,
            LEAST_GAIN=LEAST_GAIN,
            LEAST_RESIDUAL=LEAST_RESIDUAL,
            NEVER=NEVER,
        )
    terms = constant("terms", device)
    folds = Folds(states.key, states.value, rows, states.columns, bits, terms, nearest, present, factors, least_gain)
    return frame, folds
