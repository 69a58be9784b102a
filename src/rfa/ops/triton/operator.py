"""The registered operators `rfa::triton_forward` and `rfa::triton_backward`, and the function that calls them.

They are opaque custom operators, not `torch.library.triton_op`: the host code launches several kernels, some in a loop
whose count depends on the memory it may use, and there is nothing around them that a compiler could fuse.
"""

from typing import Any

import torch
from torch import Tensor

from ..backends import HALF_AND_SINGLE, TRITON_CHANNELS
from ..fused import FusedPrior, Rotation, Score, Visibility
from ..transforms import GRADIENTS, INPUTS, refuse_forward_mode, transformable


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation | None,
    prior: FusedPrior,
    visibility: Visibility,
    score: Score,
    gate: bool,
    rotate_values: bool,
    key_norm: Tensor | None = None,
    decode: bool = False,
) -> tuple[Tensor, Tensor]:
    """The formulas of `rfa.ops.fused`, with gradients for states and prior.

    Args:
        query: `(batch, heads, queries, channels)`, as `key` and `value` in float32, bfloat16 or float16; channels 16,
            32, 64 or 128.
        key: `(batch, heads, keys, channels)`.
        value: `(batch, heads, keys, value channels)`; as many as the key's where values are rotated.
        rotation: None where states stand in the common frame already.
        prior: tables over the lag, of as many lags as there are keys or more; or a path.
        visibility: who sees whom; with tables the times are those of positions.
        score: which z.
        gate: along a path: off, `w = W`. Tables hold their w.
        rotate_values: turn values too, and the estimate back; without effect where `rotation` is None.
        key_norm: not used: the norms must be those of the keys as rounded in the frame, and cost one pass over them.
        decode: not used: a few queries take the same kernel.

    Returns:
        Estimates `(batch, heads, queries, value channels)` in the query's dtype, and `log2 sum_j 2^z`
        `(batch, heads, queries)` in float64. A row that sees no key gives zeros and -inf.

    Raises:
        ValueError: for dtypes and sizes that no kernel was written for.
    """
    turned = rotation is not None and rotate_values
    _check(query, key, value, turned)
    phases = (None,) * 4 if rotation is None else tuple(rotation)
    return _differentiable(query, key, value, *phases, *prior, *visibility, score, gate, turned)


def _check(query: Tensor, key: Tensor, value: Tensor, turned: bool) -> None:
    if query.dtype not in HALF_AND_SINGLE or not query.dtype == key.dtype == value.dtype:
        given = ", ".join(str(x.dtype) for x in (query, key, value))
        raise ValueError(f"query, key, value: got {given}, expected one of {HALF_AND_SINGLE} in all three")
    for name, states in (("query", query), ("value", value)):
        if states.shape[-1] not in TRITON_CHANNELS:
            raise ValueError(f"{name}: got {states.shape[-1]} channels, expected one of {TRITON_CHANNELS}")
    if turned and value.shape[-1] != key.shape[-1]:
        raise ValueError(f"value: got {value.shape[-1]} channels, expected {key.shape[-1]} to rotate them as keys")


_ARGUMENTS = """
    Tensor query, Tensor key, Tensor value, Tensor? key_cos, Tensor? key_sin, Tensor? query_cos, Tensor? query_sin,
    Tensor? tables, Tensor? key_path, Tensor? query_path, Tensor? key_bias, Tensor scalars, Tensor bound,
    Tensor key_times, Tensor query_times, Tensor? key_groups, Tensor? query_groups,
    bool causal, str score, bool gate, bool rotate_values
"""
_GRADIENTS = "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"
_INCOMING = "Tensor grad_out, Tensor grad_log_sum, Tensor out, Tensor log_sum, bool prior_gradient"


def _nothing(scalars: Tensor) -> Tensor:
    """No elements, where an operator cannot return None; `vmap` finds the heads where it looks for them."""
    heads = scalars.shape[1]
    return scalars.new_empty(0, heads, heads, 0)


@torch.library.custom_op("rfa::triton_forward", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def triton_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Estimates and log sums; see `fused_attention`."""
    refuse_forward_mode("triton")  # a compiled caller has not asked again
    from .arguments import Call
    from .forward import forward

    return forward(Call(*arguments))


@triton_forward.register_fake
def _(query, key, value, *others):
    shape = (*query.shape[:3], value.shape[-1])
    return query.new_empty(shape), query.new_empty(shape[:3], dtype=torch.float64)


@torch.library.custom_op(
    "rfa::triton_backward", mutates_args=(), schema=f"({_INCOMING}, {_ARGUMENTS}) -> ({_GRADIENTS})"
)
def triton_backward(
    grad_out: Tensor, grad_log_sum: Tensor, out: Tensor, log_sum: Tensor, prior_gradient: bool, *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, tables, key_path, query_path, key_bias and scalars.

    Of what is not given, or not asked for, the gradient has no elements.
    """
    from .arguments import Call
    from .backward import backward

    call = Call(*arguments)
    *states, prior = backward(call, grad_out, grad_log_sum, out, log_sum, prior_gradient)
    missing = (g if g is not None and prior_gradient else _nothing(call.scalars) for g in prior)
    return (*states, *missing)


@triton_backward.register_fake
def _(grad_out, grad_log_sum, out, log_sum, prior_gradient, query, key, value, *others):
    _, _, _, _, tables, key_path, query_path, key_bias, scalars, *_ = others
    prior = (tables, key_path, query_path, key_bias, scalars)
    return (
        *(x.new_empty(x.shape) for x in (query, key, value)),
        *(_nothing(scalars) if p is None or not prior_gradient else p.new_empty(p.shape) for p in prior),
    )


_PRIOR = slice(7, 12)  # tables, key_path, query_path, key_bias, scalars among the inputs of `triton_forward`


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:17], *output)
    ctx.choices = inputs[17:]


def _backward(ctx: Any, grad_out: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, log_sum = ctx.saved_tensors
    prior_gradient = any(ctx.needs_input_grad[_PRIOR])
    query, key, value, *prior = _once(grad_out, grad_log_sum, out, log_sum, prior_gradient, *tensors, *ctx.choices)
    needed = ctx.needs_input_grad[_PRIOR]
    return (
        query,
        key,
        value,
        *(None,) * 4,
        *(gradient if wanted else None for gradient, wanted in zip(prior, needed, strict=True)),
        *(None,) * 9,
    )


_operators = torch.ops.rfa
_differentiable = transformable("triton", _operators.triton_forward.default, INPUTS, (1, 1), _save, _backward)
_once = transformable("triton", _operators.triton_backward.default, (*(1,) * 4, None, *INPUTS), GRADIENTS)
