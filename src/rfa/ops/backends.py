"""The choice of a backend, and how a fused kernel is called.

A backend says what it can do here, what "auto" takes, and why a backend asked for by name does not run.
"""

import functools
import math
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from rfa.checks import exported, installed

from . import reference
from .dense import all_finite, finite, of_finite, rotated
from .kernel import HALF_AND_SINGLE, TRITON_CHANNELS, Kernel, KernelInputs, kernel_inputs, rotation_tables
from .positions import Positions
from .prior import DecodingCache, SeparablePath, certified_tail, eps_of, kernel_prior
from .problem import Parameters, Problem
from .transforms import (
    constant_for_compiler,
    readable,
    recording,
    transform_error,
    transformed,
    without_autocast,
)

# Gradients of frequencies and times where a kernel turns the states itself


class _PhaseGradient(torch.autograd.Function):
    """The states themselves, `(batch, heads, length, 2 d)` in float32, which a kernel turns by the phases `omega t`.

    Or it has turned them. Where the sign is -1 it turns them backwards. Their gradients give the frequencies
    `(heads, modes)` and the times `(b, 1 or heads, length)` theirs.
    """

    @staticmethod
    def forward(frequency: Tensor, times: Tensor, sign: int, *states: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in states)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:  # type: ignore[type-arg]
        frequency, times, sign, *states = inputs
        ctx.save_for_backward(frequency, times, *states)
        ctx.sign = sign  # type: ignore[attr-defined]

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        frequency, times, *states = ctx.saved_tensors
        slope = functools.reduce(torch.add, map(_slope, states, gradients))
        if times.shape[0] == 1:
            slope = slope.sum(0, keepdim=True)
        of_times = of_frequency = None
        if ctx.needs_input_grad[0]:  # in the precision of times: distant ones cancel down to lags
            of_frequency = ctx.sign * (slope.to(times.dtype) * times[..., None]).sum((0, 2)).to(frequency.dtype)
        if ctx.needs_input_grad[1]:
            of_times = (slope * frequency.to(slope.dtype)[:, None]).sum(-1).sum_to_size(times.shape)  # no autocast
            of_times = ctx.sign * of_times.to(times.dtype)
        return of_frequency, of_times, None, *gradients


def _slope(states: Tensor, gradient: Tensor) -> Tensor:
    """`<dL/dx, J x>` of each mode, `(batch, heads, length, modes)`. A state that is not finite has none."""
    real, imaginary = states.chunk(2, dim=-1)
    along, across = gradient.chunk(2, dim=-1)
    slope = torch.addcmul(across * real, along, imaginary, value=-1)
    return slope if all_finite(states) else slope.masked_fill(finite(states)[1][..., None], 0.0)


Lags = Literal["uniform", "given"]


