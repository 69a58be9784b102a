"""The least time that the work can take on this machine: counts of the work over measured peak rates."""

import functools
import math
from typing import Any, NamedTuple

import torch

from .measurement import Setting, StateShape, in_turns

# Vector instructions of a float32 exponential and logarithm: `exp2` and `log2_1p` of ops/cpu/kernels/functions.h, which
# g++ compiles to these for AVX2; others need no fewer. In the time of one a CPU could do a fused multiply-add, two
# flops, for as many numbers.
EXPONENTIAL, LOGARITHM = 12, 19
FORWARD_PRODUCTS = 2  # q.k and A v
BACKWARD_PRODUCTS = 5  # q.k again, dout.v, and those for the gradients of v, k and q


class Work(NamedTuple):
    """Operations that every implementation in linear memory needs, counted over the pairs that see each other."""

    flops: float
    exponentials: float
    logarithms: float
    bytes: float


class Peaks(NamedTuple):
    """The highest rates of this machine a second, measured in this process; None where nothing was measured."""

    flops: float
    exponentials: float | None
    logarithms: float | None
    bytes: float


def attention_work(shape: StateShape, backward: bool, logarithm: bool, itemsize: int) -> Work:
    """Causal self-attention: `2 channels` flops a product and pair, one exponential and logarithm a weight.

    Scores are computed anew in the backward pass. States, their gradients and the output are moved once in each pass.
    """
    batch, heads, length, channels = shape
    pairs = batch * heads * length * (length + 1) / 2
    products = FORWARD_PRODUCTS + (BACKWARD_PRODUCTS if backward else 0)
    passes, tensors = (2, 12) if backward else (1, 4)
    weights = pairs * passes
    moved = tensors * math.prod(shape) * itemsize
    return Work(2 * channels * products * pairs, weights, weights if logarithm else 0.0, moved)


def decoding_work(shape: StateShape, logarithm: bool, itemsize: int) -> Work:
    """One query a head against `length` cached keys and values, which are read once."""
    batch, heads, length, channels = shape
    pairs = batch * heads * length
    return Work(4 * channels * pairs, pairs, pairs if logarithm else 0.0, 2 * channels * pairs * itemsize)


def bound(work: Work, peaks: Peaks, device: str) -> float:
    """Seconds that the work takes at least.

    A CPU computes products, exponentials and logarithms on the same units, one after the other; a GPU on different
    ones, side by side. Memory is read beside both.
    """
    parts = [amount / rate for amount, rate in zip(work, peaks, strict=True) if rate]
    *computing, moving = parts
    return max(moving, max(computing) if device == "cuda" else sum(computing))


def fields(works: dict[str, Work], setting: Setting) -> dict[str, Any]:
    """The bound of each contestant, and the peaks that it rests on, for a line of results."""
    peaks = measured_peaks(setting.device, setting.torch_dtype, torch.get_num_threads())
    bounds = {name: {**work._asdict(), "seconds": bound(work, peaks, setting.device)} for name, work in works.items()}
    return {"bound": bounds, "peaks": peaks._asdict()}


@functools.cache
def measured_peaks(device: str, dtype: torch.dtype, threads: int) -> Peaks:
    """The best of several turns of PyTorch's own matrix product and copy.

    On a CPU products are float32, as the kernels compute them, and its rate for functions follows from theirs. On a GPU
    functions have units of their own.
    """
    gpu = device == "cuda"
    size = 8192 if gpu else 1024
    matrix = torch.ones(size, size, device=device, dtype=dtype if gpu else torch.float32)
    product = torch.empty_like(matrix)
    source = torch.ones(2**29 if gpu else 2**26, device=device)
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
        return Peaks(flops, _repeated("exp2f"), _repeated("__log2f"), moved)
    return Peaks(flops, flops / (2 * EXPONENTIAL), flops / (2 * LOGARITHM), moved)


def _repeated(function: str, times: int = 512) -> float | None:
    """How often a GPU applies a function a second. Each number gets it many times, so that memory does not count.

    None where PyTorch cannot compile the loop.
    """
    body = f"template <typename T> T loop(T x) {{ for (int i = 0; i < {times}; i++) x = {function}(x); return x; }}"
    numbers = torch.ones(2**22, device="cuda")
    try:
        apply = torch.cuda.jiterator._create_jit_fn(body)
        seconds = min(in_turns({function: lambda: apply(numbers)}, 5, "cuda")[function])
    except (RuntimeError, AttributeError):
        return None
    return times * numbers.numel() / seconds
