"""The commands for this machine: bench and doctor."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rfa.checks import check_range

from .app import ARGUMENTS, ManyValues, app, assignment, check_out, console, one_line, say
from .console import progress_bars, speed_tables

RESULTS = Path("benchmarks/results")  # of a clone


@app.command(cls=ManyValues)
def bench(
    ctx: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            help="What is timed; by default the operator and a small training step.",
            metavar="[operator|step|decode|generate|memory|all]",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        list[int] | None, typer.Option(help="Lengths in tokens; those of the targets by default.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Number of sequences; more of short ones by default.")] = None,
    heads: Annotated[int, typer.Option(help="Number of attention heads.")] = 8,
    channels: Annotated[int, typer.Option(help="Number of real channels of a head, two a mode.")] = 64,
    presets: Annotated[list[str] | None, typer.Option(help="Presets; rfa by default.", metavar="P ... | all")] = None,
    dtype: Annotated[str, typer.Option(help="Data type: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    backend: Annotated[str, typer.Option(help="Backend: auto, or the name of one; `rfa doctor` lists them.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Number of threads, in a process of its own; PyTorch's own choice by default.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of rounds; both contestants have a turn in each.")] = 7,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="Peers of the operator (by default sdpa on a CPU, all on a GPU); of a step one preset, b1-rope.",
            metavar="P ... | all",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set fields of whole models (step, generate).", metavar="FIELD=VALUE ..."),
    ] = None,
    certified: Annotated[
        bool,
        typer.Option("--certified", help="Leave out old keys by the prior's proof (operator, decode)."),
    ] = False,
    trained: Annotated[
        Path | None,
        typer.Option(help="Result file of a run, whose preset and learned dynamics of each layer are taken."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to append to; benchmarks/results/bench.jsonl in a clone, else rfa-bench.jsonl."),
    ] = None,
) -> None:
    """Compare time and memory with PyTorch's attention, measured in turns, each after a correctness check.

    Prints median and spread of the ratio to the peer, and appends a line of JSON for each. The peer is scaled
    dot-product attention, b1-rope or another preset for a training step, and transformers' Llama for generate. The
    operator has more peers: kernels by name, FlashAttention, and FlexAttention with the filter's scores. One that
    cannot run is named with its reason. With --certified the operator over all keys is a peer too. The exit status is 1
    if a check failed; such a case is not timed.
    """
    from rfa_lab import bench as benchmarks

    if out is None:
        out = RESULTS / "bench.jsonl" if RESULTS.is_dir() else Path("rfa-bench.jsonl")
    check_out(out)
    if threads is not None:
        check_range("threads", threads, 1, benchmarks.LARGEST)
        if os.environ.get(benchmarks.THREADS) != str(threads):
            raise typer.Exit(_with_threads(threads, ["bench", *ctx.meta[ARGUMENTS]]))
    setting = benchmarks.Setting(device, dtype, backend, repeats)
    cases = benchmarks.cases(
        what,
        setting,
        lengths=lengths or (),
        batch=batch,
        heads=heads,
        channels=channels,
        presets=presets or (),
        model=dict(assignment(text) for text in set_ or []),
        peers=peers or (),
        certified=certified,
        trained=trained,
    )
    lines: list[dict[str, Any]] = []
    try:
        with progress_bars() as bar:
            measured = benchmarks.run(cases, out, setting, lambda stage, *far: bar(stage.name, *far, key="bench"))
            for line in measured:
                lines.append(line)
    finally:  # print finished cases even if the rest is stopped
        if lines:
            console.print(speed_tables(lines))
            for said in dict.fromkeys(text for line in lines for text in (*_refusals(line), *_caches(line))):
                say(said)
            say(f"appended to {out}")
    if not all(line["check"]["passed"] for line in lines):
        raise typer.Exit(1)


def _refusals(line: dict[str, Any]) -> Iterator[str]:
    """The peers of a line that did not run, with their reasons."""
    for name, reason in line.get("refused", {}).items():
        yield one_line(f"{name}, {line['pass']}, {line['dtype']}: not timed: {reason}")


def _caches(line: dict[str, Any]) -> Iterator[str]:
    """How large the caches of a line are."""
    if "cache_bytes" in line and line["peer"] == "sdpa":
        ours, theirs = (f"{line['cache_bytes'][name] / 1e6:,.1f} MB" for name in ("rfa", "peer"))
        layer = f" of layer {line['trained']['layer']}" if "trained" in line else ""
        yield f"cache{layer} after {line['length']:,} tokens: {ours}; of sdpa {theirs}"


def _with_threads(threads: int, arguments: list[str]) -> int:
    """The exit status of a command in a process of its own that starts with so many threads."""
    from rfa_lab.bench import THREADS

    command = [sys.executable, "-m", "rfa_lab.cli", *arguments]
    with subprocess.Popen(command, env={**os.environ, THREADS: str(threads)}) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the terminal tells the process too, which prints what is done
                continue


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
