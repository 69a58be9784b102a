"""Products of small bfloat16 matrices by PyTorch's `brgemm`, which is oneDNN's: AVX-512 BF16 and AMX.

PyTorch exports the function for C++, so it is looked up by its mangled name.
"""

import ctypes
from pathlib import Path

import torch

from .prebuilt import instruction_sets

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
