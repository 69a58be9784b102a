"""All measurements of the Triton backend on one GPU, in one command of at most nine and a half minutes.

    python benchmarks/gpu.py [--out FOLDER] [--limit SECONDS]
    python benchmarks/gpu.py --tiny          on a CPU: the same stages with small numbers, under Triton's interpreter

Every stage is a process of its own with a limit, and appends its results to FOLDER/results.jsonl as they come. Values
and gradients, times beside SDPA, certified windows and training steps come in the first three minutes. A stage for
which no time is left is named and skipped. `python benchmarks/gpu.py --stage NAME [ARGUMENT] [warm]` runs one alone;
with `warm` it calls everything once, which fills the caches of compiled kernels, and measures nothing.

On a machine that is lent by the tool `run`, which has no package registry: prepare here, in the root of the checkout,

    echo /.gpu_run/ >> .git/info/exclude; rm -rf .gpu_run
    python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
        -d .gpu_run platformdirs jaxtyping wadler-lindig hypothesis beartype

and call `run` with carry [".gpu_run"], timeout_s 595 and the command

    set -o pipefail; for each in .gpu_run/*.whl; do python3 -m zipfile -e $each /tmp/site; done
    PYTHONPATH=/tmp/site:src python3 benchmarks/gpu.py --out $OUT --limit 570 2>&1 | tee $OUT/log.txt

For the first three minutes alone: timeout_s 215, --limit 190. What comes next on a GPU is training:
benchmarks/gpu_training.sh.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rfa.environment import environment
from rfa.models import RFAForCausalLM, preset
from rfa.ops.backends import BACKENDS
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.positions import checked_positions
from rfa.ops.problem import Options, Parameters, Problem

ROOT = Path(__file__).parents[1]
CHECKS: dict[str, dict[str, Any]] = {  # kinds of calls that are compared with float64
    "bf16": {},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "riccati": {"prior": "riccati"},
    "padding": {"present": True},
    "segments": {"segments": True},
    "fast head": {"decays": (0.5, 0.01, 3.0)},
    "irregular times": {"times": True},
    "riccati, irregular times": {"times": True, "prior": "riccati"},
    "exponential": {"weight": "exponential", "times": True, "dtype": "float32"},
    "both directions": {"causal": False, "times": True},
    "learned decay": {"learned": ("decay", "frequency")},
    "dot product": {"dot_product": True, "learned": ("decay", "slopes")},
}
PRESETS = ("b1-rope", "m2-sc-rfa", "x2-riccati-alibi")  # of training steps
PLAN: list[tuple[float, list[list[str]]]] = [  # a limit in seconds, and stages that run side by side
    # a kernel is compiled in 15 seconds: all kinds of calls side by side, before anything is timed
    (100, [["times", "warm"], ["windows", "warm"], ["step", "eager", "warm"],
           *(["check", name] for name in CHECKS)]),
    (35, [["times"]]),
    (25, [["windows"]]),
    (30, [["step", "eager"]]),
    (110, [["step", "compiled", "warm", name] for name in PRESETS]),
    (40, [["step", "graph"]]),
    (90, [["step", "compiled"]]),
    (600, [["tests"]]),
]  # fmt: skip
TINY, WARM = os.environ.get("GPU_TINY") == "1", "warm" in sys.argv
DEVICE = "cpu" if TINY else "cuda"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(16, 8, 2048, 64), (64, 8, 512, 64), (4, 8, 8192, 64)] if not TINY else [(1, 2, 130, 16)]
LONG = (1, 8, 32768, 64) if not TINY else (1, 2, 320, 16)
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


def wait() -> None:
    """For the device."""
    if not TINY:
        torch.cuda.synchronize()


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
    states = [(base + 0.5 * normal(*shape)).to(DEVICE, dtype) for _ in range(3)]
    of_heads = {"decay": torch.tensor(given["decays"]), "frequency": uniform(0, 0.5, heads, channels // 2)}
    if "dot_product" in given:
        of_heads |= {"slopes": uniform(0.01, 0.1, heads)}
    else:
        ranges = ((0.001, 0.02), (0.3, 1.3), (0.3, 1.3), (0.01, 0.1), (2.0, 4.0), (0.7, 1.3))
        of_heads |= {name: uniform(*ends, heads) for name, ends in zip(LEARNED, ranges, strict=True)}
    learned = [*given["learned"], *(n for n in LEARNED if n in of_heads)]
    of_heads = {n: x.to(DEVICE) for n, x in of_heads.items()}
    times = uniform(0.1, 2.0, length).double().cumsum(0).to(DEVICE) if "times" in given else None
    lengths = torch.tensor([length, length // 2])[-batch:, None]
    mask = (torch.arange(length) < lengths).to(DEVICE) if "present" in given else None
    ids = (torch.arange(length) >= lengths).long().to(DEVICE) if "segments" in given else None
    positions = checked_positions(batch, length, length, states[0].device, times, None, mask, ids)
    options = Options(**{n: given[n] for n in ("prior", "weight", "causal") if n in given})
    noise = normal(*shape).to(DEVICE)

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
    return [torch.randn(*shape, device=DEVICE, dtype=BF16, requires_grad=number < 3) for number in range(4)]


def both(name: str, forward: Call, wanted: list[Tensor], cotangent: Tensor) -> dict[str, Call]:
    """The forward pass, and it with its backward pass."""
    return {f"{name} fwd": forward, f"{name} fwd+bwd": lambda: torch.autograd.grad(forward(), wanted, cotangent)}


def of_layer(
    name: str, shape: tuple[int, ...], label: str, irregular: bool = False, windows: bool = False
) -> dict[str, Call]:
    """The operator of a preset's layer at its first dynamics, of random states at positions known before."""
    batch, heads, length, channels = shape
    torch.manual_seed(0)
    layer: Any = preset(name, hidden_size=heads * channels // 2, num_attention_heads=heads).build_attention()
    layer = layer.to(DEVICE)
    *states, cotangent = random_states(shape)
    times = torch.linspace(0, 0.9 * length, length, dtype=FP64).square().div(length).to(DEVICE) if irregular else None
    positions = checked_positions(batch, length, length, cotangent.device, times)
    options = layer.options._replace(certified="auto" if windows else None)

    def forward() -> Tensor:
        return BACKENDS["triton"].run(*states, Problem(Parameters(**layer.dynamics()), positions, options))[0]

    dynamics = [x for x in layer.dynamics.parameters() if x.requires_grad]
    unused = torch.autograd.grad(forward().sum(), dynamics, allow_unused=True)
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
    wait()
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(0 if WARM else repeats):
        for name, call in calls.items():
            if not TINY:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(8_000_000)  # so that the host gets ahead of the device
                begin.record()
            began = time.perf_counter()
            call()
            host = device = (time.perf_counter() - began) * 1e3
            if not TINY:
                end.record()
                end.synchronize()
                device = begin.elapsed_time(end)
            spent[name].append((device, host))
    return {name: [round(statistics.median(x), 4) for x in zip(*each, strict=True)] for name, each in spent.items()}


def times() -> None:
    """The operator beside its peers; the first shape also with the Riccati prior and at irregular times."""
    note("versions", **environment(), cudnn=torch.backends.cudnn.version())
    for number, shape in enumerate(SHAPES):
        calls = of_layer("m2-sc-rfa", shape, "m2")
        if not number:
            calls |= of_layer("x2-riccati-alibi", shape, "x2")
            calls |= of_layer("m2-sc-rfa", shape, "m2, irregular times", irregular=True)
        note("times", shape=shape, **timed(calls | peers(shape), REPEATS if not number else min(6, REPEATS)))


def windows() -> None:
    """x2 at its first slopes, which are ALiBi's, with and without certified windows."""
    calls = {}
    for label, given in (("x2", False), ("x2 windows", True)):
        calls |= of_layer("x2-riccati-alibi", LONG, label, windows=given)
    found, expected = (calls[f"{label} fwd+bwd"]() for label in ("x2 windows", "x2"))
    errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, expected, strict=True)]
    note("windows", tokens=LONG[2], largest_difference=max(errors), **timed(calls | peers(LONG), min(5, REPEATS)))


