"""`torch.func`, `torch.vmap`, batched gradients and dual numbers for the registered operators of the fused kernels."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from .registration import register_gradient
from .weights import record, recording

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_for_compiler(function: _Function) -> _Function:
    """`torch.compiler.assume_constant_result` without the import of the compiler, which takes 0.8 s."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_for_compiler  # the module's number changes while the compiler traces a `jvp`
def forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open: dual numbers exist only within one."""
    return forward_ad._current_level >= 0


def refuse_forward_mode(backend: str) -> None:
    """Raise `ValueError` in forward-mode differentiation, where a kernel would drop the tangents without an error."""
    if forward_mode():
        raise ValueError(
            f"backend: got {backend!r} in forward-mode differentiation, expected backend='reference', or 'auto', "
            "which takes it there"
        )


def transformed() -> bool:
    """Whether a transform of `torch.func` is at work, `torch.vmap` among them, or forward-mode differentiation.

    A tensor may then wrap others, so that its `requires_grad` and its address do not tell all. A compiler traces the
    operators themselves.
    """
    return not torch.compiler.is_compiling() and (torch._C._are_functorch_transforms_active() or forward_mode())


def readable(*tensors: Tensor | None) -> bool:
    """Whether the values of tensors can be read, and the computation may depend on them.

    It may not while a program is recorded, because the program must serve other values too. Batched tensors, and
    tensors without data, cannot be read.
    """
    return not _recorded() and all(_has_numbers(x) for x in tensors if x is not None)


def without_autocast(states: Tensor) -> AbstractContextManager[None]:
    """The caller's dtypes count inside the block, under autocast too. Tensors without data know no autocast."""
    return nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False)


def _recorded() -> bool:
    """Whether a compiler, `torch.jit.trace` or a dispatch mode (`make_fx`, `FakeTensorMode`) records what runs.

    `torch.device` as a context is not such a mode.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return _len_torch_dispatch_stack() > 0 or _len_torch_dispatch_stack_pre_dispatch() > 0


def _has_numbers(x: Tensor) -> bool:
    wrappers = torch._C._functorch
    while wrappers.is_functorch_wrapped_tensor(x):
        if wrappers.is_batchedtensor(x):
            return False
        x = wrappers.get_unwrapped(x)
    return not x.is_meta and not isinstance(x, FakeTensor)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, second_derivatives: bool = False, *, first_key: int = 0, **given: Any
) -> Tensor:
    """PyTorch's attention, by its formula where its kernels lack a derivative.

    The kernels have no tangents, and no gradient of a learned mask where a transform hides that it is learned. They
    have no second derivatives: with `second_derivatives` the slower formula serves wherever there is a gradient.
    `first_key` is the index of the first key, for recorded weights.
    """
    if recording():
        record(_scores(query, key, **given), first_key)
    by_formula = transformed()
    if second_derivatives and torch.is_grad_enabled():
        inputs = (query, key, value, given.get("attn_mask"))
        by_formula = by_formula or any([x is not None and x.requires_grad for x in inputs])
    with sdpa_kernel(SDPBackend.MATH) if by_formula else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, **given)


def _scores(
    query: Tensor, key: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """The scores of PyTorch's attention in nats, -inf where a key is not seen."""
    score = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        attn_mask = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).tril()
    if attn_mask is None:
        return score
    return score.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else score + attn_mask


def transformable(
    backend: str,
    operator: Any,
    inputs: Sequence[int | None],
    results: Sequence[int],
    setup_context: Callable[..., None] = lambda ctx, inputs, output: None,
    gradient: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A registered operator as a function that `torch.func` can differentiate once and `torch.vmap` can batch.

    `torch.func` refuses a gradient that is registered by PyTorch's own means, and forward mode ignores it. So under
    transforms the operator is called from a `torch.autograd.Function`, which would cost too much elsewhere. `vmap`
    gives a call more heads. Where positions are batched, it makes one call for each sample.

    Args:
        backend: its name, for errors.
        operator: of tensors to a tensor or a tuple of tensors.
        inputs: the dimension of the heads in each input, None where an input has none; further inputs have none.
        results: the same of the outputs.
        setup_context, gradient: as for `torch.library.register_autograd`, and registered here; without, it raises.
    """

    def refused(ctx: object, *grads: object) -> None:
        raise RuntimeError(f"the {backend} backend has no second derivatives; backend='reference' has")

    def batched(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Any, Any]:
        found, dims = parts_of_batch(info, in_dims, *given)
        return (found[0], dims[0]) if len(results) == 1 else (found, dims)

    def parts_of_batch(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[list[Tensor], list[int]]:
        size = info.batch_size
        heads_of: list[Any] = [*inputs, *(None,) * len(given)][: len(given)]
        if any(dim is not None and heads is None for dim, heads in zip(in_dims, heads_of, strict=True)):
            each = [
                parts_of(*(x if dim is None else x.select(dim, i) for x, dim in zip(given, in_dims, strict=True)))
                for i in range(size)
            ]
            return [torch.stack(parts) for parts in zip(*each, strict=True)], [0] * len(results)
        joined = [_joined(x, dim, heads, size) for x, dim, heads in zip(given, in_dims, heads_of, strict=True)]
        first = list(given[0].shape)
        if in_dims[0] is not None:
            del first[in_dims[0]]
        parts = (size, first[heads_of[0]])
        return [x.unflatten(heads, parts) for x, heads in zip(parts_of(*joined), results, strict=True)], [*results]

    def parts_of(*given: Any) -> tuple[Tensor, ...]:
        found = operator(*given)
        return (found,) if isinstance(found, Tensor) else found

    backward = refused if gradient is None else gradient
    register_gradient(operator, backward, setup_context)
    torch.library.register_vmap(operator, batched)
    steps = {"forward": lambda *given: operator(*given), "setup_context": setup_context, "backward": backward}
    steps["jvp"] = lambda ctx, *tangents: refuse_forward_mode(backend)
    methods = {name: staticmethod(step) for name, step in steps.items()}
    function: Any = type(operator.__name__, (torch.autograd.Function,), {**methods, "generate_vmap_rule": True})
    return lambda *given: function.apply(*given) if transformed() else operator(*given)


def _joined(x: Any, dim: int | None, heads: int | None, size: int) -> Any:
    """The heads of all samples side by side."""
    if not isinstance(x, Tensor) or heads is None:
        return x
    if dim is None:
        x, dim = x.expand(size, *x.shape), 0
    return x.movedim(dim, heads).flatten(heads, heads + 1).contiguous()  # with one head the flattened may be a view
