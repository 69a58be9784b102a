"""The backward pass on the host: two kernels, each the only writer of its outputs, so that gradients are repeatable."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernel import KernelInputs
from .arguments import (
    LINEAR_ROWS,
    SMALL,
    Frame,
    Orders,
    batched,
    block_ranges,
    choices,
    forward_blocks,
    key_blocks,
    orders,
    prior_arguments,
    query_blocks,
    to_frame,
    turned,
    unit,
    whole_ranges,
)
from .fold_constants import TERMS, constant
from .fold_gradients import FoldGradients, distances, fold_gradients
from .folds import Folds, fold_arguments, fold_choices, folds_of

_PARTIAL_SUMS = 2**26  # numbers of lag tables or key paths held at once: 256 or 512 MB


class Incoming(NamedTuple):
    """For each row: the gradient of the estimate in the frame; `log2 sum_j 2^z` and the terms that gradients of scores
    subtract, each as two float32.
    """

    grad_out: Tensor
    log_sum: Tensor
    log_sum_rest: Tensor
    delta: Tensor
    delta_rest: Tensor


class PriorGradients(NamedTuple):
    """Gradients of the prior's numbers in `KernelInputs`, in their shapes and dtypes; None where it has none."""

    tables: Tensor | None
    key_path: Tensor | None
    query_path: Tensor | None
    key_bias: Tensor | None
    scalars: Tensor | None


def backward(
    inputs: KernelInputs, grad_out: Tensor, grad_log_sum: Tensor, out: Tensor, log_sum: Tensor, prior_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, PriorGradients]:
    """Gradients of query, key and value and, if wanted, of the prior."""
    if inputs.empty:
        parts = (inputs.tables, inputs.key_path, inputs.query_path, inputs.key_bias, inputs.scalars)
        zeros = (p if p is None else p.new_zeros(p.shape) for p in parts)
        query, key, value = (x.new_zeros(x.shape) for x in (inputs.query, inputs.key, inputs.value))
        return query, key, value, PriorGradients(*zeros)
    order, prior = orders(inputs), prior_arguments(inputs)
    frame = to_frame(inputs)
    folds = folds_of(inputs, frame)
    if folds is not None:  # a poisoned row's log sum is NaN, and that of a row that sees a poisoned key
        frame = frame._replace(query_norm=_known(frame.query_norm))
        folds = folds._replace(columns=_known(folds.columns))
    incoming = _incoming(inputs, grad_out, grad_log_sum, out, log_sum)
    with torch.cuda.device_of(inputs.query):
        _sharpen(inputs, order, frame, folds, prior, incoming, log_sum)
        query, gradients, moments = _query_gradients(inputs, order, frame, folds, prior, incoming, prior_gradient)
        key, value, factor, constant = _key_gradients(inputs, order, frame, folds, prior, incoming)
        if folds is not None and moments is not None and factor is not None and constant is not None:
            of_folds = fold_gradients(inputs, folds, FoldGradients(moments, factor, constant))
            gradients = _with_folds(gradients, *of_folds)
    return query, key, value, gradients


def _known(norm: Tensor) -> Tensor:
    return torch.where(norm.isnan(), 0.0, norm)


def _with_folds(gradients: PriorGradients, tables: Tensor, power: Tensor) -> PriorGradients:
    assert gradients.tables is not None
    assert gradients.scalars is not None
    scalars = gradients.scalars + power.to(gradients.scalars.dtype)
    return gradients._replace(tables=gradients.tables + tables.float(), scalars=scalars)


