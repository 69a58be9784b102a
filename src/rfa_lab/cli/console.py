"""Results and progress on a terminal: tables, progress bars, and numbers in words."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from rich import progress as rich_progress
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rfa.progress import Stage

_STAGES = {
    "text": "reading text",
    "trial_steps": "trying each model",
    "evaluation": "evaluating",
    "by_position": "by position",
}
LINE_SECONDS = 10.0  # at least, between lines of progress if there is no terminal


def evaluation_table(result: Mapping[str, Any]) -> Table:
    """A table of the rows of `rfa_lab.evaluation.evaluate`."""
    protocol = result["rows"][0]["protocol"]
    unfinished = "" if result["finished"] else f", not finished: {result['weights']}"
    of = f"{result['preset']} ({result['run']}{unfinished})"
    table = Table(title=Text(f"{of} on {result['data']}, protocol {protocol}"))
    for column in ("length", "targets", "loss (nats)", "standard error", "perplexity"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        stderr = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        table.add_row(
            str(row["length"]), f"{row['targets']:,}", f"{row['loss']:.4f}", stderr, f"{row['perplexity']:.2f}"
        )
    return table


def comparison_table(results: Mapping[str, Any]) -> Table:
    """A table of the demo: perplexity by model and context length, with parameters and training speed."""
    models = results["models"]
    lengths = [row["length"] for row in next(iter(models.values()))["rows"]]
    table = Table(title=f"test perplexity by context length (trained on {results['train_length']} tokens)")
    table.add_column("model")
    for column in (*map(str, lengths), "parameters", "tokens/s"):
        table.add_column(column, justify="right")
    for name, model in models.items():
        result = model["record"]["result"]
        figures = [f"{row['perplexity']:.2f}" for row in model["rows"]]
        table.add_row(name, *figures, f"{result['parameters']:,}", tokens_per_second(result))
    return table


def series_comparison_table(results: Mapping[str, Any]) -> Table:
    """A table of the demo of series: mean squared errors of filtering and forecasting, by model and setting."""
    table = Table(title="mean squared error of the true signal: at the readings / of forecasts")
    table.add_column("model")
    for column in results["settings"]:
        table.add_column(column, justify="right")
    for name, by_setting in results["mse"].items():
        cells = [f"{errors['filter']:.3f} / {errors['forecast']:.3f}" for errors in by_setting.values()]
        table.add_row(name, *cells)
    return table


def states_table(title: str, states: Sequence[Any], device: str | None = None) -> Table:
    """A table of the runs of a recipe (`rfa_lab.recipes.RunState`): progress, tokens, and the time left if known.

    The device is the one on which the time was measured.
    """
    table = Table(title=Text(title))
    for column in ("run", "state", "tokens", "time left"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right", overflow="fold")
    for state in states:
        at = f" at step {state.step:,} of {state.steps or '?'}" if state.state == "half done" else ""
        tokens = "?" if state.tokens is None else f"{state.tokens:,}"
        table.add_row(Text(state.run.name), state.state + at, tokens, _duration(state.seconds))
    known = [state.seconds for state in states if state.seconds is not None]
    sized = [state.tokens for state in states if state.tokens is not None]
    more = " and more" if len(sized) < len(states) else ""
    size = f"{sum(sized):,}{more} tokens" if sized else "tokens not known yet"
    unknown = " and more" if len(known) < len(states) and any(known) else ""
    on = f" on {device}" if device else ""
    done = sum(state.state == "done" for state in states)
    table.caption = Text(
        f"{done} of {len(states)} runs done; {size}"
        + (f"; left to train{on}: {_duration(sum(known))}{unknown}, evaluation apart" if any(known) else "")
    )
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def tokens_per_second(result: Mapping[str, Any]) -> str:
    """A run's training speed in words; "?" if it was not measured, as for a run resumed after its last step."""
    speed = result["tokens_per_second"]
    return "?" if speed is None else f"{speed:,.0f}"


def metrics_words(metrics: Mapping[str, float]) -> str:
    """The metrics of a training step in words, to be appended to a stage's name."""
    shown = {"loss": ", loss {:.3f}", "valid_perplexity": ", valid ppl {:.3f}", "validated": ", validating {:.0%}"}
    return "".join(form.format(metrics[name]) for name, form in shown.items() if name in metrics)


def stage_words(stage: Stage) -> str:
    """A stage of a long call in words, with its run and the latest metrics if it has them."""
    words = _STAGES.get(stage.name, stage.name) + metrics_words(stage.metrics or {})
    return f"{stage.run}: {words}" if stage.run else words


def speed_tables(lines: Sequence[Mapping[str, Any]]) -> Group:
    """Tables for a terminal of 80 columns, one for each benchmark, data type and peer, without the range.

    A size or model that all rows share is in the title.
    """
    from rfa_lab.bench.results import speed_cells

    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for line in lines:
        what, size, dtype, against, *figures = speed_cells(line)
        named, _, peer = against.partition(" / ")
        groups.setdefault((what, peer, dtype), []).append([named, size, *figures])
    return Group(
        "time or memory over the peer's, medians; times are indicative", *map(_speed_table, groups, groups.values())
    )


def _speed_table(title: tuple[str, ...], rows: Sequence[list[str]]) -> Table:
    """The table of one group. Its first column has the model, the size or both, whichever differ between rows."""
    what, peer, dtype = title
    own = [index for index in (0, 1) if len({row[index] for row in rows}) > 1] or [1]
    shared = [rows[0][index] for index in (0, 1) if index not in own]
    above = [" / ".join(filter(None, (what, peer))), dtype, *shared]
    heads = " ".join(("model", "size")[index] for index in own)
    table = Table(heads, title=Text(", ".join(above)), box=SIMPLE_HEAD, padding=0, collapse_padding=True)
    for column in ("ratio", "quartiles", "rfa", "peer", "of bound: rfa, peer"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio, quartiles, _, *rest = row[2:]
        table.add_row(", ".join(row[index] for index in own), ratio, quartiles, *rest)
    return table


@contextmanager
def progress_bars() -> Iterator[Callable[..., None]]:
    """Progress on standard error. The yielded function takes a description, the amount done and the total.

    If standard error is no terminal, as in a pipe or the log of a batch job, there is a line now and then and no bar.
    """
    console = Console(stderr=True)
    with _bars(console) if console.is_terminal else nullcontext(_lines(console)) as bar:
        yield bar


@contextmanager
def _bars(console: Console) -> Iterator[Callable[..., None]]:
    description = rich_progress.TextColumn("{task.description}", markup=False)
    columns = rich_progress.BarColumn(), rich_progress.MofNCompleteColumn(), rich_progress.TimeRemainingColumn()
    progress = rich_progress.Progress(description, *columns, console=console)
    tasks: dict[str, Any] = {}

    def bar(description: str, done: int, total: int, key: str | None = None) -> None:
        key = key or description
        if not tasks:  # start only now, so that an earlier error is printed without bars
            progress.start()
        if key not in tasks:
            tasks[key] = progress.add_task(description, total=total)
        progress.update(tasks[key], completed=done, total=total, description=description)

    try:
        yield bar
    finally:
        if tasks:
            progress.stop()


def _lines(console: Console) -> Callable[..., None]:
    said = -math.inf

    def line(description: str, done: int, total: int, key: str | None = None) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            console.print(f"{description}: {done}/{total}", highlight=False, markup=False, soft_wrap=True)

    return line
