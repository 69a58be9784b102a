"""The shortest possible time of the work on this machine: the amount of work over measured peak rates."""

import functools
import math
from typing import Any, NamedTuple

import torch

from .measurement import Setting, StateShape, in_turns

# Number of vector instructions of a float32 exponential and logarithm, from `exp2` and `log2_1p` of
# ops/cpu/kernels/functions.h as g++ compiles them for AVX2. Other implementations need no fewer. In the time of one
# instruction a CPU could do a fused multiply-add (two flops) for as many numbers.
EXPONENTIAL, LOGARITHM = 12, 19
_ROOMY = 2**33  # bytes of a GPU that holds the copy of two times 2 GiB
FORWARD_PRODUCTS = 2  # q.k and A v
BACKWARD_PRODUCTS = 5  # q.k again, dout.v, and one for each gradient of v, k and q


class Work(NamedTuple):
    """Operations that every implementation in linear memory needs, counted over the visible pairs, and bytes moved."""

    flops: float
    exponentials: float
    logarithms: float
    bytes: float


class Peaks(NamedTuple):
    """The highest rates of this machine per second, measured in this process; None if not measured."""

    flops: float
    exponentials: float | None
    logarithms: float | None
    bytes: float


def attention_work(shape: StateShape, backward: bool, logarithm: bool, itemsize: int) -> Work:
    """The work of causal self-attention.

    Each pair costs `2 channels` flops a product, and each weight one exponential and, optionally, one logarithm. The
    backward pass computes the scores again. States, gradients and the output are moved once in each pass.
    """
    batch, heads, length, channels = shape
    pairs = batch * heads * length * (length + 1) / 2
    products = FORWARD_PRODUCTS + (BACKWARD_PRODUCTS if backward else 0)
    passes, tensors = (2, 12) if backward else (1, 4)
    weights = pairs * passes
    moved = tensors * math.prod(shape) * itemsize
    return Work(2 * channels * products * pairs, weights, weights if logarithm else 0.0, moved)


def decoding_work(shape: StateShape, logarithm: bool, itemsize: int) -> Work:
    """The work of one query for each head against `length` cached keys and values, which are read once."""
    batch, heads, length, channels = shape
    pairs = batch * heads * length
    return Work(4 * channels * pairs, pairs, pairs if logarithm else 0.0, 2 * channels * pairs * itemsize)


def bound(work: Work, peaks: Peaks, device: str) -> float:
    """The shortest possible time of the work, in seconds.

    A CPU computes products, exponentials and logarithms on the same units, one after the other. A GPU computes them on
    different units at the same time. Both read memory while they compute.
    """
    parts = [amount / rate for amount, rate in zip(work, peaks, strict=True) if rate]
    *computing, moving = parts
    return max(moving, max(computing) if device == "cuda" else sum(computing))


def bound_fields(works: dict[str, Work], setting: Setting) -> dict[str, Any]:
    """The bound of each contestant, and the peak rates that it uses, for a line of results."""
    peaks = measured_peaks(setting.device, setting.torch_dtype, torch.get_num_threads())
    bounds = {name: {**work._asdict(), "seconds": bound(work, peaks, setting.device)} for name, work in works.items()}
    return {"bound": bounds, "peaks": peaks._asdict()}


@functools.cache
def measured_peaks(device: str, dtype: torch.dtype, threads: int) -> Peaks:
    """The best rates of PyTorch's own matrix product and copy in several turns.

    On a CPU products are in float32, as in the kernels, and the rates of exponential and logarithm follow from the
    products' rate. On a GPU these functions have units of their own and are measured too.
    """
    gpu = device == "cuda"
    large = gpu and torch.cuda.get_device_properties(0).total_memory >= _ROOMY
    size = 8192 if large else 1024
    matrix = torch.ones(size, size, device=device, dtype=dtype if gpu else torch.float32)
    product = torch.empty_like(matrix)
    source = torch.ones(2**29 if large else 2**26, device=device)
    copied = torch.empty_like(source)
    seconds = {
        name: min(in_turns({name: call}, 5, device)[name])
        for name, call in {
            "mm": lambda: torch.mm(matrix, matrix, out=product),
            "copy": lambda: copied.copy_(source),
        }.items()
    }
    flops, moved = 2.0 * size**3 / seconds["mm"], 2.0 * source.nbytes / seconds["copy"]
    if gpu:
        return Peaks(flops, _function_rate("exp2f"), _function_rate("__log2f"), moved)
    return Peaks(flops, flops / (2 * EXPONENTIAL), flops / (2 * LOGARITHM), moved)


def _function_rate(function: str, times: int = 512) -> float | None:
    """The number of times that a GPU applies a function per second; None if PyTorch cannot compile the loop.

    The function is applied to each number many times, so that the time for memory does not matter.
    """
    body = f"template <typename T> T loop(T x) {{ for (int i = 0; i < {times}; i++) x = {function}(x); return x; }}"
    numbers = torch.ones(2**22, device="cuda")
    try:
        apply = torch.cuda.jiterator._create_jit_fn(body)
        seconds = min(in_turns({function: lambda: apply(numbers)}, 5, "cuda")[function])
    except (RuntimeError, AttributeError):
        return None
    return times * numbers.numel() / seconds
