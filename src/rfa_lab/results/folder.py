"""All results in a folder: the runs that can be reported, and why others are missing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rfa.models import PRESETS
from rfa.progress import Progress

from .files import PLANNED, TRIGRAM, has_maps, read_maps, read_planned, read_result, read_trigram

_TRAINED = "run.json"  # of a run of `rfa train`
_RESULTS = "results"  # the folder of result files in that of a record
_MAPS = (  # entry of a run, name in the file, and whether every file has it
    ("maps", "weights", True),
    ("near", "near", True),
    ("undecayed", "undecayed", False),
    ("undecayed_near", "undecayed_near", False),
)
_FILES = "result files as `rfa experiment RECIPE --out DIR` leaves them"


class Results(NamedTuple):
    """The results in a folder.

    Args:
        runs: contents of all valid result files, sorted by preset, label and seed. Each has its attention maps as
            `maps` and `near`, and as `undecayed` and `undecayed_near` those before decay, `(heads, queries, keys)` or
            None, and as `trigram` the file of the recipe's trigram or None.
        refused: the reason why a file could not be read, by the file's name.
        unfinished: the reason why a run of the recipe has no result, by the run's name.
    """

    runs: list[dict[str, Any]]
    refused: dict[str, str]
    unfinished: dict[str, str]

    @property
    def missing(self) -> dict[str, str]:
        """The reason why a file or a run is not among `runs`, by its name."""
        return {**self.refused, **self.unfinished}


def read_results(folder: str | Path, progress: Progress | None = None) -> Results:
    """All result files of one recipe.

    Args:
        folder: a folder made by `rfa experiment RECIPE --out FOLDER`, or a folder of result files.
        progress: called with the number of files read so far, and their total number.

    Raises:
        ValueError: if there is no such folder, if it holds neither results nor runs, if its files belong to several
            recipes or texts, or if two files are of the same label and seed.
    """
    folder = Path(folder)
    source = results_folder(folder)
    if not source.is_dir():
        raise ValueError(f"folder: got {source}, {'no folder' if source.exists() else 'not there'}, expected {_FILES}")
    if (source / _TRAINED).is_file():
        raise ValueError(f"folder: got {source}, a run of `rfa train`, expected {_FILES}; `rfa evaluate` scores a run")
    files = sorted(file for file in source.glob("*.json") if file.name not in (PLANNED, TRIGRAM))
    runs: dict[Path, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for done, file in enumerate(files, 1):
        try:
            run = read_result(file)
            for entry, name, always in _MAPS:
                run[entry], fault = _maps(file, run["attention"], name, always)
                refused.update(fault)
            runs[file] = run
        except (ValueError, OSError) as error:
            refused[file.name] = str(error)
        if progress is not None:
            progress(done, len(files))
    _check_one_recipe(runs)
    trigram, fault = _trigram(source, runs)
    refused.update(fault)
    for run in runs.values():
        run["trigram"] = trigram
    unfinished = unfinished_runs(folder)
    if PLANNED in unfinished:
        refused[PLANNED] = unfinished.pop(PLANNED)
    if not (runs or refused or unfinished):
        raise ValueError(f"folder: got {source} without results, expected {_FILES}")
    order = {preset: index for index, preset in enumerate(PRESETS)}
    ordered = sorted(runs.values(), key=lambda run: (order.get(run["preset"], len(order)), run["label"], run["seed"]))
    return Results(ordered, refused, unfinished)


def record_folder(folder: str | Path) -> Path:
    """The folder of a record, of which either it or its folder of result files is given."""
    folder = Path(folder).resolve()
    return folder.parent if folder.name == _RESULTS and not (folder / PLANNED).exists() else folder


def unfinished_runs(folder: str | Path) -> dict[str, str]:
    """The reason why a run of a folder's recipe has no result, by the run's name; several that are not begun together.

    Args:
        folder: of a record, or its folder of result files.

    Returns:
        Reasons by name. Where the list of runs, `recipe.json`, is damaged, its fault has that name.
    """
    folder = record_folder(folder)
    source, begun = results_folder(folder), sorted(record.parent.name for record in folder.glob("runs/*/run.json"))
    reasons, planned = {}, None
    try:
        planned = read_planned(folder)
    except ValueError as error:
        reasons[PLANNED] = str(error)
    without = [name for name in (planned["runs"] if planned else begun) if not (source / f"{name}.json").exists()]
    reasons |= {name: _state_of(folder / "runs" / name / _TRAINED) for name in without if name in begun}
    if waiting := [name for name in without if name not in begun]:
        reasons[f"{len(waiting)} run{'s' * (len(waiting) > 1)}"] = f"not begun: {', '.join(waiting)}"
    return reasons


def _state_of(record: Path) -> str:
    """What the record of a run without a result says."""
    try:
        return str(json.loads(record.read_text(encoding="utf-8"))["diverged"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return "begun, no result yet"


def results_folder(folder: str | Path) -> Path:
    """The folder of the result files: that of a record, or itself."""
    folder = Path(folder)
    return folder / _RESULTS if (folder / _RESULTS).is_dir() else folder


def _trigram(source: Path, runs: dict[Path, dict[str, Any]]) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """The trigram of the recipe and text of the runs, and the fault of its file."""
    try:
        trigram = read_trigram(source)
    except ValueError as error:
        return None, {TRIGRAM: str(error)}
    for run in runs.values():
        if trigram is not None and _text_of(trigram) != _text_of(run):
            return None, {TRIGRAM: f"it is of another recipe, text or training length than {run['run']}"}
    return trigram, {}


def _text_of(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return result["recipe"], result["train_length"], result["data"]["fingerprint"], result["fingerprint"]


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


def _maps(file: Path, maps_name: str | None, name: str, always: bool) -> tuple[np.ndarray | None, dict[str, str]]:
    """The attention maps in the folder of a result file, and their fault by the file's name."""
    if maps_name is None:
        return None, {}
    path = file.with_name(Path(maps_name).name)
    if not always and not has_maps(path, name):
        return None, {}
    try:
        return read_maps(path, name), {}
    except ValueError as error:
        return None, {path.name: str(error)}