class Backend(NamedTuple):
    """An implementation of the operator.

    Fields:
        kernel: loads the fused kernel; None for the reference.
        missing: why it cannot run on this machine at all, or None.
        devices: device types, None for any.
        dtypes: None for any floating-point dtype.
        channels: head sizes 2 d, None for any.
        whole: loads `serves` and `filter_attention`, which take states and a problem; None where there is none.
    """

    kernel: Callable[[], Kernel] | None
    missing: Callable[[], str | None]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    channels: tuple[int, ...] | None = None
    whole: Callable[[], ModuleType] | None = None

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        problem: Problem,
        cache: DecodingCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The filtered values and, if asked for, the log precision."""
        if self.kernel is None:
            return reference.filter_attention(query, key, value, problem)
        parameters, positions, options, _ = problem
        if self.whole is not None and (module := self.whole()).serves(query, problem):
            if cache is not None and options.certified:
                kernel_prior(problem, cache)  # fills the cache's tables, by which it drops old keys
            estimate, log_sum = module.filter_attention(query, key, value, problem)
            if parameters.horizon is not None and options.rotate_values and not options.in_frame:
                estimate = _turned_ahead(estimate, parameters).to(query.dtype)
            return estimate, log_sum * math.log(2) if options.log_precision else None
        kernel = self.kernel()
        casts = torch.is_autocast_enabled(query.device.type)  # the context costs a decoding step more than the question
        with without_autocast(query) if casts else nullcontext():
            prior = kernel_prior(problem, cache, kernel.tables, kernel.path)
            key_norm = None if cache is None else cache.key_norm
            eps = eps_of(options, query.dtype)
            dtype, frequency = query.dtype, None if options.in_frame else parameters.frequency
            if parameters.horizon is not None and isinstance(
                prior, SeparablePath
            ):  # tables contain the horizon's decay
                elapsed = parameters.decay.to(torch.float32) * parameters.horizon
                decay = torch.exp(-elapsed).to(torch.float32)[:, None, None]
                query = query.to(torch.float32)
                key, value = (of_finite(decay.mul, x.to(torch.float32)) for x in positions.without_absent(key, value))
                key_norm = None if key_norm is None else key_norm * decay[..., 0].square()
            inputs = kernel_inputs(
                query,
                key,
                value,
                None,
                prior,
                positions,
                causal=options.causal,
                score_kind=options.weight,
                gate=options.gate,
                rotate_values=options.rotate_values,
                key_norm=key_norm,
                tail=certified_tail(prior, positions, eps) if kernel.leaves_out else None,
                decode=frequency is None and not torch.is_grad_enabled(),
            )
            estimate, log_sum = attend(kernel, inputs, positions, frequency)
            if parameters.horizon is not None and frequency is not None and options.rotate_values:
                estimate = _turned_ahead(estimate, parameters)
        log_precision = (log_sum * math.log(2)).to(torch.float32) if options.log_precision else None
        return estimate.to(dtype), log_precision


def _turned_ahead(estimate: Tensor, parameters: Parameters) -> Tensor:
    """The estimate turned by the horizon, by angles in float32: half precision would round them."""
    assert parameters.horizon is not None
    angle = parameters.frequency.to(torch.float32) * parameters.horizon[:, None]
    return rotated(estimate, angle, torch.ones(estimate.shape[2], device=estimate.device))


def _cpu_kernel() -> Kernel:
    from .cpu.operator import fused_attention, phases

    return Kernel(fused_attention, phases, leaves_out=True)


def _triton_kernel() -> Kernel:
    from .triton.pairs_operator import fused_attention
    from .triton.pairs_prior import path, phases

    return Kernel(fused_attention, phases, path, tables=False)


def _triton_whole() -> ModuleType:
    from .triton import operator

    return operator


def _cpu_missing() -> str | None:
    from .cpu.compiler import BuildError
    from .cpu.operator import library

    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def interpreted() -> bool:
    """Whether Triton's kernels run under its interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_missing() -> str | None:
    if torch.version.hip is not None and not interpreted():  # its devices are called "cuda" too
        return "there is no CUDA device: this PyTorch is built for ROCm"
    if not installed("triton"):
        return "triton is not installed; it comes with the CUDA builds of PyTorch"
    if not torch.cuda.is_available() and not interpreted():
        return "there is no CUDA device"
    return None


BACKENDS = {  # the preferred one first
    "triton": Backend(_triton_kernel, _triton_missing, ("cuda",), HALF_AND_SINGLE, TRITON_CHANNELS, _triton_whole),
    "cpu": Backend(_cpu_kernel, _cpu_missing, ("cpu",), HALF_AND_SINGLE),
    "reference": Backend(None, lambda: None),
}


@functools.cache
def _missing(name: str) -> str | None:
    return BACKENDS[name].missing()


@constant_for_compiler  # which looks through a cache, and would trace the compiler's call
def missing(name: str) -> str | None:
    """Why a backend cannot run on this machine, or None. The CPU's kernels are compiled for the answer, once."""
    return _missing(name)


@constant_for_compiler
def _to_onnx() -> bool:
    """Whether a program is being exported to ONNX."""
    return (exported() or torch.jit.is_tracing()) and torch.onnx.is_in_onnx_export()


def available_backends() -> list[str]:
    """The names of the backends that can run here, the preferred one first."""
    return [name for name in BACKENDS if missing(name) is None]


def choose_backend(
    name: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    channels: tuple[int, ...] = (),
) -> str:
    """The name of the backend that serves states of this device, dtype and these head sizes.

    Where the kernels cannot be compiled, "auto" takes the reference and warns once. In an export to ONNX, which has no
    such kernels, it takes the reference too.

    Raises:
        ValueError: if `name` is neither "auto" nor a backend that can run here, or it does not serve such states: a
            name never falls back to another.
        RuntimeError: if it is "cpu" and its kernels cannot be compiled: what the compiler said last, and the log.
    """
    device = device.type if isinstance(device, torch.device) else torch.device(device).type
    if name == "auto" and _to_onnx():
        return "reference"
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"backend: got {name!r}, expected 'auto' or one of {list(BACKENDS)}")
        if name != "reference" and _to_onnx():
            raise ValueError(f"backend: got {name!r} in an export to ONNX, expected 'auto' or 'reference'")
        if name != "cpu" and (reason := missing(name)) is not None:
            raise ValueError(f"backend: got {name!r} ({reason}), expected 'auto' or one of {available_backends()}")
        if refusal := _refusal(name, device, dtype, channels):
            raise ValueError(f"backend: {refusal}")
        if (reason := missing(name)) is not None:
            raise RuntimeError(f"backend: {name!r} cannot run here: {reason}")
        return name
    for candidate in BACKENDS:
        if candidate == "triton" and device == "cpu":  # its interpreter runs only where it is asked for
            continue
        if _refusal(candidate, device, dtype, channels) is None:
            if (reason := missing(candidate)) is None:
                return candidate
            _warn_once(candidate, reason)
    return "reference"


