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

_STAGES = {
    "text": "reading text",
    "by_position": "by position",
}


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


def comparison_table(results: pd.DataFrame) -> Table:
    """A table of the demo: perplexity by model and context length, with parameters and training speed."""
    table = Table(title=f"test perplexity by context length (trained on {results.columns[1]} tokens)")
    for column in results:
        table.add_column(str(column), justify="left" if column == "model" else "right")
    digits = {"parameters": 0, "tokens/s": 0}
    for row in results.to_dict("records"):
        numbers = (
            "?" if pd.isna(value) else f"{value:,.{digits.get(str(name), 2)}f}"  # no speed of a resumed run
            for name, value in row.items()
            if name != "model"
        )
        table.add_row(row["model"], *numbers)
    return table


def states_table(title: str, states: Sequence[Any]) -> Table:
    """A table of the runs of a recipe (`rfa_lab.recipes.RunState`): progress, tokens, and the time left if known."""
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
    done = sum(state.state == "done" for state in states)
    table.caption = Text(
        f"{done} of {len(states)} runs done; {size}"
        + (f"; left to train: {_duration(sum(known))}{unknown}, evaluation apart" if any(known) else "")
    )
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
    words = _STAGES.get(stage.name, stage.name) + metrics_words(stage.metrics or {})
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
