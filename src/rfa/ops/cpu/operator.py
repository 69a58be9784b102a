"""The compiled kernels as registered PyTorch operators with their gradient; formulas in `rfa.ops.kernel`."""

import ctypes
import functools
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from rfa.ops.kernel import GRADIENT_SCHEMA, SCHEMA, TENSORS, KernelInputs, ScoreKind, gradients_by_field
from rfa.ops.transforms import forward_mode, operator, refuse_gradient, register_gradient, transform_error

from .build import load_library
from .compiler import BuildError, instruction_sets

# Products of small bfloat16 matrices by PyTorch's `brgemm`, which is oneDNN's: AVX-512 BF16 and AMX

_INSTRUCTIONS = frozenset(("avx512_bf16", "amx_bf16"))  # without them it converts to float32, which gains nothing
_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"  # at::native::cpublas::brgemm
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"


def find_brgemm() -> tuple[int, int] | None:
    """The addresses of `brgemm` and `brgemm_release`; None without them, without oneDNN, or without instructions."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    if _INSTRUCTIONS.isdisjoint(instruction_sets().split()):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        brgemm, release = (ctypes.cast(library[name], ctypes.c_void_p).value for name in (_BRGEMM, _RELEASE))
    except (OSError, AttributeError):
        return None
    return (brgemm, release) if brgemm and release else None


SCORE_KINDS = get_args(ScoreKind)
NUMBERS = (torch.float32, torch.bfloat16, torch.float16)  # of states in a cache, as in kernels/number.h
LEAST_QUERIES = 512  # from which on states in bfloat16 are multiplied as such; fewer gain little and stay exact
_NO_MEMORY = 1  # as in kernels/run.h
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class Strided(ctypes.Structure):
    """A tensor `(batch, heads, length, channels)` whose last dimension is contiguous, or that has no elements."""

    _fields_ = (("data", _pointer), ("batch", _integer), ("head", _integer), ("row", _integer))

    @classmethod
    def of(cls, tensor: Tensor) -> "Strided":
        """Address and strides of a tensor; the stride is 0 along a batch of one, which serves every sample."""
        batch, head, row, channel = tensor.stride()
        unused = tensor.shape[-1] == 1 or not tensor.numel()  # NumPy has strides of 0 in empty arrays
        assert channel == 1 or unused, tensor.stride()
        return cls(tensor.data_ptr(), batch if tensor.shape[0] > 1 else 0, head, row)

    @classmethod
    def of_storage(cls, tensor: Tensor) -> "Strided":
        """`of` for every sample by itself. In `(batch, heads, length)` the last stride is the row's."""
        strides = tensor.stride()
        assert strides[-1] == 1 or tensor.numel() <= 1, strides
        return cls(tensor.data_ptr(), *strides[:3])


