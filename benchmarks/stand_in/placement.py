"""Tensors that say that they are on a GPU, and lie on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.vmap
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_NO_TENSORS = ("device", "_parse_to", "_has_compatible_shallow_copy_type")  # these make none
_BETWEEN = ("to", "copy_", "set_", "__set__", "__getitem__", "__setitem__", "index_put_", "grad")  # of both devices
_SAY = {  # of a tensor on the GPU
    Tensor.device.__get__: torch.device("cuda", 0),
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.get_device: 0,
}
_new_parameter = torch.nn.Parameter.__new__
_apply = torch.autograd.Function.apply.__func__


class Placement(TorchFunctionMode):
    """Whatever asks for the device "cuda" gets a tensor on the CPU, which says that it is on that device.

    A function of tensors on both devices is refused, as PyTorch does. Within a function, as in a backward pass or a
    registered operator, all tensors are on the CPU and nothing is refused.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function on the CPU, and mark what it returns."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in _NO_TENSORS:
            return func(*args, **kwargs)
        if func in _SAY:
            return _SAY[func] if marked(args[0]) else func(*args, **kwargs)
        given = args[:1] if name == "__deepcopy__" else (args, kwargs)  # its memory holds other tensors
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        marks = [marked(x) for x in tensors]
        _check(name, tensors, marks)
        asked = _asked(name, args, kwargs, marks)
        made = func(*map(_on_the_cpu, args), **{key: _on_the_cpu(value) for key, value in kwargs.items()})
        if func == Tensor.data.__set__:  # a parameter goes where its new data are
            mark(args[0], marks[-1])
            return made
        where = marks[0] if name in ("copy_", "set_") else any(marks) if asked is None else asked
        if asked is not None and any(made is x and was != asked for x, was in zip(tensors, marks, strict=True)):
            made = made.clone()  # it was moved, and nothing else
        return mark(made, where)


def _check(name: str, tensors: list[Tensor], marks: list[bool]) -> None:
    if name.startswith("triton_") and not all(marks):
        raise ValueError(f"{name}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
    beside = any(x.dim() and not on for x, on in zip(tensors, marks, strict=True))  # numbers may be on the CPU
    if any(marks) and beside and name not in _BETWEEN:
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")


def _asked(name: str, args: Any, kwargs: Any, marks: list[bool]) -> bool | None:
    """Whether a call asks for the GPU (True) or the CPU (False)."""
    if name in ("cpu", "cuda"):
        return name == "cuda"
    if name in ("to", "type_as") and len(marks) > 1:  # the device of another tensor
        return marks[1]
    devices = [device for device in map(_device, [*args, *kwargs.values()]) if device is not None]
    return devices[0] == "cuda" if devices else None


def _device(given: Any) -> str | None:
    """The type of a device, if it is one."""
    if isinstance(given, torch.device):
        return given.type
    return given.split(":")[0] if isinstance(given, str) and given.split(":")[0] in ("cuda", "cpu") else None


def _on_the_cpu(given: Any) -> Any:
    return torch.device("cpu") if _device(given) == "cuda" else given


def marked(x: Tensor) -> bool:
    """Whether a tensor is on the GPU that is not there."""
    while not hasattr(x, "_on_the_gpu") and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return getattr(x, "_on_the_gpu", False)


def mark(made: Any, on: bool) -> Any:
    """The same, with its tensors on the GPU or not."""
    for x in tree_leaves(made):
        if isinstance(x, Tensor):
            x._on_the_gpu = on
    return made


def _parameter(kind: type, data: Any = None, requires_grad: bool = True) -> torch.nn.Parameter:
    """A parameter on the device of its data."""
    return mark(_new_parameter(kind, data, requires_grad), data is not None and marked(data))


def _within(kind: type, *given: Any) -> Any:
    """A function with a gradient of its own, which sees tensors on the CPU."""
    if not torch.overrides._len_torch_function_stack():
        return _apply(kind, *given)
    on = any(marked(x) for x in tree_leaves(given) if isinstance(x, Tensor))
    with torch.overrides._pop_mode_temporarily():
        made = _apply(kind, *given)
    return mark(made, on)


def begin() -> None:
    """From now on the device "cuda" is on the CPU."""
    torch.nn.Parameter.__new__ = staticmethod(_parameter)
    torch.autograd.Function.apply = classmethod(_within)
    vmap = torch._functorch.vmap
    remove = vmap._remove_batch_dim
    vmap._remove_batch_dim = lambda batched, *given: mark(remove(batched, *given), marked(batched))
    Placement().__enter__()
