"""The kernels as registered PyTorch operators with their gradient; formulas in `rfa.ops.kernel`."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rfa.ops.kernel import GRADIENT_SCHEMA, SCHEMA, TENSORS, KernelInputs, gradients_by_field
from rfa.ops.prior import DecodingCache
from rfa.ops.transforms import forward_mode, operator, refuse_gradient, register_gradient, transform_error

from .library import NUMBERS, SCORE_KINDS, KernelProblem, PhasesProblem, Strided, run_kernel

FEW = 4  # queries, up to which keys are read where they lie
GROUP, QUERY_BLOCK, KEY_BLOCK = 12, 96, 128  # as in kernels/problem.h
MOST_SLICES = 2**26  # numbers in the gradients of queries of all slices, which are summed at the end


def fused_attention(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    """The estimate `(batch, heads, queries, channels)` in float32 and `log2 sum_j 2^z`, -inf where no key is seen."""
    plain = inputs.decode and type(inputs.query) is Tensor and not torch.compiler.is_compiling()
    run = _forward if plain else forward  # decoding avoids PyTorch's dispatcher, which is slow
    estimate, log_sum, _ = run(*inputs)
    return estimate, log_sum


@operator("cpu_phases", "(Tensor frequency, Tensor times) -> (Tensor, Tensor)", "cpu")
def phases(frequency: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `frequency * times`, `(b, heads, length, modes)` in float32, each within 1e-7.

    Times are `(b, 1 or heads, length)`.
    """
    cos, sin = _phases(frequency, times)
    problem = PhasesProblem(*cos.shape, times.shape[1], torch.get_num_threads())
    in_double = times.to(torch.float64).contiguous(), frequency.to(torch.float64).contiguous()
    problem.times, problem.frequency = (tensor.data_ptr() for tensor in in_double)
    problem.cos, problem.sin = cos.data_ptr(), sin.data_ptr()
    run_kernel("phases", problem)
    return cos, sin


