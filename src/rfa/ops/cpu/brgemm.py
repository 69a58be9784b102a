"""Products of small bfloat16 matrices by PyTorch's `brgemm`, which is oneDNN's: AVX-512 BF16 and AMX.

PyTorch exports the function for C++. So it is looked up by its mangled name and tried once.
Where it is missing or gives something else, float32 is multiplied.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .prebuilt import instruction_sets

_INSTRUCTIONS = frozenset(("avx512_bf16", "amx_bf16"))  # without them it converts to float32, which gains nothing
_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"  # at::native::cpublas::brgemm
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"


def bfloat16_products() -> tuple[int, int] | None:
    """The addresses of `brgemm` and `brgemm_release`, for kernels/factors.h; None where float32 is to be multiplied."""
    return _found() if torch.backends.mkldnn.enabled else None  # it reads pairs of rows with oneDNN only


@functools.cache
def _found() -> tuple[int, int] | None:
    if _INSTRUCTIONS.isdisjoint(instruction_sets().split()):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        brgemm, release = library[_BRGEMM], library[_RELEASE]
    except (OSError, AttributeError):
        return None
    brgemm.restype = release.restype = None
    brgemm.argtypes = [*[ctypes.c_int64] * 6, ctypes.c_bool, *[ctypes.c_void_p] * 3, ctypes.c_bool]
    release.argtypes = [ctypes.c_bool]
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (brgemm, release)]
    return (addresses[0], addresses[1]) if _multiplies(brgemm, release) else None


def _multiplies(brgemm: Callable[..., Any], release: Callable[..., Any]) -> bool:
    """Whether it adds A B to C, with B in pairs of rows."""
    left, right = torch.arange(12 * 4.0).view(12, 4).bfloat16(), torch.arange(4 * 32.0).view(4, 32).bfloat16()
    pairs, sums = right.view(2, 2, 32).transpose(1, 2).contiguous(), torch.ones(12, 32)
    expected = sums + left.float() @ right.float()
    brgemm(12, 32, 4, 4, 32, 32, True, left.data_ptr(), pairs.data_ptr(), sums.data_ptr(), True)
    release(True)
    return torch.equal(sums, expected)
