"""The kernel inputs as a structure for C++, and the entry points of the compiled kernels."""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from rfa.ops.kernel import KernelInputs, ScoreKind

from .build import load_library
from .compiler import BuildError
from .prebuilt import instruction_sets

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
        """As `of` for every sample by itself, of `(batch, heads, length)` too: there the last stride is the row's."""
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
    call = functools.partial(getattr(library(), f"rfa_{entry}"), ctypes.byref(problem))
    if getattr(problem, "brgemm", None):
        with _onednn():
            failed = call()
    else:
        failed = call()
    if failed == _NO_MEMORY:
        raise MemoryError(f"rfa: no memory for the {entry} pass on the CPU")
    if failed:
        raise RuntimeError(f"rfa: PyTorch's brgemm failed in the {entry} pass on the CPU")


@contextmanager
def _onednn() -> Iterator[None]:
    """oneDNN is on, though `torch.backends.mkldnn.enabled` may have been switched off since the forward pass."""
    before = torch.backends.mkldnn.enabled
    if not before:
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    try:
        yield
    finally:
        if not before:
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
