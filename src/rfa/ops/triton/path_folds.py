"""Folds at times that are not uniform: the numbers of queries, keys and edges, and which blocks fold.

The formulas are in `kernels/path_folds.py`.
"""

import torch
from torch import Tensor

from ..kernel import KernelInputs
from .arguments import Orders
from .fold_constants import FOLD
from .fold_numbers import LEAST_GAIN, LEAST_RESIDUAL, MOST_POWER, Folds
from .frame import Frame, to_frame_and_folds

LEAST_VARIANCE, MOST_GAIN = 2.0**-40, 2.0**40  # in float32 no square of a state, and no quotient, overflows
MOST_RATIO = 2.0**12  # of eta^2 over the least `Sigma + gamma^2`, in float16
LEAST_FLOOR = 2.0**-18  # of sigma_0^2 over the greatest u where u falls: V_ab is right to that share of u


def edge_of_keys(path: Tensor) -> Tensor:
    """The numbers `(..., keys)` at the last key of each key's block."""
    keys = path.shape[-1]
    place = torch.arange(keys, device=path.device)
    return path[..., (place - place % FOLD + FOLD - 1).clamp(max=keys - 1)]


def edge_of_queries(path: Tensor) -> Tensor:
    """The numbers `(..., queries)` at the first query of each query's block."""
    place = torch.arange(path.shape[-1], device=path.device)
    return path[..., place - place % FOLD]


def path_folds(inputs: KernelInputs, order: Orders, present: Tensor | None, *, known: bool) -> tuple[Frame, Folds]:
    """The states in the frame, and the folds of a call with a path. No tensor is read on the host."""
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

    factors, constants = factors.float().contiguous(), (variance / inverse_freedom).float().contiguous()
    frame, states = to_frame_and_folds(inputs, factors, constants, known=known)
    counts, first = _folded_blocks(inputs, frame, order, present)
    folds = Folds(
        states.key,
        states.value,
        torch.stack(of_queries, dim=2).float(),
        states.columns,
        torch.stack(of_keys, dim=2).float(),
        None,
        counts,
        first,
        factors,
        _least_gain(inputs),
    )
    return frame, folds


def _folded_blocks(inputs: KernelInputs, frame: Frame, order: Orders, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """`Folds.nearest` and `Folds.blocks`."""
    assert order.key_order is not None
    assert order.query_order is not None
    batch, heads = inputs.query.shape[:2]
    last_keys, first_queries = order.key_order[:, FOLD - 1 :: FOLD], order.query_order[:, ::FOLD]
    block = torch.arange(last_keys.shape[1], device=last_keys.device)
    if present is not None:  # absent keys may have any time
        last_keys = torch.where(block < present[:, None], last_keys, torch.iinfo(torch.int32).max)
    last_keys, first_queries = (x.expand(batch, -1).contiguous() for x in (last_keys, first_queries))
    earlier = torch.searchsorted(last_keys, first_queries, right=True)  # of sorted times
    good = _heads_that_fold(inputs, frame) & _is_sorted(inputs, order)
    counts = torch.where(good[..., None], earlier[:, None], 0).expand(batch, heads, -1).contiguous()
    first = torch.searchsorted(counts, block.expand(batch, heads, -1).contiguous(), right=True)
    return counts.to(torch.int32), first.to(torch.int32)


def _heads_that_fold(inputs: KernelInputs, frame: Frame) -> Tensor:
    """`(batch, heads)`: c is small, and squared states and variances are of like size."""
    assert inputs.key_path is not None
    assert inputs.query_path is not None
    power, inverse_freedom, eta2, floor, gamma2, _ = inputs.scalars
    least = _least_gain(inputs)
    greatest = (inputs.key_path[1].amax(-1) + inputs.query_path[1].amax(-1) + eta2 + floor + gamma2) / inverse_freedom
    largest = torch.where(frame.query_norm.isnan(), 0.0, frame.query_norm).amax(-1)
    good = (power <= MOST_POWER) & (floor >= LEAST_VARIANCE) & (least >= LEAST_VARIANCE) & (greatest <= MOST_GAIN)
    if inputs.query.dtype == torch.float16:  # or gradients of scores would be too small for it: see `fold_scales`
        good = good & (eta2 / inverse_freedom <= MOST_RATIO * least)
    return good & (largest * LEAST_GAIN <= least) & (largest >= LEAST_RESIDUAL * (least + eta2 / inverse_freedom))


def _least_gain(inputs: KernelInputs) -> Tensor:
    """No `(Sigma + gamma^2) / W` of a head is less."""
    _, inverse_freedom, _, floor, gamma2, _ = inputs.scalars
    return ((floor + gamma2) / inverse_freedom).float()


def _is_sorted(inputs: KernelInputs, order: Orders) -> Tensor:
    """`(b, 1 or heads)`: no present key or query falls in time, C does not rise, u falls only beside large floors."""
    assert order.key_order is not None
    assert order.query_order is not None
    assert inputs.key_path is not None
    assert inputs.query_path is not None
    absent = torch.zeros_like(order.key_order[:, 1:], dtype=torch.bool)
    if inputs.key_groups is not None:
        absent = inputs.key_groups[:, 1:] < 0
    good = ((order.key_order.diff() >= 0) | absent).all(-1) & (order.query_order.diff() >= 0).all(-1)
    variance, at_queries = inputs.key_path[1], inputs.query_path[1]
    rises = ((variance.diff() >= 0.0) | absent[:, None]).all(-1) & (at_queries.diff() >= 0.0).all(-1)
    floor = inputs.scalars[3]
    good = good[:, None] & (rises | (floor >= LEAST_FLOOR * variance.amax(-1).maximum(at_queries.amax(-1))))
    if inputs.key_bias is not None:
        falls = ((inputs.key_path[2].diff() <= 0.0) | absent[:, None]).all(-1)
        good = good & falls & (inputs.query_path[2].diff() <= 0.0).all(-1)
    return good
