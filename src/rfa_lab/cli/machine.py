"""The commands for this machine: bench and doctor."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .app import ManyValues, app, check_out, console, say


@app.command(cls=ManyValues)
def bench(
    what: Annotated[str, typer.Argument(help="What is timed.", metavar="[operator|decode]")] = "operator",
    lengths: Annotated[
        list[int] | None, typer.Option(help="Lengths in tokens; 512, 2048 and 8192, or 8192 cached ones.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Number of sequences; by default more of short ones.")] = None,
    heads: Annotated[int, typer.Option(help="Number of attention heads.")] = 8,
    channels: Annotated[int, typer.Option(help="Number of real channels of a head, two a mode.")] = 64,
    presets: Annotated[list[str] | None, typer.Option(help="Presets; rfa by default.", metavar="P ...")] = None,
    dtype: Annotated[str, typer.Option(help="Data type: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    backend: Annotated[str, typer.Option(help="Backend: auto, or the name of one; `rfa doctor` lists them.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Number of rounds; both contestants have a turn in each.")] = 7,
    certified: Annotated[bool, typer.Option("--certified", help="Leave out old keys by the prior's proof.")] = False,
    out: Annotated[Path, typer.Option(help="File of JSON lines to append to.")] = Path("rfa-bench.jsonl"),
) -> None:
    """Time the operator, or decoding, beside PyTorch's scaled dot-product attention, in turns after a check.

    Prints median and quartiles of the ratio to the peer and the times of both, and appends a line of JSON for each.
    With --certified the operator over all keys is a peer too. Threads are those of OMP_NUM_THREADS. The exit status is
    1 if a check failed; such a case is not timed.
    """
    from rfa_lab.bench import cases, run, summary_line

    check_out(out)
    setting: Any = {"device": device, "dtype": dtype, "backend": backend, "repeats": repeats, "certified": certified}
    made = cases(what, presets or ["rfa"], lengths or (), batch, heads, channels, **setting)
    say("time over the peer's: median (quartiles), ms of both")
    passed = True
    for line in run(made, out):
        say(summary_line(line))
        passed &= line["check"]["passed"]
    say(f"appended to {out}")
    if not passed:
        raise typer.Exit(1)


@app.command(cls=ManyValues)
def doctor() -> None:
    """Print versions, devices, backends, the backend that `auto` chooses on each device, and why others are missing."""
    import warnings

    import torch

    from rfa.environment import environment
    from rfa.files import cache_folder
    from rfa.models import PRESETS, describe
    from rfa.ops import available_backends, choose_backend
    from rfa.ops.backends import BACKENDS, missing

    table = Table(show_header=False, box=None)
    devices = ["cpu"] + [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    found = {
        **environment(),
        "devices": ", ".join(devices),
        "backends": ", ".join(available_backends()),
        "kernels": _kernels(),
        "certified windows": _certified(),
        "cache": cache_folder(),
    }
    for name, value in found.items():
        table.add_row(name, str(value))
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a missing backend is printed below
            table.add_row("auto chooses", f"{device} -> {choose_backend('auto', device)}")
    console.print(table)
    for name in BACKENDS:
        if (reason := missing(name)) is not None:
            say(f"{name} is missing: {' '.join(reason.split())}")
    presets = Table("preset", "model", title="presets")
    for name in PRESETS:
        presets.add_row(name, describe(name))
    console.print(presets)


def _certified() -> str:
    """What certified="auto" does on this machine, in words."""
    import torch

    from rfa.ops.backends import missing
    from rfa.ops.certified import allowed

    found = [name for name in ("cpu", "triton in half precision") if missing(name.split()[0]) is None]
    if not found:
        return "none: only the backends cpu and triton leave keys out"
    single, half = (round(math.log2(allowed("auto", dtype) or 1)) for dtype in (torch.float32, torch.float16))
    kinds = " and ".join(found)
    return f"{kinds}: eps 2^{single} in float32, 2^{half} in half precision; other backends visit all keys"


def _kernels() -> str:
    """Where the kernels of the CPU come from, in words. They are compiled for the answer where the wheel has none."""
    from rfa.ops.backends import missing

    if missing("cpu") is not None:
        return "none for the CPU"
    from rfa.ops.cpu.build import describe_library
    from rfa.ops.cpu.library import library

    return describe_library(library())
