"""Records of small networks: their result files, means over seeds with t intervals, and the page of a report."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rfa.files import OUTPUT, write_text_whole
from rfa_lab.results import PLANNED, read_planned, record_folder, results_folder, unfinished_runs

from .layout import Cell, NumberCell, markdown_text
from .statistics import mean_and_interval


def record_kind(folder: str | Path) -> str | None:
    """The kind of recipe that a folder of results is of, by its first result that can be read.

    Returns:
        "series" or "recall"; None for language models, and where neither a result nor the list of runs says it.
    """
    for path in _files_of(folder):
        try:
            result = json.loads(path.read_text("utf-8"))
        except (ValueError, OSError, RecursionError):
            continue
        if not isinstance(result, dict):
            return None
        return "series" if "scores" in result else "recall" if result.get("kind") == "recall" else None
    try:
        planned = read_planned(record_folder(folder))
    except ValueError:
        return None
    return planned.get("kind") if planned else None


def read_record(
    folder: str | Path, kind: str, is_result: Callable[[Mapping[str, Any]], bool], named_by: Sequence[str]
) -> list[dict[str, Any]]:
    """The results of a record, or of a folder of result files, in the order of their names.

    Args:
        folder: of the record.
        kind: of the recipe, for messages.
        is_result: whether the entries that tables read have their types. Recipe, names and seed are checked here.
        named_by: the entries, text each, that tell runs of one seed apart.

    Raises:
        ValueError: for a file that is damaged, files of several recipes, two of one run, or no file.
    """
    results: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in _files_of(folder):
        try:
            result = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError):
            result = None
        if not (isinstance(result, dict) and _is_named(result, named_by) and is_result(result)):
            raise ValueError(f"result: {path} is damaged, expected that of a recipe of {kind}")
        key = (*(result[name] for name in named_by), result["seed"])
        if key in results:
            names = ", ".join(key[:-1])
            raise ValueError(f"result: {path} is a second one of {names} with seed {key[-1]}, expected one")
        results[key] = result
    if not results:
        raise ValueError(f"folder: {folder} has no results, expected files that `rfa experiment` wrote")
    recipes = sorted({result["recipe"] for result in results.values()})
    if len(recipes) > 1:
        raise ValueError(f"folder: {folder} has results of {', '.join(recipes)}, expected one recipe")
    return list(results.values())


class RecordReport(NamedTuple):
    """A written page.

    Args:
        page: its path.
        missing: the reason why a run of the recipe has no result, or why the list of runs cannot be read, by name.
    """

    page: Path
    missing: dict[str, str]


def write_page(folder: str | Path, page: Path, lines: Sequence[str]) -> RecordReport:
    """Write a page of a record, whole. Runs of the recipe without a result are its last part.

    An empty file `.rfa-output` marks its folder, so that `rfa train` does not take the page for text.
    """
    write_text_whole(page.with_name(OUTPUT), "")
    missing = unfinished_runs(folder)
    last = [f"- {name}: {markdown_text(reason)}" for name, reason in missing.items()]
    write_text_whole(page, "\n".join([*lines, *(["## What is missing\n", *last, ""] if last else [])]))
    return RecordReport(page, missing)


def interval_cell(values: Sequence[float], digits: int, level: float = 0.95) -> Cell:
    """The mean of values over seeds, and half of its interval by Student's t with `n - 1` degrees of freedom.

    Args:
        values: one for each seed.
        digits: number of decimal places.
        level: of the interval.

    Returns:
        A cell; without an interval for one value, None for none.
    """
    if not values:
        return None
    mean = mean_and_interval(values, level)
    return NumberCell(mean.value, error=mean.half, digits=digits)


def stopped_runs(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note on the runs whose training stopped; none without such a run."""
    stopped = [f"{run['label']}, seed {run['seed']}: {run['fault']}" for run in results if run.get("fault")]
    return [f"Stopped: {'; '.join(stopped)}."] if stopped else []


def seeds_cell(runs: int, stopped: int) -> str:
    """The number of seeds, without those whose training stopped."""
    return f"{runs - stopped}, {stopped} stopped" if stopped else str(runs)


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether a value of a file is a number between two others."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_named(result: Mapping[str, Any], named_by: Sequence[str]) -> bool:
    texts = all(isinstance(result.get(name), str) for name in ("recipe", *named_by))
    return texts and isinstance(result.get("seed"), int) and not isinstance(result["seed"], bool)


def _files_of(folder: str | Path) -> list[Path]:
    """The result files of a record, or of a folder of them, in the order of their names."""
    return sorted(path for path in results_folder(folder).glob("*.json") if path.name != PLANNED)
