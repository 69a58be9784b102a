"""Result files of small networks: of recipes of series and of recall."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from rfa.checks import check_fields

from .files import PLANNED, read_planned
from .folder import record_folder, results_folder

_CONFIG = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
Share = Annotated[float, Field(ge=0, le=1)]
Score = Annotated[float, Field(ge=-1e300, le=1e300)] | None  # None: not finite


class SeriesScores(TypedDict):
    """Scores of one part of a series in one setting."""

    mse: Score
    nll: Score
    crps: Score
    coverage: Score


class SeriesResult(TypedDict):
    """A result of series: scores by setting and part, or the fault by which training stopped."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]
    environment: NotRequired[dict[str, Any]]
    recipe: str
    label: str
    seed: int
    scores: dict[str, Annotated[dict[Literal["filter", "forecast"], SeriesScores], Field(min_length=1)]]
    fault: NotRequired[str | None]


def _check_scored_or_stopped(result: SeriesResult) -> SeriesResult:
    if bool(result["scores"]) == bool(result.get("fault")):
        raise ValueError("expected either scores or a fault")
    return result


class RecallScores(TypedDict):
    """The share of right answers, and the loss in nats."""

    accuracy: Share
    loss: Score


class LearningPoint(RecallScores):
    """Scores after so many steps and tokens of training."""

    step: Annotated[float, Field(ge=1)]
    tokens: Annotated[float, Field(ge=1)]


class RecallResult(TypedDict):
    """A result of recall: scores by length and over training. The task becomes part of file names."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]
    environment: NotRequired[dict[str, Any]]
    recipe: str
    title: str
    task: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.=+ -]{0,99}$")]
    label: str
    seed: int
    chance: Share
    tests: dict[Annotated[str, Field(pattern=r"^[0-9]+$")], RecallScores]
    curve: list[LearningPoint]


_SCHEMAS: dict[str, tuple[TypeAdapter[Any], tuple[str, ...]]] = {  # and the entries that tell runs of one seed apart
    "series": (TypeAdapter(Annotated[SeriesResult, AfterValidator(_check_scored_or_stopped)]), ("label",)),
    "recall": (TypeAdapter(RecallResult), ("task", "label")),
}


def record_kind(folder: str | Path) -> str | None:
    """The kind of recipe that a folder of results is of, by its first result that can be read.

    Returns:
        "series" or "recall"; None for language models, and where neither a result nor the list of runs says it.
    """
    if (result := _first_result(folder)) is not None:
        return "series" if "scores" in result else "recall" if result.get("kind") == "recall" else None
    try:
        planned = read_planned(record_folder(folder))
    except ValueError:
        return None
    return planned.get("kind") if planned else None


def recipe_of(folder: str | Path) -> str | None:
    """The name of the recipe that made a folder: by its list of runs, else by its first result that can be read.

    Raises:
        ValueError: if the list of runs is damaged.
    """
    made = read_planned(record_folder(folder))
    return made["name"] if made else (_first_result(folder) or {}).get("recipe")


def read_run(path: Path, kind: str) -> dict[str, Any]:
    """A result file. Raises `ValueError` if it is damaged."""
    result = _json_of(path)
    try:
        check_fields(_SCHEMAS[kind][0], result)
    except ValueError as error:
        expected = f"expected that of a recipe of {kind}; delete it, and it is made again"
        raise ValueError(f"result: {path} is damaged ({error}), {expected}") from None
    return dict(result)


def read_record(folder: str | Path, kind: Literal["series", "recall"]) -> list[dict[str, Any]]:
    """The results of a record, or of a folder of result files, in the order of their names.

    Raises:
        ValueError: for a file that is damaged, files of several recipes, two of one run, or no file.
    """
    named_by = _SCHEMAS[kind][1]
    results: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in _files_of(folder):
        result = read_run(path, kind)
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


def _json_of(path: Path) -> Any:
    """The contents of a JSON file; None for one that cannot be read."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError):
        return None


def _first_result(folder: str | Path) -> dict[str, Any] | None:
    """The first file of a folder that can be read; empty if it is no result."""
    contents = map(_json_of, _files_of(folder))
    return next((result if isinstance(result, dict) else {} for result in contents if result is not None), None)


def _files_of(folder: str | Path) -> list[Path]:
    return sorted(path for path in results_folder(folder).glob("*.json") if path.name != PLANNED)
