"""Fused kernels as registered operators of PyTorch, with their gradients, at less cost a call than `custom_op` has.

This file stands alone because `cpu/`, `triton/`, `transforms.py` and `rfa bench instructions` all need it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARIES: list[torch.library.Library] = []  # a registration lasts as long as its library
BODIES: dict[str, Callable[..., Any]] = {}  # what an operator runs, by its name: `bench.instructions` calls them


def operator(name: str, schema: str, *devices: str) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function as `torch.ops.rfa.<name>` for some device types.

    `torch.library.custom_op` spends 0.1 ms a call on checks, on some machines 0.6 ms: as much as a short sequence
    takes. What else it does is done here and in `transforms.py`: where an operator has no gradient it must raise,
    because PyTorch's fallback would drop the gradient.
    """

    def register(function: Callable[..., Any]) -> Any:
        torch.library.define(f"rfa::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"rfa::{name}", devices, function)
        BODIES[f"rfa::{name}"] = function
        return getattr(torch.ops.rfa, name).default

    return register


def register_gradient(of: Any, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """`torch.library.register_autograd` for an operator whose arguments have no defaults.

    PyTorch's looks for defaults, which takes 0.1 ms a call with as many arguments as a kernel has.
    """

    def below(keys: Any, given: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return of.redispatch(keys & torch._C._after_autograd_keyset, *given)

    def forward(ctx: Any, *given_and_keys: Any) -> Any:
        *given, keys = given_and_keys
        result = below(keys, tuple(given))
        setup_context(ctx=ctx, inputs=tuple(given), output=result)
        return result

    def gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (*backward(ctx, *grads), None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
    function: Any = type(f"{of._opname}_with_gradient", (torch.autograd.Function,), methods)

    def dispatched(keys: Any, *given: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*given):
            return function.apply(*given, keys)
        return below(keys, given)

    _LIBRARIES.append(torch.library.Library(of.namespace, "FRAGMENT"))
    _LIBRARIES[-1].impl(of._opname, dispatched, "Autograd", with_keyset=True)
