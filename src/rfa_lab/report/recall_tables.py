"""Tables and the figure of a record of recall: accuracy over length, and how soon each model learnt, over seeds."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rfa.files import write_text_whole
from rfa.forecasting.style import save

from .figures import Figure, accuracy_maps
from .layout import Cell, NumberCell, Table, comma_separated, markdown, markdown_text
from .records import RecordReport, interval_cell, is_number, read_record, seeds_cell, stopped_runs, write_page

LEARNT = 0.99  # the accuracy at the trained length from which on a task counts as learnt
EARLY = 300  # steps
_LARGEST = 1e300
_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+ -]{0,99}")  # it becomes part of file names
Results = Sequence[Mapping[str, Any]]


def read_recall_results(folder: str | Path) -> list[dict[str, Any]]:
    """The results of a record, or of a folder of result files, in the order of their names.

    Raises:
        ValueError: for a file that is damaged, files of several recipes, two of one run, or no file.
    """
    return read_record(folder, "recall", _is_result, ("task", "label"))


def _is_result(result: Mapping[str, Any]) -> bool:
    """Whether the entries that tables read have their types. A loss that is not finite is None."""
    tests, curve = result.get("tests"), result.get("curve")
    if not isinstance(tests, dict) or not isinstance(curve, list) or not isinstance(result.get("title"), str):
        return False
    if not _TASK.fullmatch(result["task"]):
        return False
    whole = is_number(result.get("chance"), 0, 1) and all(str(length).isdecimal() for length in tests)
    points = all(is_number(point.get("step"), 1) and is_number(point.get("tokens"), 1) for point in curve if _is(point))
    scores = (*tests.values(), *curve)
    return (
        whole and points and all(_is(one) and is_number(one.get("accuracy"), 0, 1) and _has_loss(one) for one in scores)
    )


def _is(score: Any) -> bool:
    return isinstance(score, dict)


def _has_loss(score: Mapping[str, Any]) -> bool:
    return score.get("loss") is None or is_number(score["loss"], -_LARGEST, _LARGEST)


def tasks_of(results: Results) -> list[str]:
    """The tasks of a record, in the order of their names."""
    return list(dict.fromkeys(result["task"] for result in results))


def lengths_of(results: Results) -> list[int]:
    """The lengths at which models were tested, ascending."""
    return sorted({int(length) for result in results for length in result["tests"]})


def accuracy_by_seed(runs: Results, length: int) -> dict[int, float]:
    """The accuracy of each seed at a length, of those that were tested there.

    Args:
        runs: of one model in one task.
        length: in tokens.
    """
    return {run["seed"]: run["tests"][str(length)]["accuracy"] for run in runs if str(length) in run["tests"]}


def accuracies_by_task(results: Results, length: int) -> dict[str, dict[str, dict[int, float]]]:
    """`accuracy_by_seed` of each model in each task of the record."""
    tasks = tasks_of(results)
    found: dict[str, dict[str, dict[int, float]]] = {}
    for label, runs in _by_label(results).items():
        found[label] = {task: accuracy_by_seed([run for run in runs if run["task"] == task], length) for task in tasks}
    return found


def accuracy_table(results: Results, task: str, level: float = 0.95) -> Table:
    """The accuracy of all models at each length.

    Args:
        results: of one recipe.
        task: one of `tasks_of(results)`.
        level: of the intervals, by Student's t over seeds.
    """
    own = [result for result in results if result["task"] == task]
    lengths = lengths_of(own)
    rows: list[list[Cell]] = []
    for label, runs in _by_label(own).items():
        cells: list[Cell] = [label, seeds_cell(len(runs), sum(not run["tests"] for run in runs))]
        for length in lengths:
            cells.append(interval_cell([*accuracy_by_seed(runs, length).values()], 3, level))
        rows.append(cells)
    rows.sort(key=lambda row: -row[-1].value if isinstance(row[-1], NumberCell) else 2.0)
    notes = [
        f"Share of right answers, mean over seeds ± half of its {level:.0%} t interval. "
        f"A guess without the context is right in {own[0]['chance']:.3g}.",
        *stopped_runs(own),
    ]
    columns = ("model", "seeds", *(f"{length} tokens" for length in lengths))
    return Table(f"{task}-accuracy", f"{task}: accuracy over length", columns, tuple(map(tuple, rows)), tuple(notes))


def overview_table(results: Results, length: int, level: float = 0.95) -> Table:
    """The accuracy of all models in all tasks at one length.

    Args:
        results: of one recipe.
        length: in tokens.
        level: of the intervals, by Student's t over seeds.
    """
    tasks = tasks_of(results)
    rows = [
        (label, *(interval_cell([*by_seed.values()], 2, level) for by_seed in by_task.values()))
        for label, by_task in accuracies_by_task(results, length).items()
    ]
    note = f"Share of right answers, mean over seeds ± half of its {level:.0%} t interval."
    notes = (note, *stopped_runs(results))
    return Table(f"overview-{length}", f"All tasks at {length} tokens", ("model", *tasks), tuple(rows), notes)


def accuracy_figure(results: Results, complete: bool = False) -> Figure:
    """The figure of all models in all tasks, at the least and at the greatest tested length: means over seeds.

    Models with more tasks come first, and of those with equally many the one with the larger sum of shares at the
    greatest length.

    Args:
        results: of one recipe.
        complete: whether only models that were tested in all tasks are drawn.

    Raises:
        ValueError: if no such model was tested.
    """
    tasks, lengths = tasks_of(results), lengths_of(results)
    means = {
        length: {
            label: [fmean(by_seed.values()) if by_seed else None for by_seed in by_task.values()]
            for label, by_task in accuracies_by_task(results, length).items()
        }
        for length in (*lengths[:1], *lengths[-1:])  # one, if the record has one
    }
    longest = means[lengths[-1]] if lengths else {}

    def rank(label: str) -> tuple[int, float]:
        known = [share for share in longest[label] if share is not None]
        return -len(known), -sum(known)

    drawn = [label for label in sorted(longest, key=rank) if not (complete and None in longest[label])]
    if not drawn:
        raise ValueError("results: got no model that was tested" + " in all tasks" * complete)
    panels = {f"{length} tokens": {label: of[label] for label in drawn} for length, of in means.items()}
    return accuracy_maps(panels, tasks)


def learning_table(results: Results, task: str, level: float = 0.95) -> Table:
    """How soon each model learnt a task: the loss after 300 steps, and the tokens until 99 % of answers were right.

    Both are of the held-out sequences of the trained length. A mean of tokens is over the seeds that got there.

    Args:
        results, task, level: as of `accuracy_table`.
    """
    own = [result for result in results if result["task"] == task]
    rows: list[list[Cell]] = []
    for label, runs in _by_label(own).items():
        losses = [point["loss"] for run in runs for point in run["curve"] if point["step"] == EARLY]
        tokens = [reached for run in runs if (reached := tokens_until(run)) is not None]
        rows.append(
            [
                label,
                str(len(runs)),
                interval_cell([loss for loss in losses if loss is not None], 2, level),
                _grouped(interval_cell(tokens, 0, level)),
                f"{len(runs) - len(tokens)} of {len(runs)}",
            ]
        )
    rows.sort(key=lambda row: row[3].value if isinstance(row[3], NumberCell) else float("inf"))
    notes = [f"Mean over seeds ± half of its {level:.0%} t interval, of tokens over the seeds that got there."]
    columns = ("model", "seeds", f"loss after {EARLY} steps", f"tokens until {LEARNT:.0%}", "not reached in")
    caption = f"{task}: how soon it was learnt"
    return Table(f"{task}-learning", caption, columns, tuple(map(tuple, rows)), (*notes, *stopped_runs(own)))


def tokens_until(result: Mapping[str, Any], accuracy: float = LEARNT) -> int | None:
    """Training tokens until the held-out accuracy was this high for the first time; None if it never was."""
    return next((point["tokens"] for point in result["curve"] if point["accuracy"] >= accuracy), None)


def write_recall_report(folder: str | Path, out: str | Path) -> RecordReport:
    """Write all tables of a record into one Markdown page, beside a figure of all tasks, and each as a CSV file.

    The page ends with the runs of the recipe that have no result.

    Raises:
        ValueError: as `read_recall_results`.
        OSError: if a file cannot be written.
    """
    results, out = read_recall_results(folder), Path(out)
    tables = [overview_table(results, length) for length in lengths_of(results)]
    tables += [make(results, task) for task in tasks_of(results) for make in (accuracy_table, learning_table)]
    for table in tables:
        write_text_whole(out / "tables" / f"{table.name.replace(' ', '-')}.csv", comma_separated(table))
    lines = [f"# {markdown_text(results[0]['title'])}\n"]
    if lengths_of(results):  # some run was tested
        save(accuracy_figure(results), out / "recall.png", dots=150)
        lines.append("![The share of right answers of each model in each task, by length](recall.png)\n")
    lines += map(markdown, tables)
    return write_page(folder, out / "recall.md", lines)


def _by_label(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        found.setdefault(result["label"], []).append(result)
    return found


def _grouped(cell: Cell) -> Cell:
    return NumberCell(cell.value, cell.error, digits=0, grouped=True) if isinstance(cell, NumberCell) else cell
