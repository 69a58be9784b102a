"""The stages of `gpu.py`, each a process of its own: `python benchmarks/gpu_stages.py NAME [ARGUMENT] [warm]`.

With `warm` a stage calls everything once, which fills the caches of compiled kernels, and measures nothing.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu import CHECKS, PRESETS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile, supported_activities

from rfa.environment import environment
from rfa.models import RFAForCausalLM, preset
from rfa.ops.backends import BACKENDS
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.positions import checked_positions
from rfa.ops.problem import Options, Parameters, Problem

TINY, WARM = os.environ.get("GPU_TINY") == "1", "warm" in sys.argv
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(16, 8, 2048, 64), (64, 8, 512, 64), (4, 8, 8192, 64)] if not TINY else [(1, 2, 130, 16)]
LONG, SMALL = ((1, 8, 32768, 64), (1, 8, 192, 64)) if not TINY else ((1, 2, 320, 16), (1, 2, 130, 16))
HUGE = (33, 8, 131072, 64) if not TINY else (3, 2, 70, 16)
STEP, SIZE = (16, 512), {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 8192}
if TINY:
    STEP, SIZE = (2, 66), {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
REPEATS = 12 if not TINY else 1
Call = Callable[[], Any]


def note(stage: str, **found: Any) -> None:
    """Append a line to the results, unless nothing is measured."""
    if WARM:
        return
    line = json.dumps({"stage": stage, **found})
    with open(os.environ.get("GPU_RESULTS", os.devnull), "a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(f"[{time.time() - float(os.environ.get('GPU_BEGAN', time.time())):5.0f}] {line}", flush=True)


def versions() -> None:
    """Of the software and of the device."""
    note("versions", **{**environment(), "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda})


# Values and gradients against float64

TOLERANCES = {BF16: (0.04, 0.4), FP16: (2e-3, 0.05), FP32: (2e-5, 1e-3)}  # of states; of parameters, whose sums cancel
LEARNED = ("process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")


def check(name: str) -> None:
    """Relative errors of one of `CHECKS` against float64, and whether two calls are equal bit for bit."""
    given: dict[str, Any] = {"dtype": "bfloat16", "decays": (0.0, 0.004, 0.05), "learned": ()} | CHECKS[name]
    dtype, batch, heads, length, channels = getattr(torch, given["dtype"]), 2, 3, 300, 64
    if TINY:
        batch, length, channels = 1, 70, 16
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shape = batch, heads, length, channels
    base = normal(1, heads, 1, channels)  # half of a state is common: robust weights are then neither 0 nor 1
    states = [(base + 0.5 * normal(*shape)).to("cuda", dtype) for _ in range(3)]
    of_heads = {"decay": torch.tensor(given["decays"]), "frequency": uniform(0, 0.5, heads, channels // 2)}
    if "dot_product" in given:
        of_heads |= {"slopes": uniform(0.01, 0.1, heads)}
    else:
        ranges = ((0.001, 0.02), (0.3, 1.3), (0.3, 1.3), (0.01, 0.1), (2.0, 4.0), (0.7, 1.3))
        of_heads |= {name: uniform(*ends, heads) for name, ends in zip(LEARNED, ranges, strict=True)}
    learned = [*given["learned"], *(n for n in LEARNED if n in of_heads)]
    of_heads = {n: x.to("cuda") for n, x in of_heads.items()}
    times = uniform(0.1, 2.0, length).double().cumsum(0).to("cuda") if "times" in given else None
    lengths = torch.tensor([length, length // 2])[-batch:, None]
    mask = (torch.arange(length) < lengths).to("cuda") if "present" in given else None
    ids = (torch.arange(length) >= lengths).long().to("cuda") if "segments" in given else None
    positions = checked_positions(batch, length, length, states[0].device, times, None, mask, ids)
    options = Options(**{n: given[n] for n in ("prior", "weight", "causal") if n in given})
    noise = normal(*shape).to("cuda")

    def results(backend: str, exact: bool) -> dict[str, Tensor]:
        leaves = [x.detach().to(FP64 if exact else dtype).requires_grad_() for x in states]
        held = {n: x.detach().to(FP64 if exact else FP32).requires_grad_(n in learned) for n, x in of_heads.items()}
        if "dot_product" in given:
            out = decayed_dot_product_attention(*leaves, positions=positions, backend=backend, **held)
        else:
            out, _ = BACKENDS[backend].run(*leaves, Problem(Parameters(**held), positions, options))
        with torch.no_grad():  # half of the cotangent is the estimate: with noise alone, gradients of parameters cancel
            signal = (noise + out.float() / out.float().square().mean().sqrt()).to(dtype).to(out.dtype)
        wanted = dict(zip(("query", "key", "value"), leaves, strict=True)) | {n: held[n] for n in learned}
        gradients = torch.autograd.grad(out, list(wanted.values()), signal)
        return {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}

    found, again, expected = results("triton", False), results("triton", False), results("reference", True)
    errors = {n: float((found[n].double() - x).norm() / x.norm().clamp(min=1e-30)) for n, x in expected.items()}
    of_states, of_parameters = TOLERANCES[dtype]
    holds = all(error <= (of_parameters if n in of_heads else of_states) for n, error in errors.items())
    repeats = all(torch.equal(x, again[n]) for n, x in found.items())
    note("check", case=name, holds=holds, repeats=repeats, **{n: float(f"{error:.2e}") for n, error in errors.items()})


# Calls of a layer and of its peers


def random_states(shape: tuple[int, ...]) -> list[Tensor]:
    """Query, key, value with gradients, and a cotangent."""
    torch.manual_seed(0)
    return [torch.randn(*shape, device="cuda", dtype=BF16, requires_grad=number < 3) for number in range(4)]


def both(name: str, forward: Call, wanted: list[Tensor], cotangent: Tensor) -> dict[str, Call]:
    """The forward pass, and it with its backward pass."""
    return {f"{name} fwd": forward, f"{name} fwd+bwd": lambda: torch.autograd.grad(forward(), wanted, cotangent)}


def of_layer(
    name: str, shape: tuple[int, ...], label: str, irregular: bool = False, windows: bool = False, learned: bool = True,
    given: list[Tensor] | None = None,
) -> dict[str, Call]:  # fmt: skip
    """The operator of a preset's layer at its first dynamics, of random or given states at positions known before."""
    batch, heads, length, channels = shape
    torch.manual_seed(0)
    layer: Any = preset(name, hidden_size=heads * channels // 2, num_attention_heads=heads).build_attention()
    layer = layer.to("cuda").requires_grad_(learned)
    *states, cotangent = random_states(shape) if given is None else given
    times = torch.linspace(0, 0.9 * length, length, dtype=FP64).square().div(length).to("cuda") if irregular else None
    positions = checked_positions(batch, length, length, cotangent.device, times)
    options = layer.options._replace(certified="auto" if windows else None)

    def forward() -> Tensor:
        return BACKENDS["triton"].run(*states, Problem(Parameters(**layer.dynamics()), positions, options))[0]

    dynamics = [x for x in layer.dynamics.parameters() if x.requires_grad]
    unused = torch.autograd.grad(forward().sum(), dynamics, allow_unused=True) if dynamics else ()
    used = [x for x, gradient in zip(dynamics, unused, strict=True) if gradient is not None]
    return both(label, forward, [*states, *used], cotangent)


def peers(shape: tuple[int, ...]) -> dict[str, Call]:
    """Attention by cuDNN and by FlashAttention 2, as PyTorch calls them."""
    *states, cotangent = random_states(shape)
    calls = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        kernels = [SDPBackend.MATH] if TINY else [backend]

        def forward(kernels: list[SDPBackend] = kernels) -> Tensor:
            with sdpa_kernel(kernels):
                return scaled_dot_product_attention(*states, is_causal=True)

        calls |= both(name, forward, states, cotangent)
    return calls


def timed(calls: dict[str, Call], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Median milliseconds on the device and of the host, in turns; with `warm` each is called once."""
    for call in calls.values():
        for _ in range(1 if WARM or TINY else 3):
            call()
    torch.cuda.synchronize()
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(0 if WARM else repeats):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(8_000_000)  # so that the host gets ahead of the device
            begin.record()
            began = time.perf_counter()
            call()
            host = time.perf_counter() - began
            end.record()
            end.synchronize()
            spent[name].append((begin.elapsed_time(end), host * 1e3))
    return {name: [round(statistics.median(x), 4) for x in zip(*each, strict=True)] for name, each in spent.items()}


def kernels_of(call: Call, repeats: int = 4) -> dict[str, list[float]]:
    """Launches and milliseconds of each kernel for a call, the longest first. A stand-in has none."""
    if WARM or ProfilerActivity.CUDA not in supported_activities():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total = found.setdefault(event.name[:40], [0, 0.0])
            total[:] = total[0] + 1, total[1] + event.device_time / 1e3
    longest = sorted(found.items(), key=lambda item: -item[1][1])
    return {name: [count / repeats, round(ms / repeats, 4)] for name, (count, ms) in longest}


def times() -> None:
    """The operator beside its peers, and its kernels."""
    for number, shape in enumerate(SHAPES):
        calls = of_layer("m2-sc-rfa", shape, "m2")
        if not number:
            fixed = of_layer("m2-sc-rfa", shape, "m2 without parameters", learned=False)
            calls |= of_layer("x2-riccati-alibi", shape, "x2") | fixed
        note("times", shape=shape, **timed(calls | peers(shape), REPEATS if not number else min(6, REPEATS)))
        if not number:
            note("kernels", **kernels_of(calls["m2 fwd+bwd"]))


def windows() -> None:
    """x2 at its first slopes, which are ALiBi's, with and without certified windows."""
    calls = {}
    for label, given in (("x2", False), ("x2 windows", True)):
        calls |= of_layer("x2-riccati-alibi", LONG, label, windows=given)
    found, expected = (calls[f"{label} fwd+bwd"]() for label in ("x2 windows", "x2"))
    errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, expected, strict=True)]
    note("windows", tokens=LONG[2], largest_difference=max(errors), **timed(calls | peers(LONG), min(5, REPEATS)))


