"""The registered operators `rfa::pairs_forward` and `rfa::pairs_backward`, pair by pair for any times.

Forward: states, forward kernel. Backward: delta, keys, queries. The path of the prior comes from `pairs_prior`, from
`ops/content.py` or from `ops/dot_product.py`, and its gradients go back there.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rfa.ops.kernel import GRADIENT_SCHEMA, PRIOR, SCHEMA, TENSORS, KernelInputs, gradients_by_field
from rfa.ops.transforms import forward_mode, operator, refuse_gradient, register_gradient, transform_error

from .frames import NUMBERS, TILE
from .pairs import SCALARS, pairs_forward_kernel, pairs_states_kernel
from .pairs_backward import pairs_key_kernel, pairs_query_kernel
from .prologue import delta_kernel, phase_strides

BLOCK = TILE.value  # rows and keys of a call are padded to as many
_FARTHEST = {torch.bfloat16: 8.3, torch.float16: 5.5}  # `mu dt` within a tile: states times exp(-it) keep their digits


def fused_attention(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    """The formulas of `rfa.ops.kernel` along a path, with gradients for states and prior.

    The known norms of keys are not used: a kernel needs those of the keys as rounded in the frame.

    Returns:
        Estimates `(batch, heads, queries, value channels)` and `log2 sum_j 2^z` `(batch, heads, queries)` in
        float32 and float64. A row that sees no key gives zeros and -inf.
    """
    return pairs_forward(*inputs._replace(rotate_values=inputs.key_cos is not None and inputs.rotate_values))


class _Sizes(NamedTuple):
    """Sizes of a call, and the compile-time choices that its kernels share."""

    batch: int
    heads: int
    queries: int
    keys: int
    rows: int
    columns: int
    phases: tuple[int, int, int, int]  # strides of key phases and of query phases, over batch and heads
    turn: bool
    turn_values: bool
    choices: dict[str, Any]


def _sizes(inputs: KernelInputs) -> _Sizes:
    (batch, heads, queries, channels), (keys, width) = inputs.query.shape, inputs.value.shape[2:]
    phases = *phase_strides(inputs.key_cos), *phase_strides(inputs.query_cos)
    turn = inputs.key_cos is not None
    fixed = inputs.scalars.shape[0] == 7
    choices = {
        "FRAME": fixed and inputs.causal and inputs.score_kind == "student_t" and inputs.query.dtype in _FARTHEST,
        "CHANNELS": channels, "WIDTH": width, "SCORE": inputs.score_kind, "GATE": inputs.gate,
        "THIRD": inputs.key_bias is not None, "CAUSAL": inputs.causal, "GROUPS": inputs.key_groups is not None,
        "FIXED": fixed, "FAST": inputs.query.is_cuda,
        "QUICK": inputs.query.is_cuda and inputs.query.dtype != torch.float32, "num_warps": 4,
    }  # fmt: skip
    rows, columns = (-(-length // BLOCK) * BLOCK for length in (queries, keys))
    turn_values = turn and inputs.rotate_values
    return _Sizes(batch, heads, queries, keys, rows, columns, phases, turn, turn_values, choices)


def _blocks(inputs: KernelInputs, choices: dict[str, Any], *, forward: bool = False) -> tuple[int, int]:
    """Queries and keys of a tile; exact products of float32 hold both factors in registers."""
    if choices["FRAME"]:
        return 64, 32
    wide = max(inputs.query.shape[-1], inputs.value.shape[-1]) > 64
    if inputs.query.dtype == torch.float32 or not forward:
        return (16, 32) if wide else (32, 32)
    return 64, 32


def _of_pairs(inputs: KernelInputs) -> tuple[Any, ...]:
    """What the three kernels read of times, groups and the path."""
    batch = inputs.query.shape[0]
    groups = (x if x is None else x.expand(batch, -1).contiguous() for x in (inputs.key_groups, inputs.query_groups))
    times = torch.broadcast_tensors(inputs.key_times[:, :1], inputs.query_times[:, :1])[0].shape[0]
    of_times = (x.expand(times, -1).contiguous() for x in (inputs.key_times, inputs.query_times))
    assert inputs.key_path is not None
    assert inputs.query_path is not None
    path = inputs.key_path.contiguous(), inputs.query_path.contiguous()
    bias = inputs.key_bias if inputs.key_bias is None else inputs.key_bias.contiguous()
    return (*of_times, *groups, *path, bias, inputs.scalars.contiguous())


class _States(NamedTuple):
    """Query, key and value in the common frame, norms and marks of queries `(2, ...)` and keys `(3, ...)`.

    `frame` are keys, values, numbers and orders against the last key of each tile; Nones where none serve.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_norms: Tensor
    key_norms: Tensor
    frame: tuple[Tensor | None, ...]