# A training step


def training_step(name: str, way: str) -> Call:
    """Forward, backward and AdamW of a preset at the paper's size: "eager", "compiled", or as a CUDA "graph"."""
    torch.manual_seed(0)
    model = RFAForCausalLM(preset(name, backend="triton", **SIZE)).to(DEVICE)
    tokens = torch.randint(SIZE["vocab_size"], STEP).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=way == "graph" and not TINY)
    compiler = "aot_eager" if TINY else "inductor"
    called: Any = torch.compile(model, fullgraph=True, backend=compiler) if way == "compiled" else model

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, BF16, cache_enabled=way != "graph"):
            loss = called(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return captured(step) if way == "graph" and not TINY else step


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

    def replay(step: Call = step) -> Tensor:  # keeps what the graph reads: the model and its tokens
        graph.replay()
        return loss

    return replay


def step(way: str, *names: str) -> None:
    """Losses of the first steps of each preset, then median milliseconds of a step in turns."""
    calls, losses, spent = {}, {}, {}
    for name in names or PRESETS:
        try:
            call = training_step(name, way)
            losses[name] = [round(float(call()), 4) for _ in range(1 if WARM else 4)]
            calls[name], spent[name] = call, []
        except Exception as error:  # of one preset: the others are measured still
            losses[name] = f"{type(error).__name__}: {error}"[:300]
    for _ in range(0 if WARM else REPEATS):
        for name, call in calls.items():
            wait()
            began = time.perf_counter()
            call()
            wait()
            spent[name].append((time.perf_counter() - began) * 1e3)
    milliseconds = {name: round(statistics.median(each), 3) for name, each in spent.items() if each}
    note(f"step {way}", losses=losses, milliseconds=milliseconds)


def main() -> int:
    """Run the plan; returns the number of stages that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of results")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds of all stages")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, at tiny sizes, one stage after another")
    parser.add_argument("--stage", nargs="+", help="this stage alone")
    options = parser.parse_args()
    if options.stage is not None:
        stages = {each.__name__: each for each in (check, times, windows, step)}
        stages[options.stage[0]](*(x for x in options.stage[1:] if x != "warm"))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    results, began = options.out.absolute() / "results.jsonl", time.time()
    os.environ |= {"GPU_RESULTS": str(results), "GPU_BEGAN": str(began), "PYTHONWARNINGS": "ignore"}
    if options.tiny:
        os.environ |= {"GPU_TINY": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    until, failed = began + (1e6 if options.tiny else options.limit), 0
    for limit, stages in PLAN:
        alone = [[stage] for stage in stages if "warm" not in stage]
        for together in alone if options.tiny else [list(stages)]:
            end = until if options.tiny else min(until, time.time() + limit)
            for stage, status in side_by_side(together, options.tiny, end):
                failed += 1
                line = json.dumps({"stage": " ".join(stage), "status": status})
                print(f"[{time.time() - began:5.0f}] {line}", flush=True)
                with results.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    return failed


def side_by_side(stages: list[list[str]], tiny: bool, end: float) -> list[tuple[list[str], int | str]]:
    """Start stages, and wait for them until a time; returns what did not end well."""
    if end - time.time() < 5:
        return [(stage, "no time is left") for stage in stages]
    started = [
        subprocess.Popen([sys.executable, *arguments(stage, tiny)], cwd=ROOT, start_new_session=True)
        for stage in stages
    ]
    found: list[tuple[list[str], int | str]] = []
    for stage, process in zip(stages, started, strict=True):
        try:
            status: int | str = process.wait(max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "stopped at its limit"
        if status != 0:
            found.append((stage, status))
    return found


def arguments(stage: list[str], tiny: bool) -> list[str]:
    """The arguments of Python for a stage."""
    if stage != ["tests"]:
        return [__file__, "--stage", *stage]
    few = ["-k", "repeatable"] if tiny else ["-n", "12"]
    return ["-m", "pytest", "tests/rfa/ops/triton", "-q", "--tb=short", "-p", "no:cacheprovider", *few]


if __name__ == "__main__":
    sys.exit(main())
