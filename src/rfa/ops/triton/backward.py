"""The backward pass on the host: two kernels, each the only writer of its outputs, so that gradients are repeatable."""

from functools import partial

import torch
from torch import Tensor

from ..kernel import KernelInputs
from .arguments import Orders, batched, choices, column_ranges, key_blocks, orders, prior_arguments
from .fold_gradients import FoldGradients, fold_gradients
from .fold_numbers import Folds, fold_arguments, fold_choices
from .fold_scales import FoldScales, fold_scales
from .folds import folds_of
from .frame import Frame, gradient_of, out_of_frame, to_frame
from .incoming import Incoming, incoming_of, sharpen
from .path_fold_gradients import KeySums, PathSums, path_fold_gradients
from .query_gradients import PriorGradients, of_batch, path_gradient, query_gradients


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
    folds = folds_of(inputs, frame, order)
    if folds is not None:  # a poisoned row's log sum is NaN, and that of a row that sees a poisoned key
        frame = frame._replace(query_norm=_known(frame.query_norm))
        folds = folds._replace(columns=_known(folds.columns))
    incoming = incoming_of(inputs, grad_out, grad_log_sum, out, log_sum)
    with torch.cuda.device_of(inputs.query):
        sharpen(inputs, order, frame, folds, prior, incoming, log_sum)
        scales = fold_scales(inputs, frame, folds, incoming)
        query, gradients, of_queries = query_gradients(
            inputs, order, frame, folds, prior, incoming, scales, prior_gradient
        )
        key, value, of_keys = _key_gradients(inputs, order, frame, folds, prior, incoming, scales, prior_gradient)
        if of_queries is not None and of_keys is not None:
            gradients = _with_folds(inputs, folds, gradients, of_queries, of_keys)
    return query, key, value, gradients


def _known(norm: Tensor) -> Tensor:
    return torch.where(norm.isnan(), 0.0, norm)


def _with_folds(
    inputs: KernelInputs,
    folds: Folds | None,
    gradients: PriorGradients,
    of_queries: Tensor | PathSums,
    of_keys: KeySums,
) -> PriorGradients:
    """The gradients of the prior with those of folded tiles."""
    assert folds is not None
    assert gradients.scalars is not None
    if not isinstance(of_queries, PathSums):
        assert gradients.tables is not None
        factor, constant = (x.sum(0, dtype=torch.float64) for x in of_keys[:2])
        tables, power = fold_gradients(inputs, folds, FoldGradients(of_queries, factor, constant))
        scalars = gradients.scalars + power.to(gradients.scalars.dtype)
        return gradients._replace(tables=gradients.tables + tables.float(), scalars=scalars)
    assert gradients.key_path is not None
    assert gradients.query_path is not None
    added = path_fold_gradients(inputs, of_queries, of_keys)
    scalars = gradients.scalars.clone()
    scalars[2] += added.eta2.to(scalars.dtype)
    bias = gradients.key_bias
    if bias is not None and added.key_bias is not None:
        bias = bias + of_batch(added.key_bias, bias.shape[0]).to(bias.dtype)
    return gradients._replace(
        key_path=gradients.key_path + path_gradient(added.key_path, gradients.key_path),
        query_path=gradients.query_path + path_gradient(added.query_path, gradients.query_path),
        key_bias=bias,
        scalars=scalars,
    )


def _key_gradients(
    inputs: KernelInputs,
    order: Orders,
    frame: Frame,
    folds: Folds | None,
    prior: tuple[Tensor | None, ...],
    incoming: Incoming,
    scales: FoldScales | None,
    prior_gradient: bool,
) -> tuple[Tensor, Tensor, KeySums | None]:
    """Gradients of key and value and, where there are folds and it is wanted, the sums for that of the prior."""
    from .kernels.key_gradient import key_gradient_kernel

    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    gradient = gradient_of(inputs.key, inputs.key_cos)
    value_cos, value_sin = (inputs.key_cos, inputs.key_sin) if inputs.rotate_values else (None, None)
    value_gradient = gradient_of(inputs.value, value_cos)
    blocks = key_blocks(inputs)
    log_sum = delta = None
    sums: tuple[Tensor | None, ...] = (None, None, None)
    if folds is not None:
        log_sum, delta = incoming.log_sum + incoming.log_sum_rest, incoming.delta + incoming.delta_rest
        if prior_gradient:
            new = partial(gradient.new_empty, (batch, heads, keys), dtype=torch.float32)
            sums = (new(), new(), None if inputs.key_bias is None else new())
    column_blocks = -(-keys // blocks.columns)
    ranges = column_ranges(inputs, order, blocks)
    key_gradient_kernel[(column_blocks * batch * heads,)](
        *frame,
        *incoming,
        log_sum,
        delta,
        gradient,
        value_gradient,
        *sums,
        *prior,
        *order[:4],
        ranges,
        *fold_arguments(folds),
        None if folds is None else folds.factors,
        None if scales is None else scales.keys,
        heads,
        queries,
        keys,
        inputs.lags,
        column_blocks,
        *batched(inputs, order),
        ROWS=blocks.rows,
        COLUMNS=blocks.columns,
        PRIOR=prior_gradient,
        **choices(inputs, order, ranges),
        **fold_choices(folds),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    key = out_of_frame(gradient, inputs.key, inputs.key_cos, inputs.key_sin)
    value = out_of_frame(value_gradient, inputs.value, value_cos, value_sin)
    factor, constant, bias = sums
    if factor is None or constant is None:
        return key, value, None
    return key, value, KeySums(factor, constant, bias)