def _states(inputs: KernelInputs, sizes: _Sizes, of_pairs: tuple[Any, ...]) -> _States:
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, rows, columns = sizes.batch, sizes.heads, sizes.rows, sizes.columns
    new, single = query.new_empty, torch.float32
    (key_times, _, groups, _, key_path, _, bias, scalars), choices = of_pairs, sizes.choices
    states = new(batch, heads, rows, query.shape[-1]), new(2, batch, heads, rows, dtype=single)
    keys = new(batch, heads, columns, key.shape[-1]), new(batch, heads, columns, value.shape[-1])
    key_norms = new(3, batch, heads, columns, dtype=single)
    frame: tuple[Tensor | None, ...] = (None,) * 4
    if choices["FRAME"]:
        numbers = new(NUMBERS.value, batch, heads, columns, dtype=single)
        frame = (*map(torch.empty_like, keys), numbers, new(batch, heads, columns // BLOCK, dtype=torch.int64))
    phases = inputs.key_cos, inputs.key_sin, inputs.query_cos, inputs.query_sin
    query_programs, key_programs = rows // BLOCK, columns // BLOCK
    pairs_states_kernel[(batch * heads * (query_programs + key_programs),)](
        query, key, value, groups, *phases, *states, *keys, key_norms, key_path, bias, scalars, key_times, *frame,
        key_path.shape[1], key_times.shape[0], _FARTHEST.get(query.dtype, 0.0), *query.stride(), *key.stride(),
        *value.stride(), *sizes.phases, heads, sizes.queries, sizes.keys, rows, columns, query_programs, key_programs,
        TURN=sizes.turn, TURN_VALUES=sizes.turn_values, BLOCK=BLOCK,
        **{name: choices[name] for name in ("CHANNELS", "WIDTH", "GROUPS", "GATE", "THIRD", "FRAME", "num_warps")},
    )  # fmt: skip
    return _States(states[0], *keys, states[1], key_norms, frame)


@operator("pairs_forward", f"({SCHEMA}) -> (Tensor, Tensor)", "cuda", "cpu")
def pairs_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Estimates and log sums; see `fused_attention`."""
    if forward_mode():  # a compiled caller has not asked again
        raise transform_error("triton")
    inputs = KernelInputs(*arguments)
    sizes, query = _sizes(inputs), inputs.query
    shape = (sizes.batch, sizes.heads, sizes.queries)
    out = query.new_empty(*shape, inputs.value.shape[-1], dtype=torch.float32)
    log_sum = query.new_empty(shape, dtype=torch.float64)
    if inputs.empty:
        return out.zero_(), log_sum.fill_(-torch.inf)
    rows, columns = _blocks(inputs, sizes.choices, forward=True)
    blocks = -(-sizes.queries // rows)
    of_pairs = _of_pairs(inputs)
    with torch.cuda.device_of(query):
        states = _states(inputs, sizes, of_pairs)
        pairs_forward_kernel[(blocks * sizes.batch * sizes.heads,)](
            states.query, states.query_norms[1], states.key, states.value, *states.key_norms[1:], *of_pairs,
            *states.frame, inputs.query_cos, inputs.query_sin, out, log_sum, sizes.heads, sizes.queries, sizes.keys,
            sizes.rows, sizes.columns, blocks, of_pairs[4].shape[1], of_pairs[0].shape[0], *sizes.phases[2:],
            ROWS=rows, COLUMNS=columns, TURN=sizes.turn_values,
            **sizes.choices,
        )  # fmt: skip
    return out, log_sum


@torch.library.register_fake("rfa::pairs_forward")
def _(query, key, value, *others):
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    return out, query.new_empty(query.shape[:3], dtype=torch.float64)


_INCOMING = "Tensor grad_out, Tensor? grad_log_sum, Tensor out, Tensor log_sum, bool of_scalars, bool of_path"


@operator("pairs_backward", f"({_INCOMING}, {SCHEMA}) -> ({GRADIENT_SCHEMA})", "cuda", "cpu")
def pairs_backward(
    grad_out: Tensor, grad_log_sum: Tensor | None, out: Tensor, log_sum: Tensor, of_scalars: bool, of_path: bool,
    *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of query, key, value, tables, key_path, query_path, key_bias and scalars.

    The gradient of what is not given, or not asked for, has no elements. The bias belongs to the path.
    """
    inputs = KernelInputs(*arguments)
    sizes, nothing = _sizes(inputs), inputs.scalars.new_empty(0)  # where an operator cannot return None
    if inputs.empty:
        learned = inputs.tables, inputs.key_path, inputs.query_path, inputs.key_bias, inputs.scalars
        given = (inputs.query, inputs.key, inputs.value, *learned)
        return tuple(nothing if x is None else x.new_zeros(x.shape) for x in given)
    batch, heads, queries, keys = sizes.batch, sizes.heads, sizes.queries, sizes.keys
    new, width = inputs.query.new_empty, inputs.value.shape[-1]
    gradients = [new(x.shape) for x in (inputs.query, inputs.key, inputs.value)]
    parts = 2 + (inputs.key_bias is not None)
    rows, columns = _blocks(inputs, sizes.choices)
    row_blocks, key_blocks = -(-queries // rows), -(-keys // columns)
    double = torch.float64
    of_queries = new(*(parts, batch, heads, queries) if of_path else (0,), dtype=double)
    of_keys = new(*(parts, batch, heads, keys) if of_path else (0,), dtype=double)
    of_bias = new(*(batch, heads, keys) if of_path and parts > 2 else (0,), dtype=torch.float32)
    sums = new(*(batch, heads, row_blocks, SCALARS.value) if of_scalars else (0,), dtype=double)
    kind = torch.bfloat16 if inputs.query.dtype == torch.bfloat16 else torch.float32  # float16 has too small a range
    turned = new(batch, heads, sizes.rows, width, dtype=kind)
    delta = new(batch, heads, sizes.rows, dtype=torch.float32)
    total = new(batch, heads, sizes.rows, dtype=torch.float64)
    through = None if grad_log_sum is None else grad_log_sum.contiguous()
    of_pairs = _of_pairs(inputs)
    numbers = (heads, queries, keys, sizes.rows, sizes.columns)
    batches = of_pairs[4].shape[1], of_pairs[0].shape[0]
    with torch.cuda.device_of(inputs.query):
        states = _states(inputs, sizes, of_pairs)
        delta_kernel[(batch * heads * (sizes.rows // BLOCK),)](
            grad_out, out.contiguous(), None, log_sum.contiguous(), through, inputs.query_cos,
            inputs.query_sin, turned, delta, total, None, *grad_out.stride(), heads, queries, sizes.rows,
            sizes.rows // BLOCK, *sizes.phases[2:], WIDTH=width, ROWS=BLOCK, TURN=sizes.turn_values,
            LOG_SUM=through is not None, LOW=False, num_warps=4,
        )  # fmt: skip
        given = (
            states.query, states.query_norms[0], states.key, states.value, states.key_norms[0], turned, delta, total,
            *of_pairs, *states.frame,
        )  # fmt: skip
        chosen = {"ROWS": rows, "COLUMNS": columns, "PATH": of_path, "TURN": sizes.turn, **sizes.choices}
        pairs_key_kernel[(batch * heads * key_blocks,)](
            *given, inputs.key_cos, inputs.key_sin, gradients[1], gradients[2], of_keys, of_bias, *numbers, key_blocks,
            *batches, *sizes.phases[:2], TURN_VALUES=sizes.turn_values, **chosen,
        )  # fmt: skip
        pairs_query_kernel[(batch * heads * row_blocks,)](
            *given, inputs.query_cos, inputs.query_sin, gradients[0], of_queries, sums, *numbers, row_blocks,
            *batches, *sizes.phases[2:], PRIOR=of_scalars, **chosen,
        )  # fmt: skip
    prior = [nothing] * 5
    if of_path:
        shared = batches[0] == 1 < batch
        prior[1:3] = (x.sum(1, keepdim=True) if shared else x for x in (of_keys, of_queries))
        if inputs.key_bias is not None:
            prior[3] = (of_bias.sum(0, keepdim=True) if shared else of_bias).to(inputs.key_bias.dtype)
    if of_scalars:
        prior[4] = sums.sum((0, 2)).T[: inputs.scalars.shape[0]].to(inputs.scalars.dtype)
    return (*gradients, *prior)


@torch.library.register_fake("rfa::pairs_backward")
def _(grad_out, grad_log_sum, out, log_sum, of_scalars, of_path, *arguments):
    inputs = KernelInputs(*arguments)
    nothing, scalars = inputs.scalars.new_empty(0), inputs.scalars
    path = [inputs.key_path, inputs.query_path, inputs.key_bias] if of_path else [None] * 3
    of_heads = scalars.new_empty(scalars.shape[1], SCALARS.value).T[: scalars.shape[0]] if of_scalars else nothing
    return (
        *(x.new_empty(x.shape) for x in (inputs.query, inputs.key, inputs.value)),
        nothing,
        *(nothing if p is None else p.new_empty(p.shape) for p in path),
        of_heads,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.options = inputs[TENSORS:]


def _backward(ctx: Any, grad_out: Tensor | None, grad_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, log_sum = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    needed = ctx.needs_input_grad[PRIOR]
    of_path = any(needed[1:4])
    states_and_prior = pairs_backward(grad_out, grad_log_sum, out, log_sum, needed[4], of_path, *tensors, *ctx.options)
    query, key, value, *prior = states_and_prior
    learned = (gradient if wanted else None for gradient, wanted in zip(prior, needed, strict=True))
    return gradients_by_field((query, key, value, *learned))


register_gradient(pairs_forward, _backward, _save)
refuse_gradient(pairs_backward, "triton")
