"""How the operators meet PyTorch: registration of kernels, recorded weights, transforms and recorded programs."""

from collections.abc import Callable, Iterator
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
    takes. An operator without a gradient needs `refuse_gradient`: PyTorch's fallback would drop the gradient.
    """

    def register(function: Callable[..., Any]) -> Any:
        torch.library.define(f"rfa::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"rfa::{name}", devices, function)
        BODIES[f"rfa::{name}"] = function
        return getattr(torch.ops.rfa, name).default

    return register


def refuse_gradient(of: Any, backend: str) -> None:
    """Register for an operator, a backward pass for example, that it has no gradient: asked for one, it raises."""

    def refused(ctx: object, *grads: object) -> None:
        raise RuntimeError(f"the {backend} backend has no second derivatives; backend='reference' has")

    register_gradient(of, refused, lambda ctx, inputs, output: None)


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


# The attention weights of a forward pass. While they are recorded, operators run as dense code and note them


class WeightedRows(NamedTuple):
    """The weights of some query rows, in the order in which they were computed.

    Fields:
        weights: `(batch, heads, rows, keys)` after the softmax, before decay and dropout.
        log_sum: `log sum_j exp(score_ij)`, `(batch, heads, rows)`.
    """

    weights: Tensor
    log_sum: Tensor


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


def record(score: Tensor) -> None:
    """Note the weights of rows with these scores in nats, -inf where a key is not seen, where they are recorded."""
    if recording() and (note := _note.get()) is not None:
        note(WeightedRows(score.softmax(-1), score.logsumexp(-1)))


def joined(rows: list[WeightedRows], visible: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and log sums of all rows of one operator.

    Args:
        rows: as recorded.
        visible: `(b, queries, keys)`, True where a query sees a key.

    Returns:
        `(batch, heads, queries, keys)` and `(batch, heads, queries)`: 0 for a key that is not seen, -inf for a query
        that sees no key.
    """
    unseen = ~visible[:, None]
    weights, log_sum = (torch.cat(parts, dim=2) for parts in zip(*rows, strict=True))
    return weights.masked_fill(unseen, 0.0), log_sum.masked_fill(unseen.all(-1), -torch.inf)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_for_compiler(function: _Function) -> _Function:
    """`torch.compiler.assume_constant_result` without the import of the compiler, which takes 0.8 s."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_for_compiler  # the module's number changes while the compiler traces a `jvp`
def forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open: dual numbers exist only within one."""
    return forward_ad._current_level >= 0


def transform_error(backend: str) -> ValueError:
    """The error of a backend whose kernels would drop tangents, or do not know the transform that is at work."""
    return ValueError(
        f"backend: got {backend!r} in forward-mode differentiation or under a transform of torch.func, expected "
        "backend='reference', or 'auto', which takes it there"
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
    query: Tensor, key: Tensor, value: Tensor, second_derivatives: bool = False, **given: Any
) -> Tensor:
    """PyTorch's attention, by its formula where its kernels lack a derivative.

    The kernels have no tangents, and no gradient of a learned mask where a transform hides that it is learned. They
    have no second derivatives: with `second_derivatives` the slower formula serves wherever there is a gradient.
    """
    if recording():
        record(_scores(query, key, **given))
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
