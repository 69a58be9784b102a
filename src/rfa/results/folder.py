"""All results in a folder: runs that can be reported, and what is missing and why."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rfa.models import PRESETS
from rfa.progress import Progress

from .files import PLANNED, read_maps, read_planned, read_result

_FILES = "result files as `rfa experiment RECIPE --out DIR` leaves them"


class Results(NamedTuple):
    """What a folder holds.

    Args:
        folder: of the result files.
        runs: contents of whole result files, by preset, label and seed; each with `maps`, its attention maps
            `(heads, queries, keys)` or None.
        refused: why a file could not be read, by its name.
        unfinished: why runs of the recipe have no result, by name.
    """

    folder: Path
    runs: list[dict[str, Any]]
    refused: dict[str, str]
    unfinished: dict[str, str]

    @property
    def missing(self) -> dict[str, str]:
        """Why a file or a run is not among `runs`, by its name."""
        return {**self.refused, **self.unfinished}


def read_results(folder: str | Path, progress: Progress | None = None) -> Results:
    """All result files of one recipe.

    Args:
        folder: what `rfa experiment RECIPE --out FOLDER` made, or a folder of result files itself.
        progress: called with how many files are read, and how many there are.

    Raises:
        ValueError: where there is no folder, or one of files of several recipes, or of one run twice.
    """
    folder = Path(folder)
    source = folder / "results" if (folder / "results").is_dir() else folder
    if not source.is_dir():
        raise ValueError(f"folder: got {source}, {'no folder' if source.exists() else 'not there'}, expected {_FILES}")
    files = sorted(file for file in source.glob("*.json") if file.name != PLANNED)
    runs: dict[Path, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for done, file in enumerate(files, 1):
        try:
            run = read_result(file)
            for held, name in (("maps", "weights"), ("near", "near")):
                run[held], fault = _maps(file, run["attention"], name)
                refused.update(fault)
            runs[file] = run
        except (ValueError, OSError) as error:
            refused[file.name] = str(error)
        if progress is not None:
            progress(done, len(files))
    _check_one_recipe(runs)
    unfinished, fault = _unfinished(folder, source)
    refused.update(fault)
    if not (runs or refused or unfinished):
        refused["results"] = f"none in {source}, expected {_FILES}"
    places = {preset: place for place, preset in enumerate(PRESETS)}
    ordered = sorted(runs.values(), key=lambda run: (places.get(run["preset"], len(places)), run["label"], run["seed"]))
    return Results(source, ordered, refused, unfinished)


def _unfinished(folder: Path, source: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Runs without a result, and what is wrong with the list of them."""
    begun = sorted(record.parent.name for record in folder.glob("runs/*/run.json"))
    planned, fault = None, {}
    try:
        planned = read_planned(folder)
    except ValueError as error:
        fault = {PLANNED: str(error)}
    without = [name for name in (planned["runs"] if planned else begun) if not _has(source, name)]
    reasons = {name: "begun, no result yet" for name in without if name in begun}
    if waiting := [name for name in without if name not in begun]:
        reasons[f"{len(waiting)} run{'s' * (len(waiting) > 1)}"] = f"not begun: {', '.join(waiting)}"
    return reasons, fault


def _has(source: Path, name: str) -> bool:
    return (source / f"{name}.json").exists()


def _check_one_recipe(runs: dict[Path, dict[str, Any]]) -> None:
    recipes = sorted({run["recipe"] for run in runs.values()})
    if len(recipes) > 1:
        raise ValueError(f"folder: got results of the recipes {', '.join(recipes)}, expected those of one")
    texts: dict[tuple[str, str], str] = {}
    for file, run in runs.items():
        texts.setdefault((run["data"]["fingerprint"], run["fingerprint"]), file.name)
    if len(texts) > 1:
        files = " and ".join(texts.values())
        raise ValueError(f"folder: got results on {len(texts)} texts, those of {files} among them, expected one text")
    seen: dict[tuple[str, int], str] = {}
    for file, run in runs.items():
        other = seen.setdefault((run["label"], run["seed"]), file.name)
        if other != file.name:
            raise ValueError(f"folder: got {other} and {file.name} of the same label and seed, expected one of them")


def _maps(file: Path, beside: str | None, name: str) -> tuple[np.ndarray | None, dict[str, str]]:
    """The attention maps that lie beside a result, and what is wrong with them."""
    if beside is None:
        return None, {}
    path = file.with_name(Path(beside).name)
    try:
        return read_maps(path, name), {}
    except ValueError as error:
        return None, {path.name: str(error)}
