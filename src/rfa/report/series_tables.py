"""Tables of a record of series: mean over seeds and t interval of each score, by contestant and setting."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from rfa.files import write_text_whole

from .layout import Cell, NumberCell, Table, markdown
from .statistics import mean_and_error
from .tables import with_best

SCORES = {
    "mse": "mean squared error",
    "nll": "negative log likelihood, nats",
    "crps": "CRPS",
    "coverage": "coverage of 90 % intervals",
}
_DIGITS = 3


def read_series_results(folder: str | Path) -> list[dict[str, Any]]:
    """The results in a folder, in the order of their names.

    Raises:
        ValueError: for a file that is damaged, or no file.
    """
    results = []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            result = json.loads(path.read_text("utf-8"))
            _ = [float(x) for column in result["scores"].values() for part in column.values() for x in part.values()]
            _ = str(result["label"]), int(result["seed"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"result: {path} is damaged ({error}), expected that of a recipe of series") from None
        results.append(result)
    if not results:
        raise ValueError(f"folder: {folder} has no results, expected files that `rfa experiment` wrote")
    return results


def series_table(results: Sequence[Mapping[str, Any]], part: str, score: str, level: float = 0.95) -> Table:
    """One score of all contestants.

    Args:
        results: of one recipe.
        part: "filter" (at the readings' times) or "forecast".
        score: one of `SCORES`.
        level: of the intervals, by Student's t over seeds.
    """
    columns = list(dict.fromkeys(column for result in results for column in result["scores"]))
    labels = list(dict.fromkeys(result["label"] for result in results))
    rows: list[list[Cell]] = []
    for label in labels:
        own = [result for result in results if result["label"] == label]
        cells: list[Cell] = [label, str(len(own))]
        for column in columns:
            values = [result["scores"][column][part][score] for result in own if column in result["scores"]]
            cells.append(_cell(values, level))
        rows.append(cells)
    rows.sort(key=lambda row: row[2].value if isinstance(row[2], NumberCell) else math.inf)
    if score != "coverage":
        rows = with_best(rows)
    caption = f"{part}: {SCORES[score]}"
    note = f"Mean over seeds with its {level:.0%} t interval; bold: the lowest of its column."
    return Table(f"{part}-{score}", caption, ("model", "seeds", *columns), tuple(map(tuple, rows)), (note,))


def write_series_report(folder: str | Path, out: str | Path) -> Path:
    """Write all tables of a record into one Markdown page, and return its path.

    Raises:
        ValueError: as `read_series_results`.
        OSError: if the page cannot be written.
    """
    results = read_series_results(folder)
    parts = [f"# {results[0]['recipe']}\n"]
    parts += [markdown(series_table(results, part, score)) for part in ("filter", "forecast") for score in SCORES]
    page = Path(out) / "series.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text_whole(page, "\n".join(parts))
    return page


def _cell(values: Sequence[float], level: float) -> Cell:
    if not values:
        return None
    mean = mean_and_error(values)
    if mean.error is None:
        return NumberCell(mean.value, digits=_DIGITS)
    half = float(student.ppf((1 + level) / 2, mean.seeds - 1)) * mean.error
    return NumberCell(mean.value, interval=(mean.value - half, mean.value + half), digits=_DIGITS)
