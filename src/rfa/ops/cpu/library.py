"""What is handed to C++: `Problem`, field by field as in kernels/problem.h, and the entry points."""

import ctypes
import functools

from torch import Tensor

from .build import BuildError, compiled_library

_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class Strided(ctypes.Structure):
    """A tensor `(batch, heads, length, channels)` whose last dimension is contiguous, or that has no elements."""

    _fields_ = (("data", _pointer), ("batch", _integer), ("head", _integer), ("row", _integer))

    @classmethod
    def of(cls, tensor: Tensor | None) -> "Strided":
        """Its address and strides, 0 along a batch of one, which serves every sample."""
        if tensor is None:
            return cls(None, 0, 0, 0)
        batch, head, row, channel = tensor.stride()
        nowhere = tensor.shape[-1] == 1 or not tensor.numel()  # no stride is taken; NumPy has 0 where nothing is
        assert channel == 1 or nowhere, tensor.stride()
        return cls(tensor.data_ptr(), batch if tensor.shape[0] > 1 else 0, head, row)


class Problem(ctypes.Structure):
    """See kernels/problem.h."""

    _fields_ = (
        *((name, _integer) for name in ("batch", "heads", "queries", "keys", "channels", "value_channels")),
        *((name, _integer) for name in ("causal", "score", "gate", "turned", "rotate_values", "threads", "slices")),
        *((name, Strided) for name in ("query", "key", "value", "out")),
        *((name, Strided) for name in ("key_cos", "key_sin", "query_cos", "query_sin")),
        *((name, _pointer) for name in ("log_sum", "scalars", "bound", "tables")),
        ("lags", _integer),
        *((name, _pointer) for name in ("key_path", "query_path", "key_bias")),
        *((name, _integer) for name in ("path_rows", "path_batch")),
        *((name, _pointer) for name in ("key_times", "query_times")),
        ("times_batch", _integer),
        *((name, _pointer) for name in ("key_groups", "query_groups", "key_norms")),
        *((name, _integer) for name in ("key_norms_batch", "key_norms_head")),
        *((name, Strided) for name in ("grad_out", "grad_query", "grad_key", "grad_value")),
        ("grad_log_sum", _pointer),
        ("query_slice", _integer),
        *((name, _pointer) for name in ("grad_tables", "grad_scalars", "grad_key_path", "grad_query_path")),
        ("grad_key_bias", _pointer),
    )


class PhasesProblem(ctypes.Structure):
    """See kernels/phases.h."""

    _fields_ = (
        *((name, _integer) for name in ("batch", "heads", "length", "modes", "threads")),
        *((name, _pointer) for name in ("times", "frequency", "cos", "sin")),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        BuildError: if they cannot be compiled or loaded here.
    """
    path = compiled_library()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    loaded.rfa_problem_size.restype = _integer
    if loaded.rfa_problem_size() != ctypes.sizeof(Problem):
        raise BuildError(f"{path} does not match this version of rfa; delete it")
    return loaded


def call(entry: str, problem: Problem | PhasesProblem) -> None:
    """Run "forward", "decode", "backward" or "phases"; other Python threads go on meanwhile.

    Raises:
        MemoryError: if its working memory cannot be had.
    """
    if getattr(library(), f"rfa_{entry}")(ctypes.byref(problem)):
        raise MemoryError(f"rfa: no memory for the {entry} pass on the CPU")
