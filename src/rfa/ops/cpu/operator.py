"""The kernels as registered PyTorch operators with their gradient; formulas in `rfa.ops.fused`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..fused import FusedPrior, Rotation, Score, Visibility
from ..transforms import GRADIENTS, INPUTS, refuse_forward_mode, transformable, transformed
from .library import PhasesProblem, Strided, call
from .problem import Call

FEW = 4  # queries, up to which keys are read where they lie
QUERY_BLOCK, KEY_BLOCK = 96, 128  # as in kernels/problem.h
MOST_SLICES = 2**26  # numbers in the gradients of queries of all slices, which are summed at the end


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.ops.rfa.cpu_<name>`, with the schema that its types say.

    `torch.library.custom_op` spends 0.1 ms a call on checks, as much as a short sequence takes. What it also did is
    done below: an operator without a formula of its own must raise, where PyTorch's fallback drops the gradient.
    """
    name, schema = f"rfa::cpu_{function.__name__}", torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "cpu", function)
    return getattr(torch.ops.rfa, f"cpu_{function.__name__}").default


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
    """The estimate `(batch, heads, queries, channels)` in float32 and `log2 sum_j 2^z`, -inf where no key is seen.

    Args:
        query, key, value: float32, bfloat16 or float16.
        rotation: phases, or None where the states stand in the common frame already.
        prior, visibility: see `rfa.ops.fused`.
        score: "student_t", "exponential" or "dot_product".
        gate: off, `w = W` along a path.
        rotate_values: values and estimate turn too.
        key_norm: `|k|^2`, where it is known.
        decode: no gradient will be asked for: a few queries in the frame may read the keys where they lie.
    """
    key_cos, key_sin, query_cos, query_sin = (None,) * 4 if rotation is None else rotation
    given = (
        query, key, value, key_cos, key_sin, query_cos, query_sin, *prior, *visibility, score, gate, rotate_values,
        key_norm, decode,
    )  # fmt: skip
    plain = decode and type(query) is Tensor and not (torch.compiler.is_compiling() or transformed())
    return (_forward if plain else _differentiable)(*given)  # a token more passes PyTorch's dispatcher by