def backend_for(name: str, query: Tensor, value: Tensor, lags: Lags | None = None, dropout: bool = False) -> Backend:
    """The backend that serves these states; raises as `choose_backend`.

    Only the reference serves `dropout`, transforms of `torch.func` and forward mode. It runs wherever weights are
    recorded, whatever the name. `lags` are those of a prior that no path of times adds up to, that of time-dependent
    noise: with "uniform" ones a kernel that reads tables serves it, with "given" ones only the reference.
    """
    if recording():  # a fused kernel has no weights
        return BACKENDS["reference"]
    if dropout and name in ("auto", "reference"):  # layers refuse other names when they are built
        return BACKENDS["reference"]
    chosen = choose_backend(name, query.device, query.dtype, (query.shape[-1], value.shape[-1]))
    kernel = BACKENDS[chosen].kernel
    if lags is not None and kernel is not None and not (lags == "uniform" and kernel().tables):
        if name != "auto":
            raise ValueError(
                f"backend: got {name!r} with time-dependent noise, expected 'auto', 'reference' or, at times 0, 1, 2, "
                "..., 'cpu': its variance is a function of the lag that no path of times adds up to"
            )
        chosen = "reference"
    if transformed() and chosen != "reference":
        if name != "auto":
            raise transform_error(name)
        chosen = "reference"
    return BACKENDS[chosen]


def _refusal(name: str, device: str, dtype: torch.dtype | None, channels: tuple[int, ...]) -> str | None:
    """Why a backend does not serve such states, or None."""
    backend = BACKENDS[name]
    devices = backend.devices
    if devices is not None and device not in devices and not (name == "triton" and device == "cpu" and interpreted()):
        return f"got {name!r} with states on {device}, expected {' or '.join(devices)}"
    if backend.dtypes is not None and dtype is not None and dtype not in backend.dtypes:
        return f"got {name!r} with {dtype}, expected one of {', '.join(map(str, backend.dtypes))}"
    if backend.channels is not None and (wrong := [c for c in channels if c not in backend.channels]):
        return f"got {name!r} with {wrong[0]} channels a head, expected one of {', '.join(map(str, backend.channels))}"
    return None


_warned: set[str] = set()


@constant_for_compiler
def _warn_once(name: str, reason: str) -> None:
    if name in _warned:
        return
    _warned.add(name)
    warnings.warn(f"rfa: the {name!r} backend cannot run, the slower reference does: {reason}", stacklevel=5)


def attend(
    kernel: Kernel, inputs: KernelInputs, positions: Positions, frequency: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The estimate in float32 and `log2 sum_j 2^z` by a kernel; see `rfa.ops.kernel`.

    Without a frequency the states stand in the common frame. Otherwise the kernel turns them itself.
    """
    if frequency is None:
        return kernel.attention(inputs)
    query, key, value, *_ = inputs
    of_keys, of_queries = positions.times_of_heads()
    learned = torch.is_grad_enabled() and any(x.requires_grad for x in (frequency, of_keys, of_queries))
    with torch.no_grad():
        (key_cos, key_sin), (query_cos, query_sin) = rotation_tables(frequency, positions, kernel.phases)
    phases: dict[str, Any] = {"key_cos": key_cos, "key_sin": key_sin, "query_cos": query_cos, "query_sin": query_sin}
    if learned:  # in float32: phases are sums over the gradients of states, which half precision would round
        query, key, value = (states.to(torch.float32) for states in (query, key, value))
        (query,) = _PhaseGradient.apply(frequency, of_queries, -1, query)
        key, *turning = _PhaseGradient.apply(frequency, of_keys, -1, key, *[value] * inputs.rotate_values)
        value = turning[0] if turning else value
    estimate, log_sum = kernel.attention(inputs._replace(query=query, key=key, value=value, **phases))
    if learned and inputs.rotate_values:
        (estimate,) = _PhaseGradient.apply(frequency, of_queries, 1, estimate)
    return estimate, log_sum


# Which compiled code serves the new tokens of a decoder. Caches ask here, as the operators ask `backends.py`


def compiled_decoding(backend: str, *states: Tensor) -> ModuleType | None:
    """`rfa.ops.cpu.decoding`, whose `enter` and `decode_token` serve these states; None where PyTorch's operators do.

    They serve states on a CPU, of one dtype, without gradients. A program that is recorded needs PyTorch's operators:
    it would not hold what compiled code writes.
    """
    if backend not in ("auto", "cpu") or torch.is_grad_enabled():
        return None
    dtype = states[0].dtype
    if dtype not in HALF_AND_SINGLE:
        return None
    for x in states:
        if type(x) is not Tensor or x.dtype is not dtype or not x.is_cpu or x.stride(-1) != 1:
            return None
    if transformed() or recording() or not readable():  # no wrapped tensors: these are plain ones
        return None
    if missing("cpu") is not None:
        return None
    from .cpu import decoding

    return decoding
