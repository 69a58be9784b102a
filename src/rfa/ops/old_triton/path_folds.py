"""Folds at times that are not uniform: the numbers of queries, keys and edges, and which blocks fold.

The formulas are in `kernels/path_folds.py` and `kernels/path_fold_numbers.py`.
"""

import torch
from torch import Tensor

from rfa.ops.kernel import KernelInputs

from .arguments import Orders, batched
from .fold_constants import FOLD
from .fold_numbers import LEAST_GAIN, LEAST_RESIDUAL, MOST_POWER, Folds
from .frame import Frame, to_frame_and_folds

LEAST_VARIANCE, MOST_GAIN = 2.0**-40, 2.0**40  # in float32 no square of a state, and no quotient, overflows
MOST_RATIO = 2.0**12  # of eta^2 over the least `Sigma + gamma^2`, in float16
LEAST_FLOOR = 2.0**-18  # of sigma_0^2 over the greatest u where u falls: V_ab is right to that share of u


def path_folds(inputs: KernelInputs, order: Orders, present: Tensor | None, *, known: bool) -> tuple[Frame, Folds]:
    """The states in the frame, and the folds of a call with a path. No tensor is read on the host."""
    from .kernels.path_fold_numbers import path_blocks_kernel, path_numbers_kernel

    assert inputs.key_path is not None
    assert inputs.query_path is not None
    batch, heads, queries, _ = inputs.query.shape
    _, path_batch, _, keys = inputs.key_path.shape
    key_path, query_path = inputs.key_path.contiguous(), inputs.query_path.contiguous()
    key_bias = None if inputs.key_bias is None else inputs.key_bias.contiguous()
    scalars, riccati = inputs.scalars.contiguous(), key_bias is not None
    rows, key_blocks, query_blocks = path_batch * heads, keys // FOLD, -(-queries // FOLD)
    blocks = max(-(-keys // FOLD), query_blocks)
    new = inputs.query.new_empty
    factors, constants = new(2, path_batch, heads, keys, dtype=torch.float32)
    of_keys = new(path_batch, heads, 1 + riccati, keys, dtype=torch.float32)
    of_queries = new(path_batch, heads, 2 + riccati, queries, dtype=torch.float32)
    counts = new(batch, heads, query_blocks, dtype=torch.int32)
    first_blocks = new(batch, heads, key_blocks, dtype=torch.int32)
    least_gain = new(heads, dtype=torch.float32)
    with torch.cuda.device_of(inputs.query):
        path_numbers_kernel[(rows * blocks,)](
            key_path,
            query_path,
            key_bias,
            scalars,
            factors,
            constants,
            of_keys,
            of_queries,
            rows,
            heads,
            keys,
            queries,
            blocks,
            FOLD=FOLD,
            RICCATI=riccati,
        )
    frame, states = to_frame_and_folds(inputs, factors, constants, known=known)
    with torch.cuda.device_of(inputs.query):
        path_blocks_kernel[(batch * heads,)](
            key_path,
            query_path,
            scalars,
            order.key_order,
            order.query_order,
            order.key_groups,
            present,
            frame.query_norm,
            counts,
            first_blocks,
            least_gain,
            rows,
            heads,
            keys,
            queries,
            *batched(inputs, order),
            FOLD=FOLD,
            BLOCK=512,
            BLOCKS=64,
            RICCATI=riccati,
            GROUPS=present is not None,
            MOST_POWER=MOST_POWER,
            LEAST_VARIANCE=LEAST_VARIANCE,
            MOST_GAIN=MOST_GAIN,
            MOST_RATIO=MOST_RATIO if inputs.query.dtype == torch.float16 else 0.0,
            LEAST_GAIN=LEAST_GAIN,
            LEAST_RESIDUAL=LEAST_RESIDUAL,
            LEAST_FLOOR=LEAST_FLOOR,
        )
    folds = Folds(
        states.key,
        states.value,
        of_queries,
        states.columns,
        of_keys,
        None,
        counts,
        first_blocks,
        factors,
        least_gain,
    )
    return frame, folds
