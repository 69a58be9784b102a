"""Phases, and the path of constant dynamics at given times, in one launch each.

They give what `rotation_tables` and `separable_path` give in some fifty launches of PyTorch. Where the decay or the
times are learned, or heads have times of their own, and for a Riccati prior with padding or segments, PyTorch serves.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rfa.ops.dense import Phases
from rfa.ops.prior import SeparablePath, separable_path
from rfa.ops.problem import Problem
from rfa.ops.transforms import operator, refuse_gradient, register_gradient

from .parameters import integrals, steady_gain, steady_gradient, steady_ratio
from .tiles import BITS, COUNTS, LEAST

BLOCK = 512  # times of a step
FULL_TURN = tl.constexpr(6.283185307179586)


@triton.jit(do_not_specialize=[*COUNTS, "length", "time_head"])
@no_type_check
def phases_kernel(
    frequency, times, cos, sin, heads, length, modes, blocks, time_batch, time_head,
    MODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cosine and sine of `omega t`: the turns are taken off in float64, the rest is float32."""
    block, pair = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    token, mode = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, MODES)
    mask = (token < length)[:, None] & (mode < modes)[None, :]
    time = tl.load(times + batch * time_batch + head * time_head + token, mask=token < length, other=0.0)
    rate = tl.load(frequency + head * modes + mode, mask=mode < modes, other=0.0).to(tl.float64)
    turns = time.to(tl.float64)[:, None] * (rate / FULL_TURN)[None, :]
    phase = ((turns - tl.floor(turns + 0.5)) * FULL_TURN).to(tl.float32)
    at = (pair * length + token)[:, None] * modes + mode[None, :]
    tl.store(cos + at, tl.cos(phase), mask=mask)
    tl.store(sin + at, tl.sin(phase), mask=mask)