class KernelProblem(ctypes.Structure):
    """One call of the kernels, field by field as in kernels/problem.h. It holds the tensors whose addresses it has."""

    _fields_ = (
        *((name, _integer) for name in ("batch", "heads", "queries", "keys", "channels", "value_channels")),
        *(
            (name, _integer)
            for name in ("causal", "score_kind", "gate", "turned", "rotate_values", "threads", "slices")
        ),
        *((name, Strided) for name in ("query", "key", "value", "out")),
        *((name, Strided) for name in ("key_cos", "key_sin", "query_cos", "query_sin")),
        *((name, _pointer) for name in ("log_sum", "scalars", "bound", "tables")),
        ("lags", _integer),
        *((name, _pointer) for name in ("key_path", "query_path", "key_bias")),
        *((name, _integer) for name in ("path_rows", "path_batch")),
        *((name, _pointer) for name in ("key_times", "query_times")),
        ("times_batch", _integer),
        *((name, _pointer) for name in ("key_groups", "query_groups")),
        ("key_norm", Strided),
        *((name, _pointer) for name in ("tail", "first_block")),
        *((name, Strided) for name in ("grad_out", "grad_query", "grad_key", "grad_value")),
        ("grad_log_sum", _pointer),
        ("query_slice", _integer),
        *((name, _pointer) for name in ("grad_tables", "grad_scalars", "grad_key_path", "grad_query_path")),
        ("grad_key_bias", _pointer),
        ("number", _integer),
        *((name, _pointer) for name in ("uncertified", "brgemm", "brgemm_release")),
    )

    @classmethod
    def of(cls, inputs: KernelInputs, blocks: int, decode: bool = False) -> "KernelProblem":
        """The problem of the operator's inputs, with so many blocks of work of each head.

        To decode, keys and values are read as they are, in half precision too.
        """
        problem = cls()
        problem.held = []
        batch, heads, queries, channels = inputs.query.shape
        keys, value_channels = inputs.value.shape[2:]
        threads = torch.get_num_threads()
        problem.set(
            batch=batch, heads=heads, queries=queries, keys=keys, channels=channels, value_channels=value_channels,
            turned=inputs.key_cos is not None, threads=threads, slices=slices(batch * heads, blocks, threads),
            lags=inputs.lags, times_batch=inputs.key_times.shape[0],
        )  # fmt: skip
        if inputs.key_path is not None:
            problem.set(path_rows=inputs.key_path.shape[0], path_batch=inputs.key_path.shape[1])
        given: dict[str, Any] = dict(zip(_GIVEN, inputs, strict=False))  # all fields but the last, `decode`
        given["score_kind"] = SCORE_KINDS.index(inputs.score_kind)
        if inputs.scalars.dtype is not torch.float32:
            given["scalars"] = inputs.scalars.to(torch.float32)
        if inputs.key_norm is not None:
            given["key_norm"] = inputs.key_norm.unsqueeze(2)
        if decode and inputs.key.dtype is inputs.value.dtype and inputs.key.stride(-1) == inputs.value.stride(-1) == 1:
            problem.held += (inputs.key, inputs.value)
            problem.number = NUMBERS.index(inputs.key.dtype)
            given |= {"key": Strided.of(inputs.key), "value": Strided.of(inputs.value)}
        problem.set(**given)
        states = {inputs.query.dtype, inputs.key.dtype, inputs.value.dtype}
        if states == {torch.bfloat16} and queries >= LEAST_QUERIES and channels and value_channels:
            problem.brgemm, problem.brgemm_release = bfloat16_products() or (None, None)
        return problem

    def set(self, **fields: "Tensor | Strided | int | None") -> None:
        """Fill fields: states to read by address and strides, in float32; other tensors by address, contiguous.

        A tensor that the kernels write must not be copied: such states are given as `Strided`, others are contiguous.
        """
        hold = self.held.append
        for name, value in fields.items():
            if value is None:  # what a new problem has
                continue
            if isinstance(value, Tensor):
                if name in _STATES:
                    if value.dtype is not torch.float32:  # decoding spends more on such calls than on a short sequence
                        value = value.to(torch.float32)
                    if value.stride(-1) != 1:
                        value = value.contiguous()
                    hold(value)
                    value = Strided.of(value)
                else:
                    if not value.is_contiguous():
                        value = value.contiguous()
                    hold(value)
                    value = value.data_ptr()
            setattr(self, name, value)


_GIVEN = KernelInputs._fields[: KernelInputs._fields.index("decode")]
_STATES = frozenset(field[0] for field in KernelProblem._fields_ if field[1] is Strided)


def slices(heads: int, blocks: int, threads: int) -> int:
    """Into how many tasks each head is cut: several where there are too few heads to keep the threads busy."""
    if heads == 0 or heads % threads == 0 or heads >= 4 * threads:
        return 1
    return max(1, min(-(-4 * threads // heads), blocks))


class PhasesProblem(ctypes.Structure):
    """See kernels/phases.h."""

    _fields_ = (
        *((name, _integer) for name in ("batch", "heads", "length", "modes", "time_heads", "threads")),
        *((name, _pointer) for name in ("times", "frequency", "cos", "sin")),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, loaded.

    Raises:
        BuildError: if they cannot be compiled or loaded here.
    """
    loaded = load_library()
    loaded.rfa_problem_size.restype = _integer
    if loaded.rfa_problem_size() != ctypes.sizeof(KernelProblem):
        raise BuildError(f"{loaded._name} does not match this version of rfa; delete it")
    return loaded


@functools.cache
def bfloat16_products() -> tuple[int, int] | None:
    """The addresses of PyTorch's products for kernels/factors.h, if they work; None where float32 is multiplied.

    The answer holds for the whole process: backward forms the same scores as forward.
    """
    found = find_brgemm()
    return found if found and library().rfa_brgemm_works(*map(_pointer, found)) else None


def run_kernel(entry: str, problem: ctypes.Structure) -> None:
    """Run an entry point, "forward" or "backward" for example; other Python threads go on meanwhile.

    Raises:
        MemoryError: if its working memory cannot be had.
        RuntimeError: where another thread switches oneDNN off meanwhile.
    """
    call, mkldnn = functools.partial(getattr(library(), f"rfa_{entry}"), ctypes.byref(problem)), torch.backends.mkldnn
    off = bool(getattr(problem, "brgemm", None)) and not mkldnn.enabled  # switched off since the forward pass
    if off:
        mkldnn.enabled = True  # type: ignore[assignment]
    try:
        failed = call()
    finally:
        if off:
            mkldnn.enabled = False  # type: ignore[assignment]
    if failed == _NO_MEMORY:
        raise MemoryError(f"rfa: no memory for the {entry} pass on the CPU")
    if failed:
        raise RuntimeError(f"rfa: PyTorch's brgemm failed in the {entry} pass on the CPU")


# The registered operators

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
