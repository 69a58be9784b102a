"""Tables of a record of series: scores by contestant and setting, and their ratios to a reference, with t intervals."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rfa.forecasting.style import save

from .figures import Figure, series_ratios
from .layout import Cell, NumberCell, Table, markdown, markdown_text
from .records import RecordReport, interval_cell, read_record, seeds_cell, stopped_runs, write_page
from .statistics import mean_and_interval
from .tables import with_best

SCORES = {
    "mse": "mean squared error",
    "nll": "negative log likelihood, nats",
    "crps": "CRPS",
    "coverage": "coverage of 90 % intervals",
}
PARTS = ("filter", "forecast")
_DIGITS = 3
_LARGEST = 1e300  # of a score
_REFERENCES = ("wolf", "c9")  # of the ratios on a page: the robust filter with the true model, and a control
Results = Sequence[Mapping[str, Any]]
Ratio = tuple[float, float | None]  # mean over seeds, and half of its interval relative to it


def read_series_results(folder: str | Path) -> list[dict[str, Any]]:
    """The results of a record, or of a folder of result files, in the order of their names.

    Raises:
        ValueError: for a file that is damaged, files of several recipes, two of one label and seed, or no file.
    """
    return read_record(folder, "series", _is_result, ("label",))


def _is_result(result: Mapping[str, Any]) -> bool:
    """Whether the entries that tables read have their types. A score that is not finite is None.

    A run whose training stopped has a fault instead of scores.
    """
    scores, fault = result.get("scores"), result.get("fault")
    if not isinstance(scores, dict) or not isinstance(fault, str | None) or bool(scores) == bool(fault):
        return False
    columns = all(isinstance(parts, dict) and parts and parts.keys() <= set(PARTS) for parts in scores.values())
    found = [part for parts in scores.values() for part in parts.values()] if columns else []
    whole = all(isinstance(part, dict) and part.keys() >= SCORES.keys() for part in found)
    return (columns and whole) and all(
        value is None or (isinstance(value, int | float) and abs(value) < _LARGEST)
        for part in found
        for value in part.values()
    )


def series_table(results: Results, part: str, score: str, level: float = 0.95) -> Table:
    """One score of all contestants.

    Args:
        results: of one recipe.
        part: "filter" (at the readings' times) or "forecast".
        score: one of `SCORES`.
        level: of the intervals, by Student's t over seeds.
    """
    columns, labels = _columns(results, part), list(dict.fromkeys(result["label"] for result in results))
    rows: list[list[Cell]] = []
    for label in labels:
        own = [result for result in results if result["label"] == label]
        cells: list[Cell] = [label, seeds_cell(len(own), sum(not result["scores"] for result in own))]
        for column in columns:
            cells.append(interval_cell(list(_by_seed(own, column, part, score).values()), _DIGITS, level))
        rows.append(cells)
    rows.sort(key=lambda row: row[2].value if isinstance(row[2], NumberCell) else math.inf)
    if score != "coverage":
        rows = with_best(rows)
    caption = f"{part}: {SCORES[score]}"
    note = f"Mean over seeds ± half of its {level:.0%} t interval; bold: the lowest of its column."
    return Table(f"{part}-{score}", caption, ("model", "seeds", *columns), tuple(map(tuple, rows)), (note,))


def is_learned(results: Results, label: str) -> bool:
    """Whether a contestant has parameters to learn. A filter has none, and is the same for all seeds."""
    return any(result.get("parameters") for result in results if result["label"] == label)


def series_ratio(
    results: Results, label: str, reference: str, column: str, part: str, score: str, level: float = 0.95
) -> Ratio | None:
    """A contestant's score over a reference's in one column: the geometric mean of the ratios of equal seeds.

    A filter is the same for all seeds. The half width h is that of the t interval of the mean log ratio: the ratio lies
    between `mean / (1 + h)` and `mean (1 + h)`. It is None for one seed.
    None without a result of both, or with scores that are not above 0.
    """
    own, other = (
        _by_seed([result for result in results if result["label"] == each], column, part, score)
        for each in (label, reference)
    )
    if len(other) == 1 and not is_learned(results, reference):
        other = dict.fromkeys(own, next(iter(other.values())))
    pairs = [(own[seed], other[seed]) for seed in own if seed in other]
    if not pairs or min(min(pair) for pair in pairs) <= 0:
        return None
    logs = [math.log(mine / theirs) for mine, theirs in pairs]
    mean = mean_and_interval(logs, level)
    return math.exp(mean.value), None if mean.half is None else math.expm1(mean.half)


def series_ratio_table(results: Results, reference: str, part: str, score: str, level: float = 0.95) -> Table:
    """`series_ratio` of all contestants to one of them, with its interval."""
    columns, rows = _columns(results, part), []
    for label in dict.fromkeys(result["label"] for result in results):
        cells: list[Cell] = [label]
        for column in columns:
            found = series_ratio(results, label, reference, column, part, score, level) if label != reference else None
            if found is None:
                cells.append(None)
            else:
                mean, half = found
                interval = None if half is None else (mean / (1 + half), mean * (1 + half))
                cells.append(NumberCell(mean, interval=interval, digits=2))
        rows.append(cells)
    rows.sort(key=lambda row: row[1].value if isinstance(row[1], NumberCell) else math.inf)
    note = f"Geometric mean over seeds with its {level:.0%} t interval; below 1: better than {reference}."
    caption = f"{part}: {SCORES[score]}, divided by that of {reference}"
    name = f"{part}-{score}-over-{reference}"
    return Table(name, caption, ("model", *columns), tuple(map(tuple, rows)), (note,))


def write_series_report(folder: str | Path, out: str | Path) -> RecordReport:
    """Write all tables of a record into one Markdown page, beside a figure of the ratios.

    The page ends with the runs of the recipe that have no result.

    Raises:
        ValueError: as `read_series_results`.
        OSError: if the page cannot be written.
    """
    results = read_series_results(folder)
    asked, there = [part for part in PARTS if _columns(results, part)], {result["label"] for result in results}
    lines = [f"# {markdown_text(results[0]['recipe'])}\n", *(f"{markdown_text(x)}\n" for x in stopped_runs(results))]
    for part in asked:
        lines += [markdown(series_table(results, part, score)) for score in SCORES]
        lines += [markdown(series_ratio_table(results, each, part, "mse")) for each in _REFERENCES if each in there]
    page = Path(out) / "series.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    if asked and any(each in there for each in _REFERENCES):
        save(ratio_figure(results, next(each for each in _REFERENCES if each in there)), page.with_suffix(".png"))
        lines.append("![Squared errors, divided by the reference's, by setting](series.png)\n")
    return write_page(folder, page, lines)


def ratio_figure(results: Results, reference: str, labels: Sequence[str] | None = None) -> Figure:
    """The figure of squared errors over the reference's, by column, with intervals.

    Args:
        results: of one recipe.
        reference: a label.
        labels: the contestants drawn; by default all but the reference.
    """
    drawn = [each for each in labels or dict.fromkeys(result["label"] for result in results) if each != reference]
    asked = [part for part in PARTS if _columns(results, part)]
    columns = list(dict.fromkeys(column for part in asked for column in _columns(results, part)))
    panels = {
        part: {
            label: [series_ratio(results, label, reference, column, part, "mse") for column in columns]
            for label in drawn
        }
        for part in asked
    }
    return series_ratios(panels, columns, reference)


def _columns(results: Results, part: str) -> list[str]:
    """The settings in which a part is scored, in the order of the recipe."""
    scored = (column for result in results for column, parts in result["scores"].items() if part in parts)
    return list(dict.fromkeys(scored))


def _by_seed(results: Results, column: str, part: str, score: str) -> dict[int, float]:
    """The score of each seed that has it."""
    there = [result for result in results if part in result["scores"].get(column, {})]
    found = {result["seed"]: result["scores"][column][part][score] for result in there}
    return {seed: value for seed, value in found.items() if value is not None}
