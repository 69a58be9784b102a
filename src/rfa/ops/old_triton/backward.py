"""The backward pass on the host: two kernels, each the only writer of its outputs, so that gradients are repeatable."""

from typing import NamedTuple

import torch
from torch import Tensor

from rfa.ops.kernel import KernelInputs

from .arguments import Orders, batched, choices, column_ranges, key_blocks, orders, prior_arguments
from .fold_numbers import Folds, fold_arguments, fold_choices
from .fold_scales import FoldScales, fold_scales
from .folds import frame_and_folds
from .frame import Frame, gradient_of, out_of_frame
from .incoming import Incoming, incoming_of, sharpen
from .lag_gradients import LagSums, lag_gradients
from .path_fold_gradients import path_fold_gradients
from .query_gradients import PathGradients, of_batch, path_gradient, query_gradients


class PriorGradients(NamedTuple):
    """Gradients of the prior's numbers in `KernelInputs`, in their shapes and dtypes; None where it has none."""

    tables: Tensor | None = None
    key_path: Tensor | None = None
    query_path: Tensor | None = None
    key_bias: Tensor | None = None
    scalars: Tensor | None = None


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
    frame, folds = frame_and_folds(inputs, order, gradients=True)
    out, log_sum = out.contiguous(), log_sum.contiguous()  # as the kernels index them
    incoming = incoming_of(inputs, grad_out, grad_log_sum, out, log_sum)
    with torch.cuda.device_of(inputs.query):
        sharpen(inputs, order, frame, folds, prior, incoming, log_sum)
        scales = fold_scales(inputs, frame, folds, incoming)
        query, of_queries = query_gradients(inputs, order, frame, folds, prior, incoming, scales, prior_gradient)
        key, value, of_keys = _key_gradients(inputs, order, frame, folds, prior, incoming, scales, prior_gradient)
        if isinstance(of_queries, LagSums):
            tables, scalars = lag_gradients(inputs, folds, of_queries, of_keys)
            return query, key, value, PriorGradients(tables=tables, scalars=scalars)
        if of_queries is not None:
            return query, key, value, _of_path(inputs, of_queries, of_keys)
    return query, key, value, PriorGradients()


def _of_path(inputs: KernelInputs, gradients: PathGradients, of_keys: Tensor | None) -> PriorGradients:
    """The gradients of a path with those of folded tiles."""
    key_path, query_path, bias, scalars, folded = gradients
    if folded is None or of_keys is None:
        return PriorGradients(None, key_path, query_path, bias, scalars)
    added = path_fold_gradients(inputs, folded, of_keys)
    scalars = scalars.clone()
    scalars[2] += added.eta2.to(scalars.dtype)
    if bias is not None and added.key_bias is not None:
        bias = bias + of_batch(added.key_bias, bias.shape[0]).to(bias.dtype)
    key_path = key_path + path_gradient(added.key_path, key_path)
    query_path = query_path + path_gradient(added.query_path, query_path)
    return PriorGradients(None, key_path, query_path, bias, scalars)


def _key_gradients(
    inputs: KernelInputs,
    order: Orders,
    frame: Frame,
    folds: Folds | None,
    prior: tuple[Tensor | None, ...],
    incoming: Incoming,
    scales: FoldScales | None,
    prior_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of key and value and, where there are folds and it is wanted, the sums for that of the prior.

    They are `(2 or 3, batch, heads, keys)` float32. At uniform times they are of F and C, else of log E_j, V_j and,
    with the Riccati prior, of the key's bias.
    """
    from .kernels.key_gradient import key_gradient_kernel

    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    gradient = gradient_of(inputs.key, inputs.key_cos)
    value_cos, value_sin = (inputs.key_cos, inputs.key_sin) if inputs.rotate_values else (None, None)
    value_gradient = gradient_of(inputs.value, value_cos)
    blocks = key_blocks(inputs)
    sums = None
    if folds is not None and prior_gradient:
        kinds = 2 if inputs.key_bias is None else 3
        sums = gradient.new_empty(kinds, batch, heads, keys, dtype=torch.float32)
    column_blocks = -(-keys // blocks.columns)
    ranges = column_ranges(inputs, order, blocks)
    key_gradient_kernel[(column_blocks * batch * heads,)](
        *frame,
        *incoming,
        gradient,
        value_gradient,
        *((None,) * 3 if sums is None else (*sums, None)[:3]),
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
        **blocks.options,
    )
    key = out_of_frame(gradient, inputs.key, inputs.key_cos, inputs.key_sin)
    value = out_of_frame(value_gradient, inputs.value, value_cos, value_sin)
    return key, value, sums
