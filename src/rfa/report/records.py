"""Records of small networks: their result files, and means over seeds with t intervals."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rfa.results import unfinished_runs

from .layout import Cell, NumberCell, markdown_text
from .statistics import mean_and_interval


def record_kind(folder: str | Path) -> str | None:
    """The kind of recipe that a folder of results is of, by its first result that can be read.

    Returns:
        "series", "recall", or None for language models and for a folder without results.
    """
    for path in sorted(_results_of(folder).glob("*.json")):
        try:
            result = json.loads(path.read_text("utf-8"))
        except (ValueError, OSError, RecursionError):
            continue
        if not isinstance(result, dict):
            return None
        return "series" if "scores" in result else "recall" if result.get("kind") == "recall" else None
    return None


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
    for path in sorted(_results_of(folder).glob("*.json")):
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


def missing_lines(folder: str | Path) -> list[str]:
    """The part of a page that names the runs without a result; empty if all runs of the recipe have one.

    Raises:
        ValueError: if the list of the recipe's runs is damaged.
    """
    lines = [f"- {name}: {markdown_text(reason)}" for name, reason in unfinished_runs(folder).items()]
    return ["## What is missing\n", *lines, ""] if lines else []


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


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether a value of a file is a number between two others."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_named(result: Mapping[str, Any], named_by: Sequence[str]) -> bool:
    texts = all(isinstance(result.get(name), str) for name in ("recipe", *named_by))
    return texts and isinstance(result.get("seed"), int) and not isinstance(result["seed"], bool)


def _results_of(folder: str | Path) -> Path:
    """The folder of the result files: that of a record, or itself."""
    inner = Path(folder) / "results"
    return inner if inner.is_dir() else Path(folder)