def pairs() -> None:
    """The pair-by-pair kernels: irregular times."""
    for name in ("m2-sc-rfa", "x2-riccati-alibi"):
        calls = of_layer(name, SHAPES[0], f"{name}, irregular times", irregular=True)
        note("pairs", shape=SHAPES[0], **timed(calls, min(6, REPEATS)))
        note("pairs kernels", preset=name, **kernels_of(list(calls.values())[1]))


def small() -> None:
    """Small calls of every kind, for compute-sanitizer."""
    for name, given in (("m2-sc-rfa", {}), ("x2-riccati-alibi", {"windows": True}), ("m2-sc-rfa", {"irregular": True})):
        for call in of_layer(name, SMALL, name, **given).values():
            call()
    torch.cuda.synchronize()
    print("all calls returned", flush=True)


def huge() -> None:
    """More than 2^31 numbers in a tensor, and long sequences: the last sample is as it is alone, bit for bit."""
    states = random_states(HUGE)
    alone = [x.detach()[-1:].clone().requires_grad_(x.requires_grad) for x in states]
    found, expected = (
        of_layer("x2-riccati-alibi", each[0].shape, "x2", windows=True, learned=False, given=each)["x2 fwd+bwd"]()
        for each in (states, alone)
    )
    note("huge", shape=HUGE, equal=all(torch.equal(x[-1:], y) for x, y in zip(found, expected, strict=True)))


