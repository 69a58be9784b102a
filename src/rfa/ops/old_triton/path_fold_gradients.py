"""The gradients of a path from the sums of folded tiles: M, u and C of queries, keys and their edges.

A difference such as `M_i - M_a` has one gradient, which is added to the first and subtracted from the second as one
float64. So what is later multiplied by large times cancels to the lag, however the sums were rounded.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.ops.kernel import KernelInputs

from .fold_constants import FOLD


class PathSums(NamedTuple):
    """Sums of the query kernel over folded tiles.

    Fields:
        rows: of `M_i - M_a`, V_i and `C_i - C_a`, `(batch, heads, 3, queries)` float32.
        edges_of_queries: of M, u and C at the first query of each block, `(batch, heads, 3, blocks)` float64.
        edges_of_keys: the same at the last key of each whole block.
    """

    rows: Tensor
    edges_of_queries: Tensor
    edges_of_keys: Tensor


class PathFoldGradients(NamedTuple):
    """What folded tiles add, in float64: `(batch, heads, 3, length)`, `(batch, heads, keys)` and `(heads,)`."""

    key_path: Tensor
    query_path: Tensor
    key_bias: Tensor | None
    eta2: Tensor


def edge_of_keys(path: Tensor) -> Tensor:
    """The numbers `(..., keys)` at the last key of each key's block."""
    keys = path.shape[-1]
    place = torch.arange(keys, device=path.device)
    return path[..., (place - place % FOLD + FOLD - 1).clamp(max=keys - 1)]


def edge_of_queries(path: Tensor) -> Tensor:
    """The numbers `(..., queries)` at the first query of each query's block."""
    place = torch.arange(path.shape[-1], device=path.device)
    return path[..., place - place % FOLD]


def edge_gradients(inputs: KernelInputs, between: Tensor, first_block: int) -> tuple[Tensor, Tensor]:
    """Gradients at the edges of some blocks of queries, and at those of all whole blocks of keys.

    `between` `(batch, heads, blocks of queries, blocks of keys, 3)`: of `M_a - M_b`, V_ab and `C_a - C_b`.
    """
    assert inputs.key_path is not None
    assert inputs.query_path is not None
    to_decay, to_variance, to_bias = between.double().unbind(-1)
    at_queries = inputs.query_path[..., ::FOLD][..., first_block : first_block + between.shape[2]].double()
    at_keys = inputs.key_path[..., FOLD - 1 :: FOLD].double()
    square = torch.exp(-2.0 * (at_queries[0][..., :, None] - at_keys[0][..., None, :]).clamp(min=0.0))
    to_earlier = square * to_variance
    to_decay = to_decay + 2.0 * at_keys[1][..., None, :] * to_earlier
    of_queries = torch.stack([to_decay.sum(-1), to_variance.sum(-1), to_bias.sum(-1)], dim=2)
    return of_queries, -torch.stack([to_decay.sum(-2), to_earlier.sum(-2), to_bias.sum(-2)], dim=2)


def path_fold_gradients(inputs: KernelInputs, of_queries: PathSums, of_keys: Tensor) -> PathFoldGradients:
    """What folded tiles add to the gradients of the prior.

    `of_keys` `(2 or 3, batch, heads, keys)`: sums of the key kernel, of log E_j, V_j and the key's bias.
    """
    assert inputs.key_path is not None
    assert inputs.query_path is not None
    key_path, query_path, eta2 = (
        inputs.key_path.double(),
        inputs.query_path.double(),
        inputs.scalars[2, :, None].double(),
    )

    to_decay, to_variance, to_bias = of_queries.rows.double().unbind(2)
    variance = edge_of_queries(query_path[1])
    to_edge = torch.exp(-2.0 * (query_path[0] - edge_of_queries(query_path[0])).clamp(min=0.0)) * to_variance
    to_decay = to_decay + 2.0 * variance * to_edge
    to_queries = torch.stack([to_decay, to_variance, to_bias], dim=2)
    at_edges = of_queries.edges_of_queries - _of_blocks(torch.stack([to_decay, to_edge, to_bias], dim=2))
    to_queries[..., ::FOLD] += at_edges

    square = torch.exp(-2.0 * (edge_of_keys(key_path[0]) - key_path[0]).clamp(min=0.0))
    of_decay, to_variance, *of_bias = of_keys.double()
    to_key = square * to_variance
    to_decay = 2.0 * (key_path[1] - eta2) * to_key - of_decay
    to_bias = of_bias[0] if of_bias else torch.zeros_like(to_key)
    to_keys = -torch.stack([to_decay, to_key, to_bias], dim=2)
    whole = inputs.key.shape[2] // FOLD
    at_edges = of_queries.edges_of_keys + _of_blocks(torch.stack([to_decay, to_variance, to_bias], dim=2))[..., :whole]
    to_keys[..., FOLD - 1 :: FOLD] += at_edges
    return PathFoldGradients(to_keys, to_queries, to_bias if of_bias else None, to_key.sum((0, 2)))


def _of_blocks(x: Tensor) -> Tensor:
    """Sums over each block, `(..., blocks)`."""
    return F.pad(x, (0, -x.shape[-1] % FOLD)).unflatten(-1, (-1, FOLD)).sum(-1)
