"""The operator compiled, and captured in a CUDA graph, forward and backward: the same numbers, and their time.

    python benchmarks/captured.py --device cuda --dtype bfloat16 --shape 4 8 2048 64 --json captured.json

A call gives the estimate and all gradients for positions that are known before, as in a layer of a model. Each of these
is tried, and named with its reason where it fails:

    waits      no operation of the call makes the host wait for the GPU
    repeated   two calls are equal bit for bit
    compiled   `torch.compile(fullgraph=True)` gives the same numbers, to the tolerance of `rfa bench`
    captured   a replay of the graph with other states gives what a plain call gives, bit for bit

The exit status is 1 if one fails.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rfa.environment import environment
from rfa.files import write_text_whole
from rfa.ops.positions import Positions, checked_positions
from rfa_lab.bench.measurement import DTYPES, TOLERANCES, Setting, StateShape, in_turns, relative_error
from rfa_lab.bench.operator import OperatorProblem
from rfa_lab.bench.suite import processor

WARM_UPS = 3  # calls before a capture, as PyTorch's manual has them
Call = Callable[[], list[Tensor]]


def main(arguments: list[str] | None = None) -> int:
    """Try each, time those that hold, and write the result."""
    options = parser().parse_args(arguments)
    setting = Setting(options.device, options.dtype, options.backend, options.repeats)
    problem = OperatorProblem(StateShape(*options.shape), options.preset, setting)
    found = examined(problem, options.irregular)
    told = {
        "benchmark": "captured",
        "preset": options.preset,
        "irregular": options.irregular,
        **problem.shape._asdict(),
        **setting.fields(),
        **found,
        "processor": processor(options.device),
        "environment": environment(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    text = json.dumps(told, indent=1) + "\n"
    if options.json is not None:
        write_text_whole(options.json, text)
    print(text, end="")
    return 0 if all(each["holds"] for each in found["tried"].values()) else 1


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", type=int, nargs=4, default=[4, 8, 2048, 64], metavar=("B", "H", "T", "C"))
    made.add_argument("--preset", default="m2-sc-rfa")
    made.add_argument("--irregular", action="store_true", help="times that are not 0, 1, 2, ...")
    made.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    made.add_argument("--backend", default="triton")
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--json", type=Path)
    return made


def examined(problem: OperatorProblem, irregular: bool = False) -> dict[str, Any]:
    """What holds, and the seconds of a plain, a compiled and a replayed call."""
    setting, positions = problem.setting, positions_of(problem, irregular)
    plain = layer_call(problem, positions, problem.layer.estimate)
    calls: dict[str, Callable[[], object]] = {"plain": plain}
    tried: dict[str, dict[str, Any]] = {}

    def attempt(name: str, hold: Callable[[], float], most: float) -> bool:
        try:
            error = hold()
        except Exception as reason:  # a compiler's, or CUDA's: the others are tried still
            said = next(filter(None, map(str.strip, str(reason).splitlines())), "no message")
            tried[name] = {"holds": False, "reason": f"{type(reason).__name__}: {said}"[:300]}
            return False
        tried[name] = {"holds": error <= most, "error": error, "tolerance": most}
        return error <= most

    def compiled() -> float:
        estimate = torch.compile(problem.layer.estimate, fullgraph=True, dynamic=False)
        calls["compiled"] = layer_call(problem, positions, estimate)
        return largest_error(calls["compiled"](), plain())

    def captured() -> float:
        replay = calls["captured"] = captured_call(plain, setting.device)
        with torch.no_grad():
            for state in problem.states:
                state.copy_(state.roll(1, dims=2) * 0.5)
        return largest_error([x.clone() for x in replay()], plain())

    plain()
    attempt("waits", lambda: without_waiting(plain, setting.device), 0.0)
    attempt("repeated", lambda: largest_error(plain(), plain()), 0.0)
    for name, hold, most in (
        ("compiled", compiled, TOLERANCES[setting.torch_dtype].states),
        ("captured", captured, 0.0),
    ):
        if setting.device == "cpu" and name == "captured":
            tried[name] = {"holds": False, "reason": "there is no GPU"}
        elif not attempt(name, hold, most):
            calls.pop(name, None)
    return {"tried": tried, "seconds": in_turns(calls, setting.repeats, setting.device)}


def positions_of(problem: OperatorProblem, irregular: bool) -> Positions:
    """Positions 0, 1, 2, ..., or times with gaps of 0.1 to 1.1."""
    length, device = problem.shape.length, problem.grad.device
    steps = 0.1 + torch.rand(length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return checked_positions(
        problem.shape.batch, length, length, device, steps.cumsum(0).to(device) if irregular else None
    )


def layer_call(problem: OperatorProblem, positions: Positions, estimate: Callable[..., Tensor]) -> Call:
    """A call of the layer's operator and its backward pass: the estimate and all gradients."""
    problem.layer.backend = problem.setting.backend
    wanted = list(problem.wanted.values())

    def call() -> list[Tensor]:
        out = estimate(*problem.states, positions=positions)
        return [out.detach(), *torch.autograd.grad(out, wanted, problem.grad)]

    return call


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of a result; 0 for equal bits."""
    pairs = [(x, y) for x, y in zip(found, expected, strict=True) if not torch.equal(x, y)]
    return max((relative_error(x, y) for x, y in pairs), default=0.0)


def without_waiting(call: Call, device: str) -> float:
    """0, or an error of the first operation that waits for the GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return 0.0


def captured_call(call: Call, device: str) -> Call:
    """The call as a CUDA graph that is replayed. Its results are always in the same tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Synchronization debug mode")
    sys.exit(main())