@torch.library.register_fake("rfa::cpu_phases")
def _phases(frequency, times):
    shape = (times.shape[0], frequency.shape[0], times.shape[2], frequency.shape[1])
    return frequency.new_empty(shape, dtype=torch.float32), frequency.new_empty(shape, dtype=torch.float32)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate and log2 sum of `KernelInputs`, and the first block of keys that each group of queries visits."""
    if forward_mode():  # a compiled caller has not asked again
        raise transform_error("cpu")
    inputs = KernelInputs(*arguments)
    out, log_sum, first_block = _outputs(inputs)
    if inputs.empty:
        return out.zero_(), log_sum.fill_(-torch.inf), first_block.zero_()
    queries = inputs.query.shape[2]
    # decoding adds up in another order than backward, which forms the weights again
    decode = inputs.decode and inputs.key_cos is None and queries <= FEW
    problem = KernelProblem.of(inputs, queries if decode else -(-queries // QUERY_BLOCK), decode)
    problem.set(out=Strided.of(out), log_sum=log_sum, first_block=first_block if first_block.numel() else None)
    run_kernel("decode" if decode else "forward", problem)
    return out, log_sum, first_block


forward = operator("cpu_forward", f"({SCHEMA}) -> (Tensor, Tensor, Tensor)", "cpu")(_forward)


@torch.library.register_fake("rfa::cpu_forward")
def _(*arguments):
    return _outputs(KernelInputs(*arguments))


def _outputs(inputs: KernelInputs) -> tuple[Tensor, Tensor, Tensor]:
    """In float32, the estimate laid out as heads of one projection, so that merging them copies nothing.

    The log2 sum is in float64: near large scores float32 is too coarse to form the weights again. The first blocks of
    keys that groups of queries visit, `(batch, heads, groups)`, are not kept where all keys are visited.
    """
    query, value = inputs.query, inputs.value
    batch, heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, heads, value.shape[-1], dtype=torch.float32).transpose(1, 2)
    groups = 0 if inputs.tail is None else -(-queries // GROUP)
    first_block = query.new_empty(batch, heads, groups, dtype=torch.int32)
    return out, query.new_empty(batch, heads, queries, dtype=torch.float64), first_block


@operator(
    "cpu_backward",
    f"(Tensor grad_out, Tensor grad_log_sum, Tensor out, Tensor log_sum, Tensor first_block, {SCHEMA})"
    f" -> ({GRADIENT_SCHEMA})",
    "cpu",
)
def backward(
    grad_out: Tensor, grad_log_sum: Tensor, out: Tensor, log_sum: Tensor, first_block: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, tables, key_path, query_path, key_bias and scalars; empty where there is none.

    A tuple, not a list: batched gradients (`is_grads_batched`) cannot call an operator that returns a list.
    """
    inputs = KernelInputs(*arguments)
    query, key, scalars = inputs.query, inputs.key, inputs.scalars
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    problem = KernelProblem.of(inputs, min(-(-keys // KEY_BLOCK), max(1, MOST_SLICES // max(1, query.numel()))))
    cuts, rows = problem.slices, problem.path_rows

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    grad_states = [_like(x) for x in (query, key, inputs.value)]  # which the kernel fills
    if inputs.empty:
        grad_states = [grad.zero_() for grad in grad_states]
    grad_query = grad_states[0] if cuts == 1 else torch.zeros(cuts, *query.shape)
    grad_tables = zeros(batch, heads, cuts, 3, problem.lags)
    grad_scalars = zeros(batch, heads, cuts, 6)
    grad_key_path, grad_query_path = zeros(rows, batch, heads, keys), zeros(cuts, rows, batch, heads, queries)
    grad_key_bias = zeros(batch, heads, keys if inputs.key_bias is not None else 0)
    if not inputs.empty:
        problem.set(
            grad_out=grad_out, out=out, log_sum=log_sum, grad_log_sum=grad_log_sum.to(torch.float32),
            first_block=first_block if first_block.numel() else None,
            grad_query=Strided.of(grad_query if cuts == 1 else grad_query[0]), grad_key=Strided.of(grad_states[1]),
            grad_value=Strided.of(grad_states[2]), query_slice=grad_query.stride(0) if cuts > 1 else 0,
            grad_tables=grad_tables, grad_scalars=grad_scalars,
            grad_key_path=grad_key_path, grad_query_path=grad_query_path, grad_key_bias=grad_key_bias,
        )  # fmt: skip
        run_kernel("backward", problem)
    if cuts > 1:
        grad_states[0].copy_(grad_query.sum(0))
    path_batch = 1 if inputs.key_path is None else inputs.key_path.shape[1]

    def per_batch(grad: Tensor, dim: int) -> Tensor:
        return grad if path_batch == batch else grad.sum(dim, keepdim=True)

    return (
        *(grad.to(query.dtype) for grad in grad_states),
        grad_tables.sum((0, 2)).movedim(0, 1).to(torch.float32).contiguous(),
        per_batch(grad_key_path, 1),
        per_batch(grad_query_path.sum(0), 1),
        per_batch(grad_key_bias, 0).to(torch.float32),
        grad_scalars.sum((0, 2)).T[: scalars.shape[0]].to(scalars.dtype).contiguous(),
    )


@torch.library.register_fake("rfa::cpu_backward")
def _(grad_out, grad_log_sum, out, log_sum, first_block, *arguments):
    inputs = KernelInputs(*arguments)
    query, key, key_path = inputs.query, inputs.key, inputs.key_path
    _, heads, queries, _ = query.shape
    optional = []
    for given, dtype, absent in (
        (inputs.tables, torch.float32, (3, heads, 0)),
        (key_path, torch.float64, (0, 1, heads, key.shape[2])),
        (inputs.query_path, torch.float64, (0, 1, heads, queries)),
        (inputs.key_bias, torch.float32, (1 if key_path is None else key_path.shape[1], heads, 0)),
    ):
        optional.append(query.new_empty(absent if given is None else given.shape, dtype=dtype))
    states = (_like(x).to(x.dtype) for x in (query, key, inputs.value))
    return *states, *optional, inputs.scalars.new_empty(inputs.scalars.shape)


def _like(x: Tensor) -> Tensor:
    """A new tensor in float32 whose channels are contiguous, otherwise laid out as `x` is."""
    return torch.empty_like(x if x.stride(-1) == 1 else x.contiguous(), dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:TENSORS])
    ctx.options = inputs[TENSORS:]


def _gradient(ctx, grad_out: Tensor, grad_log_sum: Tensor, _: object):
    out, log_sum, first_block, *tensors = ctx.saved_tensors
    inputs = KernelInputs(*tensors, *ctx.options)
    grads = list(backward(grad_out, grad_log_sum, out, log_sum, first_block, *inputs))
    prior = (inputs.tables, inputs.key_path, inputs.query_path, inputs.key_bias)
    grads[3:7] = [None if x is None else grad for x, grad in zip(prior, grads[3:7], strict=True)]
    return gradients_by_field(grads)


register_gradient(forward, _gradient, _save)
refuse_gradient(backward, "cpu")
refuse_gradient(phases, "cpu")


# New tokens of a decoder in C++: into the cache, and their estimates from it

TokenStates = tuple[
    Float[Tensor, "batch heads length channels"],
    Float[Tensor, "batch heads length channels"],
    Float[Tensor, "batch heads length channels"],
]  # query, key and value
Factors = tuple[Float[Tensor, "b heads length channels"], Float[Tensor, "b heads length channels"]]  # see `enter`

_PARALLEL = 2**15  # numbers of states, from which threads share them
_SIZES = ("batch", "heads", "keys", "channels", "score_kind", "turn_values", "threads", "lags", "number")
_OF_TOKEN = ("query", "key", "value", "out", "cos", "sin")  # what differs from one token to the next
_STATES = ("query", "key", "value", "out", "keys_of_cache", "values_of_cache", "norms_of_cache", "cos", "sin")
_SIZES_OF_ENTER = ("batch", "heads", "length", "channels", "turn_values", "threads", "number")


class EnterProblem(ctypes.Structure):
    """See kernels/enter.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES_OF_ENTER),
        *((name, Strided) for name in ("query", "key", "value", "new_query", "keys", "values", "norms", "cos", "sin")),
    )


class TokenProblem(ctypes.Structure):
    """See kernels/token.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, Strided) for name in _STATES),
        *((name, ctypes.c_void_p) for name in ("tables", "coefficient", "tail", "uncertified")),
    )


