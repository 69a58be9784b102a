"""The registered operators `rfa::triton_forward` and `rfa::triton_backward`, and the function that calls them.

They are opaque operators, not `torch.library.triton_op`: the host code launches several kernels, some in a loop
whose count depends on memory, and there is nothing around them that a compiler could fuse.
"""

from typing import Any

import torch
from torch import Tensor

from rfa.ops.kernel import (
    GRADIENT_HEADS,
    GRADIENT_SCHEMA,
    HALF_AND_SINGLE,
    HEADS,
    PRIOR,
    SCHEMA,
    TENSORS,
    TRITON_CHANNELS,
    KernelInputs,
    gradients_by_field,
)
from rfa.ops.transforms import operator, refuse_forward_mode, transformable

from .arguments import batched, choices, forward_blocks, orders, prior_arguments, row_ranges
from .fold_numbers import fold_arguments, fold_choices
from .folds import frame_and_folds, poisoned_before
from .frame import turned


def fused_attention(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    """The formulas of `rfa.ops.kernel`, with gradients for states and prior.

    Channels of a head are 16, 32, 64 or 128, and as many in values as in keys where values are rotated. The known norms
    of keys are not used: a kernel needs those of the keys as rounded in the frame, which cost one pass over them. A few
    queries take the same kernel as many.

    Returns:
        Estimates `(batch, heads, queries, value channels)` in the query's dtype, and `log2 sum_j 2^z`
        `(batch, heads, queries)` in float64. A row that sees no key gives zeros and -inf.

    Raises:
        ValueError: for dtypes and sizes that no kernel was written for.
    """
    inputs = inputs._replace(rotate_values=inputs.key_cos is not None and inputs.rotate_values)
    _check(inputs.query, inputs.key, inputs.value, inputs.rotate_values)
    return _differentiable(*inputs)


def _check(query: Tensor, key: Tensor, value: Tensor, turned: bool) -> None:
    if query.dtype not in HALF_AND_SINGLE or not query.dtype == key.dtype == value.dtype:
        given = ", ".join(str(x.dtype) for x in (query, key, value))
        raise ValueError(f"query, key, value: got {given}, expected one of {HALF_AND_SINGLE} in all three")
    for name, states in (("query", query), ("value", value)):
        if states.shape[-1] not in TRITON_CHANNELS:
            raise ValueError(f"{name}: got {states.shape[-1]} channels, expected one of {TRITON_CHANNELS}")
    if turned and value.shape[-1] != key.shape[-1]:
        raise ValueError(f"value: got {value.shape[-1]} channels, expected {key.shape[-1]} to rotate them as keys")


_INCOMING = "Tensor grad_out, Tensor grad_log_sum, Tensor out, Tensor log_sum, bool prior_gradient"


def _nothing(scalars: Tensor) -> Tensor:
    """No elements, where an operator cannot return None; `vmap` finds the heads where it looks for them."""
    heads = scalars.shape[1]
    return scalars.new_empty(0, heads, heads, 0)


def _forward(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    """Estimates `(batch, heads, queries, value channels)` and `log2 sum_j 2^z`, -inf for rows that see no key."""
    from .kernels.forward import forward_kernel

    query, value = inputs.query, inputs.value
    batch, heads, queries, _ = query.shape
    keys, value_channels = value.shape[2:]
    shape = (batch, heads, queries, value_channels)
    if inputs.empty:
        return query.new_zeros(shape), query.new_full(shape[:3], -torch.inf, dtype=torch.float64)
    blocks = forward_blocks(inputs)
    order = orders(inputs)
    frame, folds = frame_and_folds(inputs, order)
    ranges = row_ranges(inputs, order, blocks)
    turn = inputs.rotate_values and inputs.query_cos is not None
    out = query.new_empty(shape, dtype=torch.float32 if turn else query.dtype)
    log_sum = query.new_empty(shape[:3], dtype=torch.float64)
    row_blocks = -(-queries // blocks.rows)
    with torch.cuda.device_of(query):
        forward_kernel[(row_blocks * batch * heads,)](
            *frame,
            out,
            log_sum,
            *prior_arguments(inputs),
            *order[:4],
            ranges,
            *fold_arguments(folds),
            None if folds is None else poisoned_before(frame.value_norm),
            heads,
            queries,
            keys,
            inputs.lags,
            row_blocks,
            *batched(inputs, order),
            ROWS=blocks.rows,
            COLUMNS=blocks.columns,
            **choices(inputs, order, ranges),
            **fold_choices(folds),
            **blocks.options,
        )
    if turn:
        out, _ = turned(out, inputs.query_cos, inputs.query_sin, inverse=False, dtype=query.dtype)
    return out, log_sum


@operator("triton_forward", f"({SCHEMA}) -> (Tensor, Tensor)", "cuda", "cpu")
def triton_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Estimates and log sums; see `fused_attention`."""
    refuse_forward_mode("triton")  # a compiled caller has not asked again
    return _forward(KernelInputs(*arguments))


@torch.library.register_fake("rfa::triton_forward")
def _(query, key, value, *others):
    shape = (*query.shape[:3], value.shape[-1])
    return query.new_empty(shape), query.new_empty(shape[:3], dtype=torch.float64)


@operator("triton_backward", f"({_INCOMING}, {SCHEMA}) -> ({GRADIENT_SCHEMA})", "cuda", "cpu")
def triton_backward(
    grad_out: Tensor, grad_log_sum: Tensor, out: Tensor, log_sum: Tensor, prior_gradient: bool, *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, tables, key_path, query_path, key_bias and scalars.

    The gradient of what is not given, or not asked for, has no elements.
    """
    from .backward import backward

    inputs = KernelInputs(*arguments)
    *states, prior = backward(inputs, grad_out, grad_log_sum, out, log_sum, prior_gradient)
    missing = (g if g is not None and prior_gradient else _nothing(inputs.scalars) for g in prior)
    return (*states, *missing)


@torch.library.register_fake("rfa::triton_backward")
def _(grad_out, grad_log_sum, out, log_sum, prior_gradient, *arguments):
    inputs = KernelInputs(*arguments)
    return (
        *(x.new_empty(x.shape) for x in (inputs.query, inputs.key, inputs.value)),
        *(
            p.new_empty(p.shape) if isinstance(p, Tensor) and prior_gradient else _nothing(inputs.scalars)
            for p in list(inputs)[PRIOR]
        ),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.options = inputs[TENSORS:]


def _backward(ctx: Any, grad_out: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, log_sum = ctx.saved_tensors
    needed = ctx.needs_input_grad[PRIOR]
    states_and_prior = _once(grad_out, grad_log_sum, out, log_sum, any(needed), *tensors, *ctx.options)
    query, key, value, *prior = states_and_prior
    learned = (gradient if wanted else None for gradient, wanted in zip(prior, needed, strict=True))
    return gradients_by_field((query, key, value, *learned))


_differentiable = transformable("triton", triton_forward, HEADS, (1, 1), _save, _backward)
_once = transformable("triton", triton_backward, (*(1,) * 4, None, *HEADS), GRADIENT_HEADS)
