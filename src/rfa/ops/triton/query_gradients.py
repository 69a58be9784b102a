"""Gradients of the query and of the prior: the sums over the keys of each query, and over lags and keys."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernel import KernelInputs
from .arguments import SMALL, Orders, batched, choices, query_blocks, row_ranges, unit
from .fold_constants import FOLD, TERMS, constant
from .fold_gradients import distances
from .fold_numbers import Folds, fold_arguments, fold_choices
from .fold_scales import FoldScales
from .frame import Frame, gradient_of, out_of_frame
from .incoming import Incoming
from .path_fold_gradients import PathSums, edge_gradients

_PARTIAL_SUMS = 2**26  # numbers of lag tables or key paths held at once: 256 or 512 MB


class PriorGradients(NamedTuple):
    """Gradients of the prior's numbers in `KernelInputs`, in their shapes and dtypes; None where it has none."""

    tables: Tensor | None
    key_path: Tensor | None
    query_path: Tensor | None
    key_bias: Tensor | None
    scalars: Tensor | None


def query_gradients(
    inputs: KernelInputs,
    order: Orders,
    frame: Frame,
    folds: Folds | None,
    prior: tuple[Tensor | None, ...],
    incoming: Incoming,
    scales: FoldScales | None,
    prior_gradient: bool,
) -> tuple[Tensor, PriorGradients, Tensor | PathSums | None]:
    """Gradients of the query and of the prior and, where there are folds, the moments of `FoldGradients` or `PathSums`.

    Each program adds up the gradients of lags or keys for its own rows, and the host adds the programs in float64. The
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
    gradient = gradient_of(inputs.query, inputs.query_cos)
    parts = (3, windows * blocks.columns) if uniform else (2 if inputs.key_bias is None else 4, keys)
    launched, path, scalars, sums, polynomials = row_blocks, None, None, None, None
    moments = of_rows = at_queries = at_keys = None
    apart, whole = distances(queries, keys), keys // FOLD
    if prior_gradient:
        numbers = parts[0] * parts[1]
        if folds is not None and uniform:
            numbers += apart * TERMS * (TERMS + 1)
            polynomials = constant("rows", gradient.device)
            moments = torch.zeros(heads, apart, TERMS, TERMS + 1, dtype=torch.float64, device=gradient.device)
        elif folds is not None:
            numbers += 3 * whole
            of_rows = new(batch, heads, 3, queries)
            at_queries = new(batch, heads, 3, row_blocks, dtype=torch.float64)
            at_keys = torch.zeros(batch, heads, 3, whole, dtype=torch.float64, device=gradient.device)
        launched = max(1, min(row_blocks, _PARTIAL_SUMS // (batch * heads * numbers)))
        scalars = new(batch, heads, inputs.scalars.shape[0], queries)
        path = None if uniform else new(batch, heads, 3, queries, dtype=torch.float64)
        sums = torch.zeros(batch, heads, *parts, dtype=torch.float64, device=gradient.device)
    for start in range(0, row_blocks, launched):
        count = min(launched, row_blocks - start)
        partial_sums = partial_moments = between = None
        if moments is not None:
            partial_moments = torch.zeros(
                batch, heads, count, *moments.shape[1:], dtype=torch.float32, device=gradient.device
            )
        if of_rows is not None:
            between = torch.zeros(batch, heads, count, whole, 3, dtype=torch.float32, device=gradient.device)
        if sums is not None:
            dtype = torch.float32 if uniform else torch.float64
            partial_sums = torch.zeros(batch, heads, count, *parts, dtype=dtype, device=gradient.device)
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
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        if sums is not None and partial_sums is not None:
            sums += partial_sums.sum(2, dtype=torch.float64)
        if moments is not None and partial_moments is not None:
            moments += partial_moments.sum((0, 2), dtype=torch.float64)
        if at_queries is not None and at_keys is not None and between is not None:
            at_queries[..., start : start + count], of_keys = edge_gradients(inputs, between.flip(2), start)
            at_keys += of_keys
    query = out_of_frame(gradient, inputs.query, inputs.query_cos, inputs.query_sin)
    if sums is None or scalars is None:
        return query, PriorGradients(None, None, None, None, None), None
    by_head = scalars.sum((0, 3), dtype=torch.float64).T
    by_head[1:2] *= unit(inputs)  # no list becomes a tensor: a CUDA graph cannot copy from the host
    by_head[2:5] *= 1 / SMALL
    by_head = by_head.to(inputs.scalars.dtype).contiguous()
    if inputs.key_path is None or inputs.query_path is None or path is None:
        tables = _fold(sums.sum(0), keys - queries + first_window * blocks.columns, keys)
        tables = F.pad(tables, (0, inputs.lags - keys))
        if moments is not None:  # the last column is the low part of the first
            moments[..., 0] += moments[..., -1]
            moments = moments[..., :-1]
        return query, PriorGradients(tables, None, None, None, by_head), moments
    sums[:, :, :2] /= SMALL
    path[:, :, :2] /= SMALL
    bias = None
    if inputs.key_bias is not None:
        bias = of_batch(sums[:, :, 3], inputs.key_bias.shape[0]).to(inputs.key_bias.dtype)
    key_path, query_path = path_gradient(sums, inputs.key_path), path_gradient(path, inputs.query_path)
    of_folds = None
    if of_rows is not None and at_queries is not None and at_keys is not None:
        of_folds = PathSums(of_rows, at_queries, at_keys)
    return query, PriorGradients(None, key_path, query_path, bias, by_head), of_folds


def _fold(sums: Tensor, first_lag: int, keys: int) -> Tensor:
    """Sums `(heads, 3, lags)` over the signed lags from `first_lag <= 0` on become those over `|lag| < keys`."""
    ahead = sums[..., -first_lag : keys - first_lag]
    ahead = F.pad(ahead, (0, keys - ahead.shape[-1]))
    behind = sums[..., :-first_lag].flip(-1)[..., : keys - 1] if first_lag else sums[..., :0]
    folded = ahead + F.pad(behind, (1, keys - 1 - behind.shape[-1]))
    return folded.transpose(0, 1).to(torch.float32).contiguous()


def path_gradient(gradient: Tensor, path: Tensor) -> Tensor:
    """`(batch, heads, 2 or more, length)` in the shape of the path."""
    return of_batch(gradient[:, :, : path.shape[0]], path.shape[1]).permute(2, 0, 1, 3).contiguous()


def of_batch(gradient: Tensor, batch: int) -> Tensor:
    """Summed over the batch where it shares what the gradient is of."""
    return (gradient if batch == gradient.shape[0] else gradient.sum(0, keepdim=True)).contiguous()
