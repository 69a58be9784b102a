"""What the lab's commands share: tables and numbers in words, fields of a model, stops that can go on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import typer
from rich.table import Table
from rich.text import Text

from rfa.cli.app import errors
from rfa.progress import Stage


def _table(title: str, rows: Sequence[Mapping[str, str]], left: Sequence[str] = ()) -> Table:
    """A table of texts. Its columns are the keys of the rows, aligned to the right but for those named in `left`."""
    table = Table(title=Text(title))
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row.values()))
    return table


def evaluation_table(result: Mapping[str, Any]) -> Table:
    """A table of the rows of `rfa_lab.evaluation.evaluate`."""
    unfinished = "" if result["finished"] else f", not finished: {result['weights']}"
    rows = [
        {
            "length": str(row["length"]),
            "targets": f"{row['targets']:,}",
            "loss (nats)": f"{row['loss']:.4f}",
            "standard error": "" if row["stderr"] is None else f"{row['stderr']:.4f}",
            "perplexity": f"{row['perplexity']:.2f}",
        }
        for row in result["rows"]
    ]
    protocol = result["rows"][0]["protocol"]
    return _table(f"{result['preset']} ({result['run']}{unfinished}) on {result['data']}, protocol {protocol}", rows)


def comparison_table(results: pd.DataFrame) -> Table:
    """A table of the demo: perplexity by model and context length, with parameters and training speed."""
    digits = {"parameters": 0, "tokens/s": 0}
    cells = pd.DataFrame({str(name): column for name, column in results.items()})
    for name in cells.columns[1:]:  # no speed of a resumed run
        cells[name] = ["?" if pd.isna(each) else f"{each:,.{digits.get(name, 2)}f}" for each in cells[name]]
    title = f"test perplexity by context length (trained on {results.columns[1]} tokens)"
    return _table(title, cells.to_dict("records"), ("model",))


def states_table(title: str, states: Sequence[Any]) -> Table:
    """A table of the runs of a recipe (`rfa_lab.recipes.RunState`): progress, tokens, and the time left if known."""
    rows = []
    for each in states:
        at = f" at step {each.step:,} of {each.steps or '?'}" if each.state == "half done" else ""
        tokens = "?" if each.tokens is None else f"{each.tokens:,}"
        left = _duration(each.seconds)
        rows.append({"run": each.run.name, "state": each.state + at, "tokens": tokens, "time left": left})
    table = _table(title, rows, ("run", "state"))
    known = [each.seconds for each in states if each.seconds is not None]
    sized = [each.tokens for each in states if each.tokens is not None]
    size = f"{sum(sized):,}{' and more' * (len(sized) < len(states))} tokens" if sized else "tokens not known yet"
    left = f"; left to train: {_duration(sum(known))}{' and more' * (len(known) < len(states))}, evaluation apart"
    done = sum(each.state == "done" for each in states)
    table.caption = Text(f"{done} of {len(states)} runs done; {size}{left if any(known) else ''}")
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def metrics_words(metrics: Mapping[str, float]) -> str:
    """The metrics of a training step in words, to be appended to a stage's name."""
    shown = {"loss": ", loss {:.3f}", "valid_perplexity": ", valid ppl {:.3f}", "validated": ", validating {:.0%}"}
    return "".join(form.format(metrics[name]) for name, form in shown.items() if name in metrics)


def stage_words(stage: Stage) -> str:
    """A stage of a long call in words, with its run and the latest metrics if it has them."""
    words = ("reading text" if stage.name == "text" else stage.name) + metrics_words(stage.metrics or {})
    return f"{stage.run}: {words}" if stage.run else words


def assignment(text: str) -> tuple[str, Any]:
    """The field and the value of `field=value`. The value is read as JSON if it is valid JSON, otherwise as text."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ValueError(f"--set: got {text!r}, expected field=value")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return name, None if value == "None" else value
    except (ValueError, RecursionError) as error:  # thousands of digits, or lists nested thousands of times
        raise ValueError(f"{name}: got {value:.40}..., expected a value of the model") from error


def check_resume(ctx: typer.Context, resume: bool) -> None:
    """Raise `ValueError` for options beside `--resume` and `--out`."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params} if resume else {}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if extra := sorted(given - {"out", "resume"}):
        names = ", ".join("--" + name.strip("_").replace("_", "-") for name in extra)
        raise ValueError(f"--resume: got {names} with it, expected only --out: the run folder holds the rest")


@contextmanager
def stoppable(hint: str) -> Iterator[None]:
    """Print one line that says where a run was stopped and how to continue it."""
    from rfa_lab.training import Stopped

    try:
        yield
    except Stopped as stopped:
        errors.print(f"rfa: {stopped}; {hint}")
        raise SystemExit(130) from None