@operator("triton_phases", "(Tensor frequency, Tensor times) -> (Tensor, Tensor)", "cuda", "cpu")
def triton_phases(frequency: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine `(b, heads, length, modes)` in float32; times `(b, 1 or heads, length)`."""
    (heads, modes), (batch, of_heads, length) = frequency.shape, times.shape
    cos, sin = (times.new_empty(batch, heads, length, modes, dtype=torch.float32) for _ in range(2))
    if cos.numel():
        times, block = times.contiguous(), max(16, 2048 // triton.next_power_of_2(modes))
        blocks = -(-length // block)
        with torch.cuda.device_of(times):
            phases_kernel[(batch * heads * blocks,)](
                frequency.contiguous(), times, cos, sin, heads, length, modes, blocks, of_heads * length,
                length if of_heads > 1 else 0, MODES=triton.next_power_of_2(modes), BLOCK=block, num_warps=4,
            )  # fmt: skip
    return cos, sin


@torch.library.register_fake("rfa::triton_phases")
def _(frequency, times):
    shape = (times.shape[0], frequency.shape[0], times.shape[2], frequency.shape[1])
    return tuple(times.new_empty(shape, dtype=torch.float32) for _ in range(2))


def phases(frequency: Tensor, times: Tensor) -> Phases:
    """The phases of a call. Their gradients are formed elsewhere."""
    cos, sin = triton_phases(frequency.detach(), times.detach())
    return cos, sin


@triton.jit
@no_type_check
def load_parameters(
    decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, head
):  # fmt: skip
    """mu, sigma^2, eta^2, gamma^2, sigma_0^2, nu_s and beta_s of a head in float64."""
    return (
        tl.load(decay + head).to(tl.float64), tl.load(process_noise + head).to(tl.float64),
        tl.load(key_noise + head).to(tl.float64), tl.load(query_noise + head).to(tl.float64),
        tl.load(noise_floor + head).to(tl.float64), tl.load(robustness + head).to(tl.float64),
        tl.load(inverse_temperature + head).to(tl.float64),
    )  # fmt: skip


@triton.jit
@no_type_check
def interval_gain(times, index, keys, of_head):
    """`steady_ratio` of the interval before each key, log K and log(1 - K). The first key takes the one after it."""
    mu, sigma2, eta2, _, floor, _, _ = of_head
    earlier = tl.where(index == 0, 0, index - 1)
    inside = index < keys
    later = tl.where(index == 0, tl.minimum(1, keys - 1), index)
    interval = tl.load(times + later, mask=inside, other=1.0) - tl.load(times + earlier, mask=inside, other=0.0)
    known = keys > 1  # a key that is alone has the gain 1
    y, g, root, phi = steady_ratio(mu, sigma2, eta2 + floor, tl.where(known, interval, 1.0))
    log_gain, log_rest = steady_gain(y)
    return y, g, root, phi, tl.where(known, log_gain, 0.0), tl.where(index > 0, log_rest, 0.0)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def path_kernel(
    key_times, query_times, decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature,
    key_path, query_path, key_bias, scalars, heads, batch, keys, queries, modes,
    SAME: tl.constexpr, RICCATI: tl.constexpr, IN_BIAS: tl.constexpr, EXPONENTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """M, `u / sigma^2` and C at keys and queries, the bias of keys and the scalars: one program a row and head."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    of_head = load_parameters(
        decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, head
    )  # fmt: skip
    mu, sigma2, eta2, gamma2, floor, freedom, beta = of_head
    key_times += row.to(tl.int64) * keys
    query_times += row.to(tl.int64) * queries
    place = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], float("inf"), tl.float64)
    for start in range(0, keys, BLOCK):
        found = tl.load(key_times + start + place, mask=start + place < keys, other=float("inf"))
        least = tl.minimum(least, found)
    if not SAME:
        for start in range(0, queries, BLOCK):
            found = tl.load(query_times + start + place, mask=start + place < queries, other=float("inf"))
            least = tl.minimum(least, found)
    origin = tl.min(least, 0)
    part = (batch * heads).to(tl.int64) * keys
    total = origin * 0.0
    for start in range(0, keys, BLOCK):
        index = start + place
        mask = index < keys
        elapsed = tl.load(key_times + index, mask=mask, other=0.0) - origin
        at = tl.program_id(0).to(tl.int64) * keys + index
        decay_sum, phi = mu * elapsed, integrals(2.0 * mu, elapsed)[0]
        tl.store(key_path + at, decay_sum, mask=mask)
        tl.store(key_path + part + at, phi, mask=mask)
        if SAME:
            tl.store(query_path + at, decay_sum, mask=mask)
            tl.store(query_path + part + at, phi, mask=mask)
        if RICCATI:
            _, _, _, _, log_gain, log_rest = interval_gain(key_times, index, keys, of_head)
            log_rest = tl.where(mask, log_rest, 0.0)
            third = (tl.cumsum(log_rest, 0) + total) * (beta * BITS)
            tl.store(key_path + 2 * part + at, third, mask=mask)
            tl.store(query_path + 2 * part + at, third, mask=mask)
            tl.store(key_bias + at, (log_gain * (beta * BITS)).to(tl.float32), mask=mask)
            total += tl.sum(log_rest, 0)
    if not SAME:
        part = (batch * heads).to(tl.int64) * queries
        for start in range(0, queries, BLOCK):
            index = start + place
            elapsed = tl.load(query_times + index, mask=index < queries, other=0.0) - origin
            at = tl.program_id(0).to(tl.int64) * queries + index
            tl.store(query_path + at, mu * elapsed, mask=index < queries)
            tl.store(query_path + part + at, integrals(2.0 * mu, elapsed)[0], mask=index < queries)
    if row == 0:
        coefficient = beta * BITS if EXPONENTIAL else beta * (freedom + 1.0)
        if IN_BIAS:  # Sigma + gamma^2 in both places: gamma^2 joins the floor
            floor, gamma2 = floor + gamma2, gamma2 * 0.0
        at_head = scalars + head
        tl.store(at_head, coefficient)
        tl.store(at_head + heads, 1.0 / (freedom * modes))
        tl.store(at_head + 2 * heads, eta2)
        tl.store(at_head + 3 * heads, floor)
        tl.store(at_head + 4 * heads, gamma2)
        tl.store(at_head + 5 * heads, beta)
        tl.store(at_head + 6 * heads, sigma2)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def path_gradient_kernel(
    key_times, decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, key_path,
    of_path, of_query_path, of_bias, of_scalars, gradients, scalar_stride, head_stride, heads, batch, keys, modes,
    RICCATI: tl.constexpr, IN_BIAS: tl.constexpr, EXPONENTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of sigma^2, eta^2, gamma^2, sigma_0^2, nu_s and beta_s, `(6, heads)`: one program a head."""
    head = tl.program_id(0)
    of_head = load_parameters(
        decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, head
    )  # fmt: skip
    freedom, beta, observed = of_head[5], of_head[6], of_head[2] + of_head[4]
    at = of_scalars + head * head_stride
    coefficient, weight, of_eta = tl.load(at), tl.load(at + scalar_stride), tl.load(at + 2 * scalar_stride)
    of_floor, of_gamma = tl.load(at + 3 * scalar_stride), tl.load(at + 4 * scalar_stride)
    of_beta, of_sigma = tl.load(at + 5 * scalar_stride), tl.load(at + 6 * scalar_stride)
    of_freedom = -weight / (freedom * freedom * modes)
    if EXPONENTIAL:
        of_beta += coefficient * BITS
    else:
        of_beta += coefficient * (freedom + 1.0)
        of_freedom += coefficient * beta
    if IN_BIAS:
        of_gamma = of_floor
    if RICCATI:
        place = tl.arange(0, BLOCK)
        long = keys.to(tl.int64)
        part = long * batch * heads
        for row in range(batch):
            carried = of_eta * 0.0  # of C at all later keys
            blocks = tl.cdiv(keys, BLOCK)
            for step in range(blocks):
                index = (blocks - 1 - step) * BLOCK + place
                mask = index < keys
                at_key = long * (row * heads + head) + index
                y, g, root, phi, log_gain, _ = interval_gain(key_times + long * row, index, keys, of_head)
                of_gain = tl.load(of_bias + at_key, mask=mask, other=0.0).to(tl.float64)
                of_third = tl.load(of_path + 2 * part + at_key, mask=mask, other=0.0)
                of_third += tl.load(of_query_path + 2 * part + at_key, mask=mask, other=0.0)
                third = tl.load(key_path + 2 * part + at_key, mask=mask, other=0.0)
                of_beta += tl.sum(of_gain * BITS * log_gain + of_third * third / beta, 0)
                of_gain = tl.where(mask & (keys > 1), of_gain * (beta * BITS), 0.0)
                of_third *= beta * BITS
                added = tl.sum(of_third, 0)
                of_rest = carried + added - (tl.cumsum(of_third, 0) - of_third)
                of_rest = tl.where(mask & (index > 0), of_rest, 0.0)
                carried += added
                of_g = steady_gradient(of_gain, of_rest, y, root) / tl.maximum(observed, LEAST)
                # a variance that counts as LEAST has no gradient
                total = tl.where(observed >= LEAST, tl.sum(of_g * g, 0), 0.0)
                of_eta, of_floor = of_eta - total, of_floor - total
                of_sigma += tl.where(of_head[1] >= LEAST, tl.sum(of_g * phi, 0), 0.0)
    result = gradients + head
    tl.store(result, of_sigma)
    tl.store(result + heads, of_eta)
    tl.store(result + 2 * heads, of_gamma)
    tl.store(result + 3 * heads, of_floor)
    tl.store(result + 4 * heads, of_freedom)
    tl.store(result + 5 * heads, of_beta)


_NAMES = ["decay", "process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature"]
_GIVEN = ", ".join(f"Tensor {name}" for name in _NAMES) + ", int modes, bool riccati, bool in_bias, bool exponential"


@operator(
    "triton_path",
    f"(Tensor key_times, Tensor? query_times, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)",
    "cuda",
    "cpu",
)
def triton_path(key_times: Tensor, query_times: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    """Path at keys and at queries `(2 or 3, b, heads, length)`, bias `(b, heads, keys)`, scalars `(7, heads)`.

    Without query times the queries are the keys. Without the Riccati prior the bias is empty.
    """
    (*parameters, modes, riccati, in_bias, exponential), (batch, keys) = given, key_times.shape
    heads, queries = parameters[0].shape[0], keys if query_times is None else query_times.shape[1]
    made = _empty_path(key_times, heads, queries, riccati)
    if keys or queries:
        with torch.cuda.device_of(key_times):
            path_kernel[(batch * heads,)](
                key_times.contiguous(), (key_times if query_times is None else query_times).contiguous(),
                *(p.contiguous() for p in parameters), *made, heads, batch, keys, queries, modes,
                SAME=query_times is None, RICCATI=riccati, IN_BIAS=in_bias, EXPONENTIAL=exponential, BLOCK=BLOCK,
            )  # fmt: skip
    return made


def _empty_path(times: Tensor, heads: int, queries: int, riccati: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, (batch, keys), double = times.new_empty, times.shape, torch.float64
    return (
        new(2 + riccati, batch, heads, keys, dtype=double), new(2 + riccati, batch, heads, queries, dtype=double),
        new(batch, heads, keys if riccati else 0, dtype=torch.float32), new(7, heads, dtype=double),
    )  # fmt: skip


@torch.library.register_fake("rfa::triton_path")
def _(key_times, query_times, decay, *others):
    queries = key_times.shape[1] if query_times is None else query_times.shape[1]
    return _empty_path(key_times, decay.shape[0], queries, others[-3])


def _empty_gradients(parameter: Tensor) -> Tensor:
    return parameter.new_empty(6, parameter.shape[0], dtype=torch.promote_types(parameter.dtype, torch.float32))


@operator(
    "triton_path_backward",
    f"(Tensor? of_path, Tensor? of_query_path, Tensor? of_bias, Tensor of_scalars, Tensor key_path, Tensor key_times, "
    f"{_GIVEN}) -> Tensor",
    "cuda", "cpu",
)  # fmt: skip
def triton_path_backward(
    of_path: Tensor | None, of_query_path: Tensor | None, of_bias: Tensor | None, of_scalars: Tensor, key_path: Tensor,
    key_times: Tensor, *given: Any,
) -> Tensor:  # fmt: skip
    """Gradients of sigma^2, eta^2, gamma^2, sigma_0^2, nu_s and beta_s, `(6, heads)` in at least float32."""
    (*parameters, modes, riccati, in_bias, exponential), (batch, keys) = given, key_times.shape
    gradients = _empty_gradients(parameters[1])
    of_paths = (x if x is None else x.contiguous() for x in (of_path, of_query_path, of_bias))
    with torch.cuda.device_of(key_times):
        path_gradient_kernel[(gradients.shape[1],)](
            key_times.contiguous(), *(p.contiguous() for p in parameters), key_path, *of_paths,
            of_scalars, gradients, *of_scalars.stride(), gradients.shape[1], batch, keys, modes, RICCATI=riccati,
            IN_BIAS=in_bias, EXPONENTIAL=exponential, BLOCK=BLOCK,
        )  # fmt: skip
    return gradients


@torch.library.register_fake("rfa::triton_path_backward")
def _(of_path, of_query_path, of_bias, of_scalars, key_path, key_times, decay, process_noise, *others):
    return _empty_gradients(process_noise)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    key_times, _, *given = inputs
    ctx.set_materialize_grads(False)
    if not given[-3]:  # M and u have no gradient here, C and the bias have one
        ctx.mark_non_differentiable(*output[:3])
    ctx.save_for_backward(output[0], key_times, *given[:7])
    ctx.options = given[7:]


def _backward(ctx: Any, *of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = triton_path_backward(*of_outputs, *ctx.saved_tensors, *ctx.options)
    parameters = ctx.saved_tensors[2:]
    found = [row.to(p.dtype) for row, p in zip(gradients, parameters[1:], strict=True)]
    return (None, None, None, *found, None, None, None, None)


register_gradient(triton_path, _backward, _save)
refuse_gradient(triton_path_backward, "triton")


def path(problem: Problem) -> SeparablePath:
    """The path of a call. Where M and u are fixed a seventh scalar is sigma^2, the factor of u."""
    parameters, positions, options, riccati = problem
    of_path = parameters.decay, positions.key_times, positions.query_times
    learned = torch.is_grad_enabled() and any(x.requires_grad for x in of_path)
    same = positions.query_times is positions.key_times
    of_intervals = options.prior == "riccati" and (positions.key_groups is not None or not same)
    given = parameters.horizon, parameters.noise, positions.clock, riccati
    if learned or of_intervals or any(x is not None for x in given):
        return separable_path(problem)
    named = [getattr(parameters, name) for name in _NAMES]
    key_path, query_path, bias, scalars = triton_path(
        positions.key_times, None if same else positions.query_times, *named, parameters.frequency.shape[-1],
        options.prior == "riccati", options.query_noise_in_bias, options.weight == "exponential",
    )  # fmt: skip
    key_bias = bias if options.prior == "riccati" else None
    return SeparablePath(key_path, query_path, key_bias, scalars, named[0].detach())