class TokenCall(NamedTuple):
    """The last call of `decode_token`. The next one with the same layout changes its fields `of_token` only.

    It takes time to fill a whole structure. No tensor is kept, so a cache that changes frees its memory at once. The
    layout leaves out what cannot change while a cache holds tokens, and an emptied one has another `DecodingCache`: the
    dtype, which `FilterLayer.check_fit` holds fast; the layer's options; and the factors' shape and strides, as they
    are views of the tables that `TurnTable` makes, all alike.
    """

    layout: tuple[Any, ...]
    problem: TokenProblem
    of_token: list[Strided]


def enter(
    states: TokenStates, factors: Factors, room: Sequence[Float[Tensor, "batch heads length ..."]], turn_values: bool
) -> Float[Tensor, "batch heads length channels"]:
    """Turn states by `exp(-i omega t)`, write keys, values and `|k|^2` where they stay; return the query in the frame.

    Args:
        states: query, key and value of one dtype, float32 or half, whose channels are contiguous.
        factors: of the channels at the tokens, in float32: the cosine twice side by side, and the negative sine beside
            the sine (`rfa.nn.cache_layer.Turns`).
        room: for keys, values and norms `(batch, heads, length)`, in float32; written.
        turn_values: whether values are turned too.
    """
    dtype = states[0].dtype
    turned = torch.empty_like(states[0], dtype=torch.float32)
    threads = torch.get_num_threads() if turned.numel() >= _PARALLEL else 1
    written = map(Strided.of_storage, (*states, turned, *room))
    sizes = *turned.shape, turn_values, threads, NUMBERS.index(dtype)
    run_kernel("enter", EnterProblem(*sizes, *written, *map(Strided.of, factors)))
    return turned if dtype is torch.float32 else turned.to(dtype)


def decode_token(
    states: TokenStates,
    factors: Factors,
    storages: Sequence[Float[Tensor, "batch heads room ..."]],
    keys: int,
    decoding: DecodingCache,
    score_kind: str,
    turn_values: bool,
) -> Float[Tensor, "batch heads 1 channels"]:
    """`enter` for one token, the operator for the last of uniform times, and the estimate's way out of the frame.

    The token's key, value and norm are written into the storages, which have spare room. `keys` counts the new one;
    `decoding` has tables for so many lags, and gets the mirrored tables and this call. With a tail the token reads no
    keys that cannot count.
    """
    tables = decoding.tables
    assert tables is not None
    if decoding.mirrored is None:
        decoding.mirrored = F.pad(tables.tables.flip(-1), (0, KEY_BLOCK))
    query, key, value = states
    cos, sin = factors
    batch, heads, _, channels = query.shape
    dtype, threads = query.dtype, torch.get_num_threads()
    out = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    fixed = (*storages, decoding.mirrored, tables.coefficient)  # a tensor may move, as by `share_memory_`
    tail, uncertified = (0 if x is None else x.data_ptr() for x in (decoding.tail, decoding.uncertified))
    layout = (
        *(query.shape, decoding.mirrored.shape, threads),
        *[x.stride() for x in (*states, *storages)],
        *[x.data_ptr() for x in fixed],
        *(tail, uncertified),
    )
    last = decoding.last_call
    if last is not None and last.layout == layout:
        problem = last.problem
        for field, tensor in zip(last.of_token, (query, key, value, out, cos, sin), strict=True):
            field.data = tensor.data_ptr()
        problem.keys = keys
    else:
        problem = TokenProblem(
            *(batch, heads, keys, channels, SCORE_KINDS.index(score_kind), turn_values, threads),
            *(decoding.mirrored.shape[-1], NUMBERS.index(dtype)),
            *map(Strided.of_storage, (*states, out, *storages)),
            *map(Strided.of, factors),
            decoding.mirrored.data_ptr(),
            tables.coefficient.data_ptr(),
            tail,
            uncertified,
        )
        decoding.last_call = TokenCall(layout, problem, [getattr(problem, name) for name in _OF_TOKEN])
    run_kernel("token", problem)
    return out if dtype is torch.float32 else out.to(dtype)