def fla() -> None:
    """FLA's forgetting attention, where it is installed."""
    try:
        from fla.ops.forgetting_attn import parallel_forgetting_attn
    except ImportError as error:
        note("fla", skipped=str(error))
        return
    batch, heads, length, _ = SHAPES[0]
    *states, cotangent = (x.detach().transpose(1, 2).contiguous() for x in random_states(SHAPES[0]))
    gate = torch.full((batch, length, heads), -0.01, device="cuda", requires_grad=True)
    wanted = [*(x.requires_grad_() for x in states), gate]
    calls = both("fla", lambda: parallel_forgetting_attn(*states, gate), wanted, cotangent)
    note("fla", shape=SHAPES[0], **timed(calls | peers(SHAPES[0]), min(6, REPEATS)))


# A training step


def training_step(name: str, way: str) -> Call:
    """Forward, backward and AdamW of a preset at the paper's size: "eager", "compiled", or as a CUDA "graph"."""
    torch.manual_seed(0)
    model = RFAForCausalLM(preset(name, **SIZE)).to("cuda")
    tokens = torch.randint(SIZE["vocab_size"], STEP).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=way == "graph" and not TINY)
    called: Any = torch.compile(model, fullgraph=True) if way == "compiled" else model

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", BF16, cache_enabled=way != "graph"):
            loss = called(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return captured(step) if way == "graph" else step


def captured(step: Call) -> Call:
    """The step as a CUDA graph, after three that are not captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def step(way: str) -> None:
    """Losses of the first steps of each preset, then median milliseconds of a step in turns."""
    calls, losses, spent = {}, {}, {}
    for name in sys.argv[4:] or PRESETS:
        try:
            call = training_step(name, way)
            losses[name] = [round(float(call()), 4) for _ in range(1 if WARM else 4)]
            calls[name], spent[name] = call, []
        except Exception as error:  # of one preset: the others are measured still
            losses[name] = f"{type(error).__name__}: {error}"[:300]
    for _ in range(0 if WARM else REPEATS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            spent[name].append((time.perf_counter() - began) * 1e3)
    milliseconds = {name: round(statistics.median(each), 3) for name, each in spent.items() if each}
    note(f"step {way}", losses=losses, milliseconds=milliseconds)
    if way == "eager":
        note("step kernels", **{n: round(sum(ms for _, ms in kernels_of(x, 3).values()), 3) for n, x in calls.items()})


if __name__ == "__main__":
    stages = {each.__name__: each for each in (versions, check, times, windows, pairs, small, huge, fla, step)}
    stages[sys.argv[1]](*(x for x in sys.argv[2:3] if x != "warm"))
