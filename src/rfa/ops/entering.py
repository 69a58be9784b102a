"""The way of states into a decoder's cache by compiled code, where a backend has it."""

from collections.abc import Callable

import torch
from torch import Tensor

from .backends import missing
from .transforms import transformed

Enter = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor], bool], Tensor]


def entering(backend: str, *states: Tensor) -> Enter | None:
    """The function that turns these states and writes them into a cache; None where PyTorch's operators are to do it.

    It serves states in float32 on a CPU, without gradients.
    """
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed())
    if not plain or backend not in ("auto", "cpu"):
        return None
    for x in states:
        if type(x) is not Tensor or x.dtype is not torch.float32 or x.device.type != "cpu" or x.stride(-1) != 1:
            return None
    if missing("cpu") is not None:
        return None
    from .cpu.enter import enter

    return enter
