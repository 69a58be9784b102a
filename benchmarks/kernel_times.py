"""The time of each kernel of a call and its backward pass on the GPU, how many are launched, and the time of the host.

    python benchmarks/kernel_times.py --shape 16 8 2048 64 --dtype bfloat16 --json kernel-times.json
    python benchmarks/kernel_times.py --irregular
    python benchmarks/kernel_times.py --tiles                 the attention kernels with other tiles

The call is that of a layer, whose positions are known before: nothing waits for the GPU. Times on the GPU are those of
`torch.profiler`. The host's time is that until all is on its way. Each is a mean over the repeats.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from captured import layer_call, positions_of
from rfa.ops.old_triton import backward, incoming, operator, query_gradients
from rfa.ops.old_triton.arguments import Blocks
from torch.profiler import ProfilerActivity, profile, supported_activities

from rfa.environment import environment
from rfa.files import write_text_whole
from rfa_lab.bench.measurement import DTYPES, Setting, StateShape
from rfa_lab.bench.operator import OperatorProblem
from rfa_lab.bench.suite import processor

WARM_UPS, MOST_TOLD = 3, 12
ATTENTION = ("forward_kernel", "sharpen_kernel", "query_gradient_kernel", "key_gradient_kernel")
TILES = [(width, stages, None) for stages in (1, 2, 3) for width in (32, 64)] + [(32, 1, 168), (32, 1, 128)]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    options = parser().parse_args(arguments)
    setting = Setting(options.device, options.dtype, "triton", options.repeats)
    problem = OperatorProblem(StateShape(*options.shape), options.preset, setting)
    call = layer_call(problem, positions_of(problem, options.irregular), problem.layer.estimate)
    told: dict[str, Any] = {"benchmark": "kernel times", "preset": options.preset, "irregular": options.irregular}
    told |= {**problem.shape._asdict(), **setting.fields()}
    told |= tiles(call, options.repeats) if options.tiles else measured(call, options.repeats)
    told |= {"processor": processor(options.device), "environment": environment()}
    if options.json is not None:
        write_text_whole(options.json, json.dumps(told, indent=1) + "\n")
    print("\n".join(lines_of(told)))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", type=int, nargs=4, default=[16, 8, 2048, 64], metavar=("B", "H", "T", "C"))
    made.add_argument("--preset", default="m2-sc-rfa")
    made.add_argument("--irregular", action="store_true", help="times that are not 0, 1, 2, ...")
    made.add_argument("--tiles", action="store_true", help="the attention kernels with other tiles")
    made.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    made.add_argument("--device", choices=["cuda"], default="cuda")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--json", type=Path)
    return made


def measured(call: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Microseconds and launches of each kernel for a call, the longest first, and milliseconds of the host."""
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    on_gpu = ProfilerActivity.CUDA in supported_activities()  # a stand-in has none
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total = kernels.setdefault(event.name, [0.0, 0])
            total[:] = total[0] + event.device_time, total[1] + 1
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {
        "host_ms": 1e3 * host / repeats,
        "gpu_us": sum(us for us, _ in kernels.values()) / repeats,
        "launches": sum(count for _, count in kernels.values()) / repeats,
        "kernels": {name: {"us": us / repeats, "launches": count / repeats} for name, (us, count) in longest},
    }


def tiles(call: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Microseconds of the attention kernels with each tile. One that does not fit is named with its reason."""
    found = []
    for width, stages, registers in TILES:
        row: dict[str, Any] = {"width": width, "stages": stages, "registers": registers}
        try:
            with chosen(width, stages, registers):
                kernels = measured(call, repeats)["kernels"]
            row["us"] = {name: kernels[name]["us"] for name in ATTENTION if name in kernels}
        except Exception as reason:  # of the compiler: too much shared memory, say
            row["refused"] = f"{type(reason).__name__}: {reason}"[:200]
        found.append(row)
    return {"tiles": found}


@contextmanager
def chosen(width: int, stages: int, registers: int | None) -> Iterator[None]:
    """Tiles of 64 rows and `width` columns, in the key gradient of `width` rows and 64 columns, with 4 warps."""
    wide, tall = Blocks(64, width, 4, stages, registers), Blocks(width, 64, 4, stages, registers)
    with ExitStack() as stack:
        for module, name, blocks in (
            (operator, "forward_blocks", wide),
            (incoming, "forward_blocks", wide),
            (query_gradients, "query_blocks", wide),
            (backward, "key_blocks", tall),
        ):
            stack.enter_context(mock.patch.object(module, name, lambda _, blocks=blocks: blocks))
        yield


def lines_of(told: dict[str, Any]) -> list[str]:
    """What is printed."""
    if "tiles" in told:
        head = f"{'width':>5} {'stages':>6} {'registers':>9}  " + "  ".join(f"{name[:-7]:>14}" for name in ATTENTION)
        rows = [
            f"{row['width']:5} {row['stages']:6} {row['registers'] or '-':>9}  "
            + (row.get("refused") or "  ".join(f"{row['us'].get(name, 0.0):11.1f} us" for name in ATTENTION))
            for row in told["tiles"]
        ]
        return [head, *rows]
    total = f"{told['gpu_us']:.0f} us on the GPU in {told['launches']:.0f} launches, host {told['host_ms']:.2f} ms"
    kernels = list(told["kernels"].items())[:MOST_TOLD]
    return [total, *(f"{each['us']:9.1f} us {each['launches']:6.1f} x  {name[:90]}" for name, each in kernels)]


if __name__ == "__main__":
    sys.exit(main())