@_operator
def phases(frequency: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `frequency * times`, `(b, heads, length, modes)` in float32, each within 1e-7."""
    cos, sin = _phases(frequency, times)
    problem = PhasesProblem(*cos.shape, torch.get_num_threads())
    held = times.to(torch.float64).contiguous(), frequency.to(torch.float64).contiguous()
    problem.times, problem.frequency = (tensor.data_ptr() for tensor in held)
    problem.cos, problem.sin = cos.data_ptr(), sin.data_ptr()
    call("phases", problem)
    return cos, sin


@torch.library.register_fake("rfa::cpu_phases")
def _phases(frequency, times):
    shape = (times.shape[0], frequency.shape[0], times.shape[1], frequency.shape[1])
    return frequency.new_empty(shape, dtype=torch.float32), frequency.new_empty(shape, dtype=torch.float32)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cos: Tensor | None,
    key_sin: Tensor | None,
    query_cos: Tensor | None,
    query_sin: Tensor | None,
    tables: Tensor | None,
    key_path: Tensor | None,
    query_path: Tensor | None,
    key_bias: Tensor | None,
    scalars: Tensor,
    bound: Tensor,
    key_times: Tensor,
    query_times: Tensor,
    key_groups: Tensor | None,
    query_groups: Tensor | None,
    causal: bool,
    score: str,
    gate: bool,
    rotate_values: bool,
    key_norm: Tensor | None = None,
    decode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Estimate and log2 sum."""
    refuse_forward_mode("cpu")  # a compiled caller has not asked again
    out, log_sum = _outputs(query, value)
    rotation, prior = (key_cos, key_sin, query_cos, query_sin), (tables, key_path, query_path, key_bias, scalars, bound)
    visibility = (key_times, query_times, key_groups, query_groups)
    decode = decode and key_cos is None and query.shape[2] <= FEW  # its sums are not those that backward forms anew
    blocks = query.shape[2] if decode else -(-query.shape[2] // QUERY_BLOCK)
    call_ = Call(query, key, value, rotation, prior, visibility, causal, score, gate, rotate_values, blocks)
    if not call_.empty:
        call_.set(out=Strided.of(out), log_sum=log_sum)
        if decode and key_norm is not None:
            call_.norms(key_norm)
        call("decode" if decode else "forward", call_.problem)
        return out, log_sum
    return out.zero_(), log_sum.fill_(-torch.inf)


_forward, forward = forward, _operator(forward)


@torch.library.register_fake("rfa::cpu_forward")
def _(query, key, value, *rest):
    return _outputs(query, value)


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """In float32, the estimate laid out as heads of one projection, so that merging them copies nothing.

    The log2 sum is in float64: beside large scores its float32 neighbours lie too far apart to form weights anew.
    """
    batch, heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, heads, value.shape[-1], dtype=torch.float32).transpose(1, 2)
    return out, query.new_empty(batch, heads, queries, dtype=torch.float64)


@_operator
def backward(
    grad_out: Tensor,
    grad_log_sum: Tensor,
    out: Tensor,
    log_sum: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cos: Tensor | None,
    key_sin: Tensor | None,
    query_cos: Tensor | None,
    query_sin: Tensor | None,
    tables: Tensor | None,
    key_path: Tensor | None,
    query_path: Tensor | None,
    key_bias: Tensor | None,
    scalars: Tensor,
    bound: Tensor,
    key_times: Tensor,
    query_times: Tensor,
    key_groups: Tensor | None,
    query_groups: Tensor | None,
    causal: bool,
    score: str,
    gate: bool,
    rotate_values: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, tables, key_path, query_path, key_bias and scalars; empty where there is none.

    A tuple, not a list: batched gradients (`is_grads_batched`) cannot call an operator that returns a list.
    """
    rotation, prior = (key_cos, key_sin, query_cos, query_sin), (tables, key_path, query_path, key_bias, scalars, bound)
    visibility = (key_times, query_times, key_groups, query_groups)
    blocks = min(-(-key.shape[2] // KEY_BLOCK), max(1, MOST_SLICES // max(1, query.numel())))
    call_ = Call(query, key, value, rotation, prior, visibility, causal, score, gate, rotate_values, blocks)
    problem = call_.problem
    batch, heads, queries, _ = query.shape
    keys, cuts = key.shape[2], problem.slices

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    grad_states = [_like(x) for x in (query, key, value)]
    grad_query = grad_states[0] if cuts == 1 else torch.zeros(cuts, *query.shape)
    grad_tables = zeros(batch, heads, cuts, 3, problem.lags)
    grad_scalars = zeros(batch, heads, cuts, 6)
    rows = problem.path_rows
    grad_key_path, grad_query_path = zeros(rows, batch, heads, keys), zeros(cuts, rows, batch, heads, queries)
    grad_key_bias = zeros(batch, heads, keys if key_bias is not None else 0)
    if not call_.empty:
        call_.states(grad_out=grad_out, out=out)
        call_.set(
            log_sum=log_sum, grad_log_sum=grad_log_sum.to(torch.float32), grad_key=Strided.of(grad_states[1]),
            grad_value=Strided.of(grad_states[2]), grad_query=Strided.of(grad_query if cuts == 1 else grad_query[0]),
            query_slice=grad_query.stride(0) if cuts > 1 else 0, grad_tables=grad_tables, grad_scalars=grad_scalars,
            grad_key_path=grad_key_path, grad_query_path=grad_query_path, grad_key_bias=grad_key_bias,
        )  # fmt: skip
        call("backward", problem)
    if cuts > 1:
        grad_states[0].copy_(grad_query.sum(0))
    one = 1 if key_path is None else key_path.shape[1]

    def per_batch(grad: Tensor, dim: int) -> Tensor:
        return grad if one == batch else grad.sum(dim, keepdim=True)

    query, key, value = (grad.to(query.dtype) for grad in grad_states)
    return (
        query,
        key,
        value,
        grad_tables.sum((0, 2)).movedim(0, 1).to(torch.float32).contiguous(),
        per_batch(grad_key_path, 1),
        per_batch(grad_query_path.sum(0), 1),
        per_batch(grad_key_bias, 0).to(torch.float32),
        grad_scalars.sum((0, 2)).T[: scalars.shape[0]].to(scalars.dtype).contiguous(),
    )


@torch.library.register_fake("rfa::cpu_backward")
def _(grad_out, grad_log_sum, out, log_sum, query, key, value, *rest):
    tables, key_path, query_path, key_bias, scalars = rest[4:9]
    _, heads, queries, _ = query.shape
    optional = []
    for given, dtype, absent in (
        (tables, torch.float32, (3, heads, 0)),
        (key_path, torch.float64, (0, 1, heads, key.shape[2])),
        (query_path, torch.float64, (0, 1, heads, queries)),
        (key_bias, torch.float32, (1 if key_path is None else key_path.shape[1], heads, 0)),
    ):
        optional.append(query.new_empty(absent if given is None else given.shape, dtype=dtype))
    states = (_like(x).to(x.dtype) for x in (query, key, value))
    return *states, *optional, scalars.new_empty(scalars.shape)


def _like(x: Tensor) -> Tensor:
    """Zeros in float32 whose channels are contiguous, otherwise laid out as `x` is."""
    return torch.zeros_like(x if x.stride(-1) == 1 else x.contiguous(), dtype=torch.float32)


def _setup(ctx, inputs, output) -> None:
    tensors, ctx.options = inputs[:17], inputs[17:21]
    ctx.save_for_backward(*output, *tensors)


def _gradient(ctx, grad_out: Tensor, grad_log_sum: Tensor):
    saved = ctx.saved_tensors
    grads = _once(grad_out, grad_log_sum, *saved, *ctx.options)
    states, (tables, key_path, query_path, key_bias, scalars) = grads[:3], grads[3:]
    given = saved[9:13]
    priors = [
        None if x is None else grad for x, grad in zip(given, (tables, key_path, query_path, key_bias), strict=True)
    ]
    return *states, *(None,) * 4, *priors, scalars, *(None,) * 11


_differentiable = transformable("cpu", forward, (*INPUTS, *(None,) * 4, 1), (1, 1), _setup, _gradient)
_once = transformable("cpu", backward, (*(1,) * 4, *INPUTS), GRADIENTS)
transformable("cpu", phases, (0, None), (1, 1))
