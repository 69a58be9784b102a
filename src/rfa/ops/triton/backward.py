"""The backward pass on the host: two kernels, each the only writer of its outputs, so that gradients are repeatable."""

import torch
from torch import Tensor

from ..kernel import KernelInputs
from .arguments import (
    Frame,
    Orders,
    batched,
    choices,
    column_ranges,
    gradient_of,
    key_blocks,
    orders,
    out_of_frame,
    prior_arguments,
    to_frame,
)
from .fold_gradients import FoldGradients, fold_gradients
from .folds import Folds, fold_arguments, fold_choices, folds_of
from .incoming import Incoming, incoming_of, sharpen
from .query_gradients import PriorGradients, query_gradients


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
    incoming = incoming_of(inputs, grad_out, grad_log_sum, out, log_sum)
    with torch.cuda.device_of(inputs.query):
        sharpen(inputs, order, frame, folds, prior, incoming, log_sum)
        query, gradients, moments = query_gradients(inputs, order, frame, folds, prior, incoming, prior_gradient)
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
    gradient = gradient_of(inputs.key, inputs.key_cos)
    value_cos, value_sin = (inputs.key_cos, inputs.key_sin) if inputs.rotate_values else (None, None)
    value_gradient = gradient_of(inputs.value, value_cos)
    blocks = key_blocks(inputs)
    log_sum = delta = factor = constant = None
    if folds is not None:
        log_sum, delta = incoming.log_sum + incoming.log_sum_rest, incoming.delta + incoming.delta_rest
        factor, constant = gradient.new_empty(2, batch, heads, keys, dtype=torch.float32)
    column_blocks = -(-keys // blocks.columns)
    ranges = column_ranges(inputs, order, blocks)
    key_gradient_kernel[(column_blocks * batch * heads,)](
        *frame,
        *incoming,
        log_sum,
        delta,
        gradient,
        value_gradient,
        factor,
        constant,
        *prior,
        *order[:4],
        ranges,
        *fold_arguments(folds),
        None if folds is None else folds.factors,
        heads,
        queries,
        keys,
        inputs.lags,
        column_blocks,
        *batched(inputs, order),
        ROWS=blocks.rows,
        COLUMNS=blocks.columns,
        **choices(inputs, order, ranges),
        **fold_choices(folds),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    key = out_of_frame(gradient, inputs.key, inputs.key_cos, inputs.key_sin)
    value = out_of_frame(value_gradient, inputs.value, value_cos, value_sin)
    if factor is None or constant is None:
        return key, value, None, None
    return key, value, factor.sum(0, dtype=torch.float64), constant.sum(0, dtype=torch.float64)
