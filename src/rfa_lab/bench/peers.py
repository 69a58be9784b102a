"""What the operator is timed against: attention of the same states by kernels of others.

Each peer is compared with its own formula in float64 at a small size before it is timed. A peer that cannot run, or
whose numbers are off, is named with the reason.
"""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rfa.checks import installed
from rfa.dynamics import rotation_of_heads, turn
from rfa.nn import RobustFilterAttention
from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.positions import checked_positions
from rfa.ops.problem import Parameters, Problem
from rfa.ops.transforms import joined, recorded_weights

from .measurement import TOLERANCES, Setting, Tolerance, compare_with_tolerances

_KERNELS = {
    "sdpa": None,  # PyTorch's own choice
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
PEERS = (*_KERNELS, "flash-attn", "flex", "flex-score")
_CHECKED_TOKENS = 256  # two blocks of flex attention; its gradients need whole blocks
# Of the tolerances of gradients, for peers with the filter's scores. Those of the norms, the products and the two calls
# cancel: in float32 a hundredth of the robustness's gradient was off on a CPU, in bfloat16 a sixth of the keys'.
_LOOSER, _LOOSEST = 30, 0.5
_UNCOMPILED = 2**24  # scores that flex attention may hold where it is not compiled
_LONGEST_REASON = 300

Attend = Callable[[Sequence[Tensor]], Tensor]  # from query, key and value to the estimate


class Peer(NamedTuple):
    """Causal attention of the states that the operator is given.

    Fields:
        attend: from the states to the estimate.
        exact: the same by its formula, for states and a layer in float64.
        filters: it has the filter's scores, so that the layer's dynamics have gradients too.
    """

    attend: Attend
    exact: Callable[[RobustFilterAttention, Sequence[Tensor]], Tensor]
    filters: bool = False


class Peers(NamedTuple):
    """The peers of one pass.

    Fields:
        calls: what is timed, by name.
        checks: of each of them, as `compare_with_tolerances` returns it.
        filters: the names of those with the filter's scores.
        refused: the other names, with the reason in words.
    """

    calls: dict[str, Callable[[], object]]
    checks: dict[str, dict[str, Any]]
    filters: list[str]
    refused: dict[str, str]


def peers(
    names: Sequence[str],
    layer: RobustFilterAttention,
    states: Sequence[Tensor],
    grad: Tensor,
    setting: Setting,
    backward: bool,
) -> Peers:
    """Make, check and call each peer once.

    `backward`: with gradients of the states and, where the scores are the filter's, of the layer's dynamics.
    """
    found = Peers({}, {}, [], {})
    if setting.device == "cuda":
        torch._dynamo.reset()  # compiled code is kept for few sizes
    for name in names:
        with warnings.catch_warnings(record=True) as said, torch.set_grad_enabled(backward):
            warnings.simplefilter("always")
            try:
                peer = _peer(name, layer, states, setting)
                check = _check(peer, layer, states, grad, setting, backward)
                if not check["passed"]:
                    raise ArithmeticError(f"its numbers are off: errors {check['errors']}")
                call = _call(peer, layer, states, grad, backward)
                call()
            except Exception as error:  # a library's own, a compiler's, or too little memory
                found.refused[name] = _reason(error, [str(each.message) for each in said])
                continue
        found.calls[name], found.checks[name] = call, check
        found.filters.extend([name] * peer.filters)
    return found


class Refusal(Exception):
    """The reason why a peer cannot run, in words of ours."""


def _reason(error: Exception, said: Sequence[str]) -> str:
    if isinstance(error, (Refusal, ArithmeticError)):
        return str(error)
    first = next(filter(None, map(str.strip, str(error).splitlines())), "no message")
    parts = [f"{type(error).__name__}: {first}", *(text.strip().splitlines()[0] for text in said if text.strip())]
    return "; ".join(dict.fromkeys(parts))[:_LONGEST_REASON]


def _peer(name: str, layer: RobustFilterAttention, states: Sequence[Tensor], setting: Setting) -> Peer:
    if name in _KERNELS:
        return Peer(functools.partial(dot_products, kernel=_KERNELS[name]), _exact_dot_products)
    if name == "flash-attn":
        return Peer(_flash_attention(setting), _exact_dot_products)
    whole, flex = name == "flex", _flex_attention(states, setting)
    exact = _exact_filter if whole else _exact_score
    return Peer(lambda states: _flex(layer, flex, states, whole), exact, filters=True)


def _call(
    peer: Peer, layer: RobustFilterAttention, states: Sequence[Tensor], grad: Tensor, backward: bool
) -> Callable[[], object]:
    if not backward:
        constant = [state.detach() for state in states]
        return lambda: peer.attend(constant)
    wanted = _wanted(peer, layer, states)
    return lambda: torch.autograd.grad(peer.attend(states), wanted, grad)


def _wanted(peer: Peer, layer: RobustFilterAttention, states: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose gradients are computed: the states and, with the filter's scores, those of the dynamics."""
    held = [*layer.dynamics.parameters(), *layer.dynamics.buffers()] if peer.filters else []
    return [*states, *(tensor for tensor in held if tensor.requires_grad)]


def _check(
    peer: Peer,
    layer: RobustFilterAttention,
    states: Sequence[Tensor],
    grad: Tensor,
    setting: Setting,
    backward: bool,
) -> dict[str, Any]:
    """Compare the first tokens of one sequence with the formula in float64.

    As in the check of the operator, half of the estimate's gradient is the estimate itself.
    """
    short = [state.detach()[:1, :, :_CHECKED_TOKENS].clone().requires_grad_(backward) for state in states]
    exact_states = [state.detach().double().requires_grad_(backward) for state in short]
    exact_layer = copy.deepcopy(layer).double()
    tolerance = TOLERANCES[setting.torch_dtype]
    actual, expected = peer.attend(short), peer.exact(exact_layer, exact_states)
    groups = {"estimate": ([(actual, expected)], tolerance.estimate)}
    if backward:
        signal = expected.detach() / expected.detach().square().mean().sqrt()
        along = grad[:1, :, :_CHECKED_TOKENS] + signal.to(grad.dtype)
        got = torch.autograd.grad(actual, _wanted(peer, layer, short), along)
        exact = torch.autograd.grad(expected, _wanted(peer, exact_layer, exact_states), along.double())
        pairs = list(zip(got, exact, strict=True))
        if peer.filters:
            tolerance = Tolerance(*(max(t, min(_LOOSER * t, _LOOSEST)) for t in tolerance))
            groups["gradients of parameters"] = (pairs[3:], tolerance.parameters)
        groups["gradients of states"] = (pairs[:3], tolerance.states)
    return compare_with_tolerances(groups)


def dot_products(states: Sequence[Tensor], kernel: SDPBackend | None = None) -> Tensor:
    """PyTorch's scaled dot-product attention, by its own choice of a kernel or by the one given."""
    query, key, value = states
    with nullcontext() if kernel is None else sdpa_kernel([kernel]):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _exact_dot_products(layer: RobustFilterAttention, states: Sequence[Tensor]) -> Tensor:
    query, key, value = states
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def _flash_attention(setting: Setting) -> Attend:
    """FlashAttention, of the package `flash_attn`."""
    if not installed("flash_attn"):
        raise Refusal("flash_attn is not installed")
    if setting.device != "cuda":
        raise Refusal(f"it needs a GPU: got the device {setting.device}")
    if setting.dtype == "float32":
        raise Refusal("got float32, expected bfloat16 or float16")
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    def attend(states: Sequence[Tensor]) -> Tensor:
        query, key, value = (state.transpose(1, 2) for state in states)  # (batch, length, heads, channels)
        return flash_attn_func(query, key, value, causal=True).transpose(1, 2)

    return attend


def _flex_attention(states: Sequence[Tensor], setting: Setting) -> Callable[..., Any]:
    """Flex attention, compiled on a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    if setting.device == "cuda":
        return torch.compile(flex_attention, dynamic=False, fullgraph=True)
    batch, heads, length, _ = states[0].shape
    if (scores := batch * heads * length**2) > _UNCOMPILED:
        raise Refusal(f"not compiled on a CPU it holds all scores: got {scores:,}, expected at most {_UNCOMPILED:,}")
    return flex_attention


@functools.lru_cache(maxsize=4)  # a model makes its mask once
def _causal_blocks(length: int, device: torch.device) -> Any:
    from .flex import causal_blocks

    return causal_blocks(length, device)


def _problem(layer: RobustFilterAttention, states: Sequence[Tensor]) -> Problem:
    length, device = states[0].shape[2], states[0].device
    positions = checked_positions(1, length, length, device, None)
    return Problem(Parameters(**layer.dynamics()), positions, layer.options)


def _in_frame(attend: Callable[..., Tensor], problem: Problem, states: Sequence[Tensor]) -> Tensor:
    """`attend(query, key, value)` in the common frame: turned there, and its estimate turned back.

    As by the Triton kernels, states are turned in float32 and then rounded to their own dtype.
    """
    cos, sin = rotation_of_heads(problem.parameters.frequency, problem.positions.times_of_heads()[0])
    query, key, value = (turn(state, cos, -sin) for state in states)
    if not problem.options.rotate_values:
        return attend(query, key, states[2]).to(query.dtype)
    return turn(attend(query, key, value), cos, sin).to(query.dtype)


def _flex(layer: RobustFilterAttention, flex: Callable[..., Any], states: Sequence[Tensor], whole: bool) -> Tensor:
    """The operator by flex attention with the filter's scores.

    The whole operator takes two calls. Values weighed by the scores, but not by the decay after the softmax, take one.
    """
    from .flex import decayed_attention, filter_scores

    problem = _problem(layer, states)
    flex = functools.partial(flex, scale=1.0, block_mask=_causal_blocks(states[0].shape[2], states[0].device))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = filter_scores(query, key, problem)
        return decayed_attention(flex, query, key, value, scores) if whole else flex(query, key, value, scores.plain)

    return _in_frame(attend, problem, states)


def _exact_filter(layer: RobustFilterAttention, states: Sequence[Tensor]) -> Tensor:
    query, key, value = states
    estimate = located_filter_attention(query, key, value, _problem(layer, states), backend="reference")
    return estimate if isinstance(estimate, Tensor) else estimate[0]


def _exact_score(layer: RobustFilterAttention, states: Sequence[Tensor]) -> Tensor:
    """The reference's weights before the decay, times the values."""
    problem, (query, key, value) = _problem(layer, states), states
    with recorded_weights() as rows:
        located_filter_attention(query, key, value, problem, backend="reference")
    weights, _ = joined(rows, problem.positions.visible(causal=True))
    return _in_frame(lambda query, key, value: weights @ value, problem, states)
