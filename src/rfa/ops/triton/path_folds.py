"""Folds at times that are not uniform: the numbers of queries, keys and edges, and which blocks fold.

The formulas are in `kernels/path_folds.py`.
"""

import torch
from torch import Tensor

from ..kernel import KernelInputs
from .arguments import Orders
from .fold_constants import FOLD
from .fold_numbers import LEAST_GAIN, LEAST_RESIDUAL, MOST_POWER, Folds
from .frame import Frame, turned

LEAST_VARIANCE, MOST_GAIN = 2.0**-40, 2.0**40  # in float32 no square of a state, and no quotient, overflows


def edge_of_keys(path: Tensor) -> Tensor:
    """The numbers `(..., keys)` at the last key of each key's block."""
    keys = path.shape[-1]
    place = torch.arange(keys, device=path.device)
    return path[..., (place - place % FOLD + FOLD - 1).clamp(max=keys - 1)]


def edge_of_queries(path: Tensor) -> Tensor:
    """The numbers `(..., queries)` at the first query of each query's block."""
    place = torch.arange(path.shape[-1], device=path.device)
    return path[..., place - place % FOLD]


def path_folds(inputs: KernelInputs, frame: Frame, order: Orders, present: Tensor | None) -> Folds:
    """The folds of a call with a path. No tensor is read on the host."""
    assert inputs.key_path is not None
    assert inputs.query_path is not None
    key_path, query_path = inputs.key_path.double(), inputs.query_path.double()
    _, inverse_freedom, eta2, *_ = (x.double()[:, None] for x in inputs.scalars)

    to_edge = edge_of_keys(key_path) - key_path
    factors = torch.exp(-to_edge[0].clamp(min=0.0))
    variance = (edge_of_keys(key_path[1]) - factors.square() * (key_path[1] - eta2)).clamp(min=0.0)
    of_keys = [variance]
    from_edge = query_path - edge_of_queries(query_path)
    decay = torch.exp(-from_edge[0].clamp(min=0.0))
    of_queries = [decay, query_path[1] - decay.square() * edge_of_queries(query_path[1])]
    if inputs.key_bias is not None:
        of_keys.append(to_edge[2] + inputs.key_bias)
        of_queries.append(from_edge[2])

    factors = factors.float().contiguous()
    cos, sin = (inputs.key_cos, inputs.key_sin) if inputs.rotate_values else (None, None)
    key, key_norm = turned(inputs.key, inputs.key_cos, inputs.key_sin, inputs.key_groups, inverse=True, factors=factors)
    value, _ = turned(inputs.value, cos, sin, inputs.key_groups, inverse=True, factors=factors)
    counts, first = _folded_blocks(inputs, frame, order, present)
    return Folds(
        key,
        value,
        torch.stack(of_queries, dim=2).float(),
        -0.5 * (key_norm + (variance / inverse_freedom).float()),
        torch.stack(of_keys, dim=2).float(),
        None,
        counts,
        first,
        factors,
        _least_gain(inputs),
    )


def _folded_blocks(inputs: KernelInputs, frame: Frame, order: Orders, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """`Folds.nearest` and `Folds.blocks`."""
    assert order.key_order is not None
    assert order.query_order is not None
    batch, heads = inputs.query.shape[:2]
    blocks = inputs.key.shape[2] // FOLD
    last_keys, first_queries = order.key_order[:, FOLD - 1 :: FOLD], order.query_order[:, ::FOLD]
    block = torch.arange(blocks, device=last_keys.device)
    earlier = last_keys[:, None, :] <= first_queries[:, :, None]
    if present is not None:  # absent keys may have any time
        earlier = earlier & (block < present[:, None, None])
    good = _heads_that_fold(inputs, frame) & _is_sorted(inputs, order)
    counts = torch.where(good[..., None], earlier.sum(-1)[:, None], 0)
    first = (counts[..., None, :] <= block[:, None]).sum(-1)
    shape = (batch, heads, -1)
    return tuple(x.to(torch.int32).expand(shape).contiguous() for x in (counts, first))  # type: ignore[return-value]


def _heads_that_fold(inputs: KernelInputs, frame: Frame) -> Tensor:
    """`(batch, heads)`: c is small, and squared states and variances are of like size."""
    assert inputs.key_path is not None
    assert inputs.query_path is not None
    power, inverse_freedom, eta2, floor, gamma2, _ = inputs.scalars
    least = _least_gain(inputs)
    greatest = (inputs.key_path[1].amax(-1) + inputs.query_path[1].amax(-1) + eta2 + floor + gamma2) / inverse_freedom
    largest = torch.where(frame.query_norm.isnan(), 0.0, frame.query_norm).amax(-1)
    good = (power <= MOST_POWER) & (floor >= LEAST_VARIANCE) & (least >= LEAST_VARIANCE) & (greatest <= MOST_GAIN)
    return good & (largest * LEAST_GAIN <= least) & (largest >= LEAST_RESIDUAL * (least + eta2 / inverse_freedom))


def _least_gain(inputs: KernelInputs) -> Tensor:
    """No `(Sigma + gamma^2) / W` of a head is less."""
    _, inverse_freedom, _, floor, gamma2, _ = inputs.scalars
    return ((floor + gamma2) / inverse_freedom).float()


def _is_sorted(inputs: KernelInputs, order: Orders) -> Tensor:
    """`(b, 1 or heads)`: neither present keys nor queries fall in time, nor does C rise."""
    assert order.key_order is not None
    assert order.query_order is not None
    known = None if inputs.key_groups is None else inputs.key_groups[:, 1:] >= 0
    rises = order.key_order.diff() >= 0
    good = (rises if known is None else rises | ~known).all(-1) & (order.query_order.diff() >= 0).all(-1)
    good = good[:, None]
    if inputs.key_bias is not None:
        assert inputs.key_path is not None
        assert inputs.query_path is not None
        falls = inputs.key_path[2].diff() <= 0.0
        falls = falls if known is None else falls | ~known[:, None]
        good = good & falls.all(-1) & (inputs.query_path[2].diff() <= 0.0).all(-1)
    return good