def _incoming(inputs: KernelInputs, grad_out: Tensor, grad_log_sum: Tensor, out: Tensor, log_sum: Tensor) -> Incoming:
    from .kernels.frame import delta_kernel

    batch, heads, queries, channels = out.shape
    high, rest, delta, delta_rest = (torch.empty_like(log_sum, dtype=torch.float32) for _ in range(4))
    blocks = -(-queries // LINEAR_ROWS)
    with torch.cuda.device_of(out):
        delta_kernel[(blocks * batch * heads,)](
            grad_out,
            out,
            grad_log_sum.to(torch.float32).contiguous(),
            log_sum,
            high,
            rest,
            delta,
            delta_rest,
            *grad_out.stride(),
            heads,
            queries,
            blocks,
            CHANNELS=channels,
            BLOCK=LINEAR_ROWS,
        )
    cos, sin = (inputs.query_cos, inputs.query_sin) if inputs.rotate_values else (None, None)
    grad_out, norm = turned(grad_out, cos, sin, None, inverse=True, dtype=inputs.query.dtype)
    high = torch.where(norm.isnan() & (high < torch.inf), norm, high)  # beyond float16's range once it is turned
    return Incoming(grad_out, high, rest, delta, delta_rest)


def _sharpen(
    inputs: KernelInputs,
    order: Orders,
    frame: Frame,
    folds: Folds | None,
    prior: tuple[Tensor | None, ...],
    incoming: Incoming,
    log_sum: Tensor,
) -> None:
    """Rewrite what `incoming` holds of rows that need more digits."""
    from .kernels.sharp import sharpen_kernel

    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    blocks = forward_blocks(
        max(inputs.query.shape[-1], inputs.value.shape[-1]), inputs.query.dtype, inputs.tables is not None
    )
    ranges = block_ranges(order, queries, keys, blocks.rows, blocks.columns)
    row_ranges = None if ranges is None else whole_ranges(ranges[0], batch)
    row_blocks = -(-queries // blocks.rows)
    sharpen_kernel[(row_blocks * batch * heads,)](
        *frame,
        *incoming,
        log_sum,
        *prior,
        *order[:4],
        row_ranges,
        *fold_arguments(folds),
        heads,
        queries,
        keys,
        inputs.lags,
        row_blocks,
        *batched(inputs, order),
        ROWS=blocks.rows,
        COLUMNS=blocks.columns,
        **choices(inputs, order, row_ranges),
        **fold_choices(folds),
        EVERY=inputs.query.dtype != torch.float32,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def _query_gradients(
    inputs: KernelInputs,
    order: Orders,
    frame: Frame,
    folds: Folds | None,
    prior: tuple[Tensor | None, ...],
    incoming: Incoming,
    prior_gradient: bool,
) -> tuple[Tensor, PriorGradients, Tensor | None]:
    """Gradients of the query and of the prior, and the moments of `FoldGradients` where there are folds.

    Each program adds up the gradients of lags or keys for its own rows, and the host adds the programs in float64. The
    traffic is 12 to 32 bytes for each `blocks.rows` pairs, against some 80 operations a pair. The sums of a long
    sequence would take O(length^2) memory, so blocks of queries are launched in turns that fit `_PARTIAL_SUMS`.
    """
    from .kernels.query_gradient import query_gradient_kernel

    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    uniform = inputs.tables is not None
    blocks = query_blocks(max(inputs.query.shape[-1], inputs.value.shape[-1]), inputs.query.dtype, uniform)
    ranges = block_ranges(order, queries, keys, blocks.rows, blocks.columns)
    row_ranges = None if ranges is None else whole_ranges(ranges[0], batch)
    row_blocks, column_blocks = -(-queries // blocks.rows), -(-keys // blocks.columns)
    first_window = (queries - keys) // blocks.columns if inputs.causal else -column_blocks
    windows = row_blocks * (blocks.rows // blocks.columns) - first_window
    new = partial(torch.empty, device=inputs.query.device)
    gradient = _gradient_of(inputs.query, inputs.query_cos)
    parts = (3, windows * blocks.columns) if uniform else (2 if inputs.key_bias is None else 4, keys)
    launched, path, scalars, sums, moments, polynomials = row_blocks, None, None, None, None, None
    apart = distances(queries, keys)
    if prior_gradient:
        numbers = parts[0] * parts[1]
        if folds is not None:
            numbers += apart * TERMS**2
            polynomials = constant("rows", gradient.device)
            moments = torch.zeros(heads, apart, TERMS, TERMS, dtype=torch.float64, device=gradient.device)
        launched = max(1, min(row_blocks, _PARTIAL_SUMS // (batch * heads * numbers)))
        scalars = new(batch, heads, inputs.scalars.shape[0], queries)
        path = None if uniform else new(batch, heads, 3, queries, dtype=torch.float64)
        sums = torch.zeros(batch, heads, *parts, dtype=torch.float64, device=gradient.device)
    for start in range(0, row_blocks, launched):
        count = min(launched, row_blocks - start)
        partial_sums = partial_moments = None
        if moments is not None:
            partial_moments = torch.zeros(batch, heads, count, *moments.shape[1:], device=gradient.device)
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
            row_ranges,
            *fold_arguments(folds),
            polynomials,
            apart,
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
            **choices(inputs, order, row_ranges),
            **fold_choices(folds),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        if sums is not None and partial_sums is not None:
            sums += partial_sums.sum(2, dtype=torch.float64)
        if moments is not None and partial_moments is not None:
            moments += partial_moments.sum((0, 2), dtype=torch.float64)
    query = _out_of_frame(gradient, inputs.query, inputs.query_cos, inputs.query_sin)
    if sums is None or scalars is None:
        return query, PriorGradients(None, None, None, None, None), None
    by_head = scalars.sum((0, 3), dtype=torch.float64).T
    units = by_head.new_tensor([1.0, unit(inputs), *[1 / SMALL] * 3, 1.0])[: len(by_head)]
    by_head = (units[:, None] * by_head).to(inputs.scalars.dtype).contiguous()
    if inputs.key_path is None or inputs.query_path is None or path is None:
        tables = _fold(sums.sum(0), keys - queries + first_window * blocks.columns, keys)
        tables = F.pad(tables, (0, inputs.lags - keys))
        return query, PriorGradients(tables, None, None, None, by_head), moments
    sums[:, :, :2] /= SMALL
    path[:, :, :2] /= SMALL
    bias = None
    if inputs.key_bias is not None:
        bias = _of_batch(sums[:, :, 3], inputs.key_bias.shape[0]).to(inputs.key_bias.dtype)
    key_path, query_path = _path_gradient(sums, inputs.key_path), _path_gradient(path, inputs.query_path)
    return query, PriorGradients(None, key_path, query_path, bias, by_head), None


def _key_gradients(
    inputs: KernelInputs,
    order: Orders,
    frame: Frame,
    folds: Folds | None,
    prior: tuple[Tensor | None, ...],
    incoming: Incoming,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of key and value, and of F and C at each key, summed over the batch, where there are folds."""
    from .kernels.key_gradient import key_gradient_kernel

    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    gradient = _gradient_of(inputs.key, inputs.key_cos)
    value_cos, value_sin = (inputs.key_cos, inputs.key_sin) if inputs.rotate_values else (None, None)
    value_gradient = _gradient_of(inputs.value, value_cos)
    blocks = key_blocks(
        max(inputs.query.shape[-1], inputs.value.shape[-1]), inputs.query.dtype, inputs.tables is not None
    )
    factor = constant = None
    if folds is not None:
        factor, constant = gradient.new_empty(2, batch, heads, keys, dtype=torch.float32)
    column_blocks = -(-keys // blocks.columns)
    ranges = block_ranges(order, queries, keys, blocks.rows, blocks.columns)
    column_ranges = None if ranges is None else whole_ranges(ranges[1], batch)
    key_gradient_kernel[(column_blocks * batch * heads,)](
        *frame,
        *incoming,
        incoming.log_sum + incoming.log_sum_rest,
        incoming.delta + incoming.delta_rest,
        gradient,
        value_gradient,
        factor,
        constant,
        *prior,
        *order[:4],
        column_ranges,
        *fold_arguments(folds),
        heads,
        queries,
        keys,
        inputs.lags,
        column_blocks,
        *batched(inputs, order),
        ROWS=blocks.rows,
        COLUMNS=blocks.columns,
        **choices(inputs, order, column_ranges),
        **fold_choices(folds),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    key = _out_of_frame(gradient, inputs.key, inputs.key_cos, inputs.key_sin)
    value = _out_of_frame(value_gradient, inputs.value, value_cos, value_sin)
    if factor is None or constant is None:
        return key, value, None, None
    return key, value, factor.sum(0, dtype=torch.float64), constant.sum(0, dtype=torch.float64)


def _gradient_of(states: Tensor, cos: Tensor | None) -> Tensor:
    """Room for a gradient in the frame: float32 where it is still to be turned."""
    dtype = states.dtype if cos is None else torch.float32
    return torch.empty(states.shape, dtype=dtype, device=states.device)


def _out_of_frame(gradient: Tensor, states: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None:
        return gradient
    return turned(gradient, cos, sin, None, inverse=False, dtype=states.dtype)[0]


def _fold(sums: Tensor, first_lag: int, keys: int) -> Tensor:
    """Sums `(heads, 3, lags)` over the signed lags from `first_lag <= 0` on become those over `|lag| < keys`."""
    ahead = sums[..., -first_lag : keys - first_lag]
    ahead = F.pad(ahead, (0, keys - ahead.shape[-1]))
    behind = sums[..., :-first_lag].flip(-1)[..., : keys - 1] if first_lag else sums[..., :0]
    folded = ahead + F.pad(behind, (1, keys - 1 - behind.shape[-1]))
    return folded.transpose(0, 1).to(torch.float32).contiguous()


def _path_gradient(gradient: Tensor, path: Tensor) -> Tensor:
    """`(batch, heads, 2 or more, length)` in the shape of the path."""
    return _of_batch(gradient[:, :, : path.shape[0]], path.shape[1]).permute(2, 0, 1, 3).contiguous()


def _of_batch(gradient: Tensor, batch: int) -> Tensor:
    """Summed over the batch where it shares what the gradient is of."""
    return (gradient if batch == gradient.shape[0] else gradient.sum(0, keepdim=True)).contiguous()
