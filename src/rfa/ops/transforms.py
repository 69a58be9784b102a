"""`torch.func`, `torch.vmap`, batched gradients and dual numbers for the registered operators of the fused kernels."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _len_torch_dispatch_stack

# Fused kernels as registered operators of PyTorch, with their gradients, at less cost a call than `custom_op` has

_LIBRARIES: list[torch.library.Library] = []  # a registration lasts as long as its library
BODIES: dict[str, Callable[..., Any]] = {}  # what an operator runs, by its name


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


def no_second_derivatives(backend: str) -> Callable[..., Any]:
    """The gradient of a backward pass that has none: it raises."""

    def refused(ctx: object, *grads: object) -> None:
        raise RuntimeError(f"the {backend} backend has no second derivatives; backend='reference' has")

    return refused


def nothing_saved(ctx: object, inputs: object, output: object) -> None:
    """The `setup_context` of such a gradient."""


def register_gradient(
    of: Any, backward: Callable[..., Any], setup_context: Callable[..., None] = nothing_saved
) -> None:
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


# The attention weights of a forward pass. While they are recorded, operators run as dense code and note them


class WeightedRows(NamedTuple):
    """The weights of some query rows, in the order in which they were computed.

    Fields:
        weights: `(batch, heads, rows, keys)` after the softmax, before decay and dropout.
        log_sum: `log sum_j exp(score_ij)`, `(batch, heads, rows)`.
        first_key: the index of the first of these keys.
    """

    weights: Tensor
    log_sum: Tensor
    first_key: int


_note: ContextVar[Callable[[WeightedRows], None] | None] = ContextVar("rfa_weights", default=None)


@contextmanager
def recorded_weights(note: Callable[[WeightedRows], None] | None = None) -> Iterator[list[WeightedRows]]:
    """Within it, operators take the reference backend and add their rows to the list, or hand them to `note`."""
    rows: list[WeightedRows] = []
    token = _note.set(rows.append if note is None else note)
    try:
        yield rows
    finally:
        _note.reset(token)


def recording() -> bool:
    """Whether weights are recorded. A compiled program never records them."""
    return not torch.compiler.is_compiling() and _note.get() is not None


def record(score: Tensor, first_key: int = 0) -> None:
    """Note the weights of rows with these scores in nats, -inf where a key is not seen, where they are recorded."""
    if recording() and (note := _note.get()) is not None:
        note(WeightedRows(score.softmax(-1), score.logsumexp(-1), first_key))


def joined(rows: list[WeightedRows], visible: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and log sums of all rows of one operator.

    Args:
        rows: as recorded.
        visible: `(b, queries, keys)`, True where a query sees a key.

    Returns:
        `(batch, heads, queries, keys)` and `(batch, heads, queries)`: 0 for a key that is not seen, -inf for a query
        that sees no key.
    """
    keys = visible.shape[-1]
    padded = [F.pad(w, (first, keys - first - w.shape[-1])) for w, _, first in rows]
    unseen = ~visible[:, None]
    log_sum = torch.cat([part.log_sum for part in rows], dim=2)
    return torch.cat(padded, dim=2).masked_fill(unseen, 0.0), log_sum.masked_fill(unseen.all(-1), -torch.inf)


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


_PLAIN = (Tensor, torch.nn.Parameter)


def plain(*tensors: Tensor | None) -> bool:
    """Whether PyTorch's dispatcher has nothing to add to an operator of these tensors, so that its body may be called.

    It has where a compiler or a dispatch mode records what runs, under transforms, and for tensors of other types.
    """
    if _recorded():
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or torch._C._functorch.is_legacy_batchedtensor(x)):
            return False
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def values_at_hand(*tensors: Tensor | None, check: bool | None = None) -> bool:
    """Whether the values of tensors are looked at: where they can be read, and by default on the CPU alone.

    A GPU would have to finish its work first.
    """
    if check is None:
        check = all([x is None or x.is_cpu for x in tensors])
    return check and readable(*tensors)


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
    setup_context: Callable[..., None] = nothing_saved,
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

    def batched(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Any, Any]:
        found, dims = parts_of_batch(info, in_dims, given)
        return (found[0], dims[0]) if len(results) == 1 else (found, dims)

    def parts_of_batch(info: Any, in_dims: tuple[int | None, ...], given: Any) -> tuple[list[Tensor], list[int]]:
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

    backward = no_second_derivatives(backend) if gradient is None else gradient
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
