"""Tables, figures and pages of records of small networks: of series and of recall. Means are over seeds."""

from rfa.checks import needs

needs("matplotlib")

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from rfa.files import OUTPUT, write_text_whole
from rfa.forecasting.style import save
from rfa_lab.results import read_record, unfinished_runs

from .figures.comparison import accuracy_maps, series_ratios
from .layout import Cell, NumberCell, Table, comma_separated, first_number, markdown, markdown_text, with_best
from .statistics import interval_cell, mean_and_interval

Results = Sequence[Mapping[str, Any]]
_INTERVAL = "mean over seeds ± half of its 95% t interval"


class RecordReport(NamedTuple):
    """The path of a written page; and why a run has no result, or the list of runs cannot be read, by name."""

    page: Path
    missing: dict[str, str]


def _write_page(folder: str | Path, page: Path, lines: Sequence[str]) -> RecordReport:
    """Write a page of a record, whole. Runs of the recipe without a result are its last part.

    An empty file `.rfa-output` marks its folder, so that `rfa train` does not take the page for text.
    """
    write_text_whole(page.with_name(OUTPUT), "")
    missing = unfinished_runs(folder)
    last = [f"- {name}: {markdown_text(reason)}" for name, reason in missing.items()]
    write_text_whole(page, "\n".join([*lines, *(["## What is missing\n", *last, ""] if last else [])]))
    return RecordReport(page, missing)


