"""Gradients of the query and of the prior: the sums over the keys of each query, and over lags and keys."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rfa.ops.kernel import KernelInputs

from .arguments import SMALL, Orders, batched, choices, query_blocks, row_ranges, unit
from .fold_constants import FOLD, TERMS, constant
from .fold_numbers import Folds, fold_arguments, fold_choices
from .fold_scales import FoldScales
from .frame import Frame, gradient_of, out_of_frame
from .incoming import Incoming
from .lag_gradients import LagSums, distances, sum_of_programs
from .path_fold_gradients import PathSums, edge_gradients

_PARTIAL_SUMS = 2**26  # numbers of lag tables or key paths held at once: 256 or 512 MB


class PathGradients(NamedTuple):
    """Gradients of a path's numbers in `KernelInputs`, in their shapes and dtypes; and sums of folded tiles, if any."""

    key_path: Tensor
    query_path: Tensor
    key_bias: Tensor | None
    scalars: Tensor
    folded: PathSums | None


def query_gradients(
    inputs: KernelInputs,
    order: Orders,
    frame: Frame,
    folds: Folds | None,
    prior: tuple[Tensor | None, ...],
    incoming: Incoming,
    scales: FoldScales | None,
    prior_gradient: bool,
) -> tuple[Tensor, LagSums | PathGradients | None]:
    """Gradients of the query and, if wanted, what the prior's are made from.

    Each program adds up the gradients of lags or keys for its own rows, and the programs are added in float64. The
    traffic is 12 to 32 bytes for each `blocks.rows` pairs, against some 80 operations a pair. The sums of a long
    sequence would take O(length^2) memory, so blocks of queries are launched in turns that fit `_PARTIAL_SUMS`.
    """
    from .kernels.query_gradient import query_gradient_kernel

    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    uniform = inputs.tables is not None
    blocks = query_blocks(inputs)
    ranges = row_ranges(inputs, order, blocks)
    row_blocks, column_blocks = -(-queries // blocks.rows), -(-keys // blocks.columns)
    first_window = (queries - keys) // blocks.columns if inputs.causal else -column_blocks
    windows = row_blocks * (blocks.rows // blocks.columns) - first_window
    new = partial(torch.empty, dtype=torch.float32, device=inputs.query.device)
    zeros = partial(torch.zeros, dtype=torch.float32, device=inputs.query.device)
    gradient = gradient_of(inputs.query, inputs.query_cos)
    parts = (3, windows * blocks.columns) if uniform else (2 if inputs.key_bias is None else 4, keys)
    launched, path, scalars, polynomials, of_rows, at_queries = row_blocks, None, None, None, None, None
    apart, whole = distances(queries, keys), keys // FOLD
    of_pairs, of_tiles = _Total(), _Total()  # of lags or keys, and of folded tiles
    if prior_gradient:
        numbers = parts[0] * parts[1]
        if folds is not None and uniform:
            numbers += apart * TERMS * (TERMS + 1)
            polynomials = constant("rows", gradient.device)
        elif folds is not None:
            numbers += 3 * whole
            of_rows = new(batch, heads, 3, queries)
            at_queries = new(batch, heads, 3, row_blocks, dtype=torch.float64)
        launched = max(1, min(row_blocks, _PARTIAL_SUMS // (batch * heads * numbers)))
        scalars = new(batch, heads, inputs.scalars.shape[0], queries)
        path = None if uniform else new(batch, heads, 3, queries, dtype=torch.float64)
    for start in range(0, row_blocks, launched):
        count = min(launched, row_blocks - start)
        partial_sums = partial_moments = between = None
        if prior_gradient:
            partial_sums = zeros(batch, heads, count, *parts, dtype=torch.float32 if uniform else torch.float64)
            if folds is not None and uniform:
                partial_moments = zeros(batch, heads, count, apart, TERMS, TERMS + 1)
            elif folds is not None:
                between = zeros(batch, heads, count, whole, 3)
        query_gradient_kernel[(count * batch * heads,)](
            *frame,
            *incoming,
            gradient,
            path,
            scalars,
            partial_sums,
            partial_moments,
            *prior,
            *order[:4],
            ranges,
            *fold_arguments(folds),
            polynomials,
            apart,
            of_rows,
            between,
            *((None, None) if scales is None else scales[:2]),
            heads,
            queries,
            keys,
            inputs.lags,
            row_blocks,
            *batched(inputs, order),
            start,
            count,
            first_window,
            windows,
            ROWS=blocks.rows,
            COLUMNS=blocks.columns,
            PRIOR=prior_gradient,
            **choices(inputs, order, ranges),
            **fold_choices(folds),
            **blocks.options,
        )
        if partial_sums is not None:
            of_pairs.add(sum_of_programs(partial_sums) if uniform else partial_sums.sum(2, dtype=torch.float64))
        if partial_moments is not None:
            of_tiles.add(sum_of_programs(partial_moments))
        if at_queries is not None and between is not None:
            at_queries[..., start : start + count], of_edges = edge_gradients(inputs, between.flip(2), start)
            of_tiles.add(of_edges)
    query = out_of_frame(gradient, inputs.query, inputs.query_cos, inputs.query_sin)
    if of_pairs.sum is None or scalars is None:
        return query, None
    if path is None:
        first_lag = keys - queries + first_window * blocks.columns
        return query, LagSums(of_pairs.sum, first_lag, scalars, of_tiles.sum)
    folded = None
    if of_rows is not None and at_queries is not None and of_tiles.sum is not None:
        folded = PathSums(of_rows, at_queries, of_tiles.sum)
    return query, _of_path(inputs, of_pairs.sum, path, scalars, folded)


class _Total:
    """A sum of tensors, None before the first."""

    sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        self.sum = part if self.sum is None else self.sum.add_(part)


def _of_path(
    inputs: KernelInputs, of_keys: Tensor, of_queries: Tensor, scalars: Tensor, folded: PathSums | None
) -> PathGradients:
    """From sums for each key `(batch, heads, 2 or 4, keys)` and each query `(batch, heads, 3, queries)`, float64."""
    assert inputs.key_path is not None
    assert inputs.query_path is not None
    by_head = scalars.sum((0, 3), dtype=torch.float64).T
    by_head[1:2] *= unit(inputs)  # no list becomes a tensor: a CUDA graph cannot copy from the host
    by_head[2:5] *= 1 / SMALL
    of_keys[:, :, :2] /= SMALL
    of_queries[:, :, :2] /= SMALL
    bias = None
    if inputs.key_bias is not None:
        bias = of_batch(of_keys[:, :, 3], inputs.key_bias.shape[0]).to(inputs.key_bias.dtype)
    key_path, query_path = path_gradient(of_keys, inputs.key_path), path_gradient(of_queries, inputs.query_path)
    return PathGradients(key_path, query_path, bias, by_head.to(inputs.scalars.dtype).contiguous(), folded)


def path_gradient(gradient: Tensor, path: Tensor) -> Tensor:
    """`(batch, heads, 2 or more, length)` in the shape of the path."""
    return of_batch(gradient[:, :, : path.shape[0]], path.shape[1]).permute(2, 0, 1, 3).contiguous()


def of_batch(gradient: Tensor, batch: int) -> Tensor:
    """Summed over the batch where it shares what the gradient is of."""
    return (gradient if batch == gradient.shape[0] else gradient.sum(0, keepdim=True)).contiguous()
