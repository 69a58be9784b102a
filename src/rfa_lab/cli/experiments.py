"""The commands for recipes, their results and speed: experiment, report and bench."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rfa.cli.app import ManyValues, app, check_out, console, errors, interruptible, one_line, progress_bars, say

from .console import stage_words, states_table, stoppable

_LINE = 1000  # characters of a reason; a record may lack hundreds of runs


@app.command(cls=ManyValues)
def experiment(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, as in recipes/.", metavar="RECIPE")],
    out: Annotated[Path, typer.Option(help="Folder for runs and results.", metavar="DIR")],
    data: Annotated[
        str | None, typer.Option(help="A corpus, file or folder instead of the recipe's.", metavar="D")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and how far each is; train nothing.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Names of the runs to make; * stands for anything.", metavar="RUN ...")
    ] = None,
    other_version: Annotated[
        bool, typer.Option("--other-version", help="Go on in a folder that another version or commit began.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue existing runs. This is the default.")] = False,
) -> None:
    """Make all runs and evaluations of a table. Finished runs are skipped, unfinished runs are continued.

    Several processes may share a recipe and a folder. The exit status is 1 if a run failed; other runs are still made.
    """
    from rfa_lab.recipes import load_recipe, run_recipe, states

    if not dry_run:
        check_out(out)
    with _all_faults():
        planned = load_recipe(recipe, data)
    if dry_run:
        console.print(states_table(planned.title, states(planned, out, only or ())))
        return
    again = ["rfa", "experiment", str(recipe), "--out", str(out), *(["--data", data] if data is not None else [])]
    again += [*(["--only", *only] if only else []), *["--other-version"] * other_version]
    hint = f"go on with: {shlex.join(again)}"
    with _all_faults(), stoppable(hint), interruptible(hint), progress_bars() as bar:
        outcome = run_recipe(
            planned,
            out,
            only=only or (),
            other_version=other_version,
            progress=lambda stage, *far: bar(stage_words(stage), *far, key=str(stage.name == "runs")),
            failure=lambda name, reason: errors.print(one_line(f"rfa: {name} failed: {reason}")),
        )
    say(f"{len(outcome.done)} runs done: {out / 'results'}")
    for name in outcome.claimed:
        say(f"{name}: another process is making this run")
    if outcome.failed:
        say(f"{len(outcome.failed)} runs failed: {', '.join(outcome.failed)}")
        raise typer.Exit(1)


@app.command(cls=ManyValues)
def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder that `rfa experiment` made, or a record's Parquet file.", metavar="DIR")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; DIR/report by default.", metavar="DIR2")
    ] = None,
) -> None:
    """Tables (Markdown, LaTeX, CSV), figures (PNG, PDF) and one HTML page from result files alone.

    Missing runs and files are listed here and on the page. The exit status is 1 if a file could not be read.
    """
    from rfa_lab.report import write_report

    page = out or (folder / "report" if folder.is_dir() else folder.with_name(f"{folder.stem}-report"))
    check_out(page)
    with progress_bars() as bar:
        written = write_report(folder, page, lambda *made: bar("figures", *made))
    for name, reason in written.missing.items():
        errors.print(one_line(f"rfa: missing: {name}: {reason[:_LINE]}"), highlight=False, soft_wrap=True)
    say(f"tables: {len(written.tables)}, figures: {len(written.figures)}")
    say(f"page: {written.page}")
    if any(name.endswith(".parquet") for name in written.missing):
        raise typer.Exit(1)


@contextmanager
def _all_faults() -> Iterator[None]:
    """Print each fault of a recipe on a line of its own, and exit with status 2."""
    from rfa_lab.recipes import RecipeError

    try:
        yield
    except RecipeError as error:
        for line in str(error).splitlines():
            errors.print(one_line(f"rfa: {line}"))
        raise SystemExit(2) from None


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