def _by_label(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        found.setdefault(result["label"], []).append(result)
    return found


def _stopped_runs(results: Results) -> list[str]:
    """A note on the runs whose training stopped; none without such a run."""
    stopped = [f"{run['label']}, seed {run['seed']}: {run['fault']}" for run in results if run.get("fault")]
    return [f"Stopped: {'; '.join(stopped)}."] if stopped else []


def _seeds_cell(runs: int, stopped: int) -> str:
    """The number of seeds, without those whose training stopped."""
    return f"{runs - stopped}, {stopped} stopped" if stopped else str(runs)


SCORES = {
    "mse": "mean squared error",
    "nll": "negative log likelihood, nats",
    "crps": "CRPS",
    "coverage": "coverage of 90 % intervals",
}
PARTS = ("filter", "forecast")  # at the readings' times, and after them
_REFERENCES = ("wolf", "c9")  # of the ratios on a page: the robust filter with the true model, and a control
Ratio = tuple[float, float | None]  # mean over seeds, and half of its interval relative to it


def write_series_report(folder: str | Path, out: str | Path) -> RecordReport:
    """Write all tables of a record of series into one Markdown page, beside a figure of the ratios.

    The page ends with the runs of the recipe that have no result. Raises as `read_record`.
    """
    results = read_record(folder, "series")
    asked = [part for part in PARTS if settings_of(results, part)]
    references = [each for each in _REFERENCES if each in _by_label(results)]
    lines = [f"# {markdown_text(results[0]['recipe'])}\n", *(f"{markdown_text(x)}\n" for x in _stopped_runs(results))]
    for part in asked:
        lines += [markdown(series_table(results, part, score)) for score in SCORES]
        lines += [markdown(series_ratio_table(results, each, part)) for each in references]
    page = Path(out) / "series.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    if asked and references:
        save(ratio_figure(results, references[0]), page.with_suffix(".png"))
        lines.append("![Squared errors, divided by the reference's, by setting](series.png)\n")
    return _write_page(folder, page, lines)


def settings_of(results: Results, part: str) -> list[str]:
    """The settings in which a part is scored, in the order of the recipe."""
    scored = (column for result in results for column, parts in result["scores"].items() if part in parts)
    return list(dict.fromkeys(scored))


def series_table(results: Results, part: str, score: str) -> Table:
    """One of `SCORES` of all contestants, at the readings' times ("filter") or after them ("forecast")."""
    columns = settings_of(results, part)
    rows: list[list[Cell]] = []
    for label, own in _by_label(results).items():
        cells = [interval_cell([*_by_seed(own, column, part, score).values()], 3) for column in columns]
        rows.append([label, _seeds_cell(len(own), sum(not result["scores"] for result in own)), *cells])
    rows.sort(key=lambda row: first_number(row, 2))
    if score != "coverage":
        rows = with_best(rows)
    caption = f"{part}: {SCORES[score]}"
    note = f"{_INTERVAL.capitalize()}; bold: the lowest of its column."
    return Table(f"{part}-{score}", caption, ("model", "seeds", *columns), tuple(map(tuple, rows)), (note,))


def is_learned(results: Results, label: str) -> bool:
    """Whether a contestant has parameters to learn. A filter has none, and is the same for all seeds."""
    return any(result.get("parameters") for result in results if result["label"] == label)


def series_ratio(results: Results, label: str, reference: str, column: str, part: str) -> Ratio | None:
    """A contestant's squared error over a reference's in one setting: the geometric mean of ratios of equal seeds.

    A filter is the same for all seeds. The half width h is that of the t interval of the mean log ratio: the ratio lies
    between `mean / (1 + h)` and `mean (1 + h)`. It is None for one seed.
    None without a result of both, or with errors that are not above 0.
    """
    own, other = (
        _by_seed([result for result in results if result["label"] == each], column, part, "mse")
        for each in (label, reference)
    )
    if len(other) == 1 and not is_learned(results, reference):
        other = dict.fromkeys(own, next(iter(other.values())))
    pairs = [(own[seed], other[seed]) for seed in own if seed in other]
    if not pairs or min(min(pair) for pair in pairs) <= 0:
        return None
    logs = [math.log(mine / theirs) for mine, theirs in pairs]
    mean = mean_and_interval(logs)
    return math.exp(mean.value), None if mean.half is None else math.expm1(mean.half)


def series_ratio_table(results: Results, reference: str, part: str) -> Table:
    """`series_ratio` of all contestants to one of them, with its interval."""

    def cell(label: str, column: str) -> Cell:
        found = series_ratio(results, label, reference, column, part) if label != reference else None
        if found is None:
            return None
        mean, half = found
        return NumberCell(mean, interval=None if half is None else (mean / (1 + half), mean * (1 + half)))

    columns = settings_of(results, part)
    rows = [(label, *(cell(label, column) for column in columns)) for label in _by_label(results)]
    rows.sort(key=lambda row: first_number(row, 1))
    note = f"Geometric mean over seeds with its 95% t interval; below 1: better than {reference}."
    caption = f"{part}: {SCORES['mse']}, divided by that of {reference}"
    return Table(f"{part}-mse-over-{reference}", caption, ("model", *columns), tuple(rows), (note,))


def ratio_figure(results: Results, reference: str, labels: Sequence[str] | None = None) -> Figure:
    """The figure of squared errors over the reference's, by setting, with intervals; by default of all contestants."""
    drawn = [each for each in labels or _by_label(results) if each != reference]
    asked = [part for part in PARTS if settings_of(results, part)]
    columns = list(dict.fromkeys(column for part in asked for column in settings_of(results, part)))
    panels = {
        part: {label: [series_ratio(results, label, reference, column, part) for column in columns] for label in drawn}
        for part in asked
    }
    return series_ratios(panels, columns, reference)


def _by_seed(results: Results, column: str, part: str, score: str) -> dict[int, float]:
    """The score of each seed that has it."""
    there = [result for result in results if part in result["scores"].get(column, {})]
    found = {result["seed"]: result["scores"][column][part][score] for result in there}
    return {seed: value for seed, value in found.items() if value is not None}


LEARNT = 0.99  # the accuracy at the trained length from which on a task counts as learnt
EARLY = 300  # steps


def write_recall_report(folder: str | Path, out: str | Path) -> RecordReport:
    """Write all tables of a record of recall into one Markdown page, beside a figure of all tasks, and as CSV files.

    The page ends with the runs of the recipe that have no result. Raises as `read_record`.
    """
    results, out = read_record(folder, "recall"), Path(out)
    tables = [overview_table(results, length) for length in tested_lengths(results)]
    tables += [make(results, task) for task in tasks_of(results) for make in (accuracy_table, learning_table)]
    for table in tables:
        write_text_whole(out / "tables" / f"{table.name.replace(' ', '-')}.csv", comma_separated(table))
    lines = [f"# {markdown_text(results[0]['title'])}\n"]
    if tested_lengths(results):  # some run was tested
        save(accuracy_figure(results), out / "recall.png", dots=150)
        lines.append("![The share of right answers of each model in each task, by length](recall.png)\n")
    return _write_page(folder, out / "recall.md", [*lines, *map(markdown, tables)])


def tasks_of(results: Results) -> list[str]:
    """The tasks of a record, in the order of their names."""
    return list(dict.fromkeys(result["task"] for result in results))


def tested_lengths(results: Results) -> list[int]:
    """The lengths at which models were tested, ascending."""
    return sorted({int(length) for result in results for length in result["tests"]})


def accuracy_by_seed(runs: Results, length: int) -> dict[int, float]:
    """The accuracy of each seed of one model in one task at a length in tokens, of those that were tested there."""
    return {run["seed"]: run["tests"][str(length)]["accuracy"] for run in runs if str(length) in run["tests"]}


def accuracies_by_task(results: Results, length: int) -> dict[str, dict[str, dict[int, float]]]:
    """`accuracy_by_seed` of each model in each task of the record."""
    return {
        label: {
            task: accuracy_by_seed([run for run in runs if run["task"] == task], length) for task in tasks_of(results)
        }
        for label, runs in _by_label(results).items()
    }


def accuracy_table(results: Results, task: str) -> Table:
    """The accuracy of all models in one task at each length."""
    own = [result for result in results if result["task"] == task]
    lengths = tested_lengths(own)
    rows: list[tuple[Cell, ...]] = []
    for label, runs in _by_label(own).items():
        cells = [interval_cell([*accuracy_by_seed(runs, length).values()], 3) for length in lengths]
        rows.append((label, _seeds_cell(len(runs), sum(not run["tests"] for run in runs)), *cells))
    rows.sort(key=lambda row: -first_number(row, -1, missing=-2.0))
    chance = f"A guess without the context is right in {own[0]['chance']:.3g}."
    notes = (f"Share of right answers, {_INTERVAL}. {chance}", *_stopped_runs(own))
    columns = ("model", "seeds", *(f"{length} tokens" for length in lengths))
    return Table(f"{task}-accuracy", f"{task}: accuracy over length", columns, tuple(rows), notes)


def overview_table(results: Results, length: int) -> Table:
    """The accuracy of all models in all tasks at one length in tokens."""
    rows = [
        (label, *(interval_cell([*by_seed.values()]) for by_seed in by_task.values()))
        for label, by_task in accuracies_by_task(results, length).items()
    ]
    notes = (f"Share of right answers, {_INTERVAL}.", *_stopped_runs(results))
    columns = ("model", *tasks_of(results))
    return Table(f"overview-{length}", f"All tasks at {length} tokens", columns, tuple(rows), notes)


def learning_table(results: Results, task: str) -> Table:
    """How soon each model learnt a task: the loss after 300 steps, and the tokens until 99 % of answers were right.

    Both are of the held-out sequences of the trained length. A mean of tokens is over the seeds that got there.
    """
    own = [result for result in results if result["task"] == task]
    rows: list[tuple[Cell, ...]] = []
    for label, runs in _by_label(own).items():
        losses = [point["loss"] for run in runs for point in run["curve"] if point["step"] == EARLY]
        tokens = [reached for run in runs if (reached := tokens_until(run)) is not None]
        loss = interval_cell([loss for loss in losses if loss is not None])
        unlearnt = f"{len(runs) - len(tokens)} of {len(runs)}"
        rows.append((label, str(len(runs)), loss, interval_cell(tokens, 0, grouped=True), unlearnt))
    rows.sort(key=lambda row: first_number(row, 3))
    note = f"{_INTERVAL.capitalize()}, of tokens over the seeds that got there."
    columns = ("model", "seeds", f"loss after {EARLY} steps", f"tokens until {LEARNT:.0%}", "not reached in")
    caption = f"{task}: how soon it was learnt"
    return Table(f"{task}-learning", caption, columns, tuple(rows), (note, *_stopped_runs(own)))


def tokens_until(result: Mapping[str, Any], accuracy: float = LEARNT) -> int | None:
    """Training tokens until the held-out accuracy was this high for the first time; None if it never was."""
    return next((point["tokens"] for point in result["curve"] if point["accuracy"] >= accuracy), None)


def accuracy_figure(results: Results, complete: bool = False) -> Figure:
    """The figure of all models in all tasks, at the least and at the greatest tested length: means over seeds.

    Models with more tasks come first, and of those with equally many the one with the larger sum of shares at the
    greatest length. A `complete` figure has only models that were tested in all tasks; without one it raises
    `ValueError`.
    """
    lengths = tested_lengths(results)
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
    return accuracy_maps(panels, tasks_of(results))
