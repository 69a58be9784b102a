"""All results in a folder: the runs that can be reported, and why others are missing.

`read_results` reads those of language models, `read_record` those of small networks.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rfa.models import PRESETS
from rfa.progress import Progress

from .files import PLANNED, TRIGRAM, has_maps, read_maps, read_planned, read_result, read_trigram

_TRAINED = "run.json"  # of a run of `rfa train`
_RESULTS = "results"  # the folder of result files in that of a record
_MAPS = {"maps": "weights", "near": "near", "undecayed": "undecayed", "undecayed_near": "undecayed_near"}
_NAMED_BY = {"text": ("label",), "series": ("label",), "recall": ("task", "label")}  # what tells runs of one seed apart
_Runs = Mapping[Path, dict[str, Any]]
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
    files = _files_of(folder)
    runs: dict[Path, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for done, file in enumerate(files, 1):
        try:
            run = read_result(file)
            runs[file] = run | _maps(file, run["attention"], refused)
        except (ValueError, OSError) as error:
            refused[file.name] = str(error)
        if progress is not None:
            progress(done, len(files))
    _check_one_recipe(runs, "text")
    trigram = _trigram(source, runs, refused)
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


def read_record(folder: str | Path, kind: Literal["series", "recall"]) -> list[dict[str, Any]]:
    """The results of a record of small networks, or of a folder of result files, in the order of their names.

    Raises:
        ValueError: for a file that is damaged, files of several recipes, two of one run, or no file.
    """
    results = {path: read_result(path, kind) for path in _files_of(folder)}
    if not results:
        raise ValueError(f"folder: {folder} has no results, expected files that `rfa experiment` wrote")
    _check_one_recipe(results, kind)
    return list(results.values())


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


def _files_of(folder: str | Path) -> list[Path]:
    """The result files of runs."""
    return sorted(file for file in results_folder(folder).glob("*.json") if file.name not in (PLANNED, TRIGRAM))


def _first_result(folder: str | Path) -> dict[str, Any] | None:
    """The first file of a folder that can be read; empty if it is no result."""
    for file in _files_of(folder):
        with suppress(ValueError, OSError, RecursionError):
            result = json.loads(file.read_text("utf-8"))
            return result if isinstance(result, dict) else {}
    return None


def _trigram(source: Path, runs: _Runs, refused: dict[str, str]) -> dict[str, Any] | None:
    """The trigram of the recipe and text of the runs. The fault of its file is added to `refused`."""
    try:
        trigram = read_trigram(source)
    except ValueError as error:
        refused[TRIGRAM] = str(error)
        return None
    for run in runs.values():
        if trigram is not None and _text_of(trigram) != _text_of(run):
            refused[TRIGRAM] = f"it is of another recipe, text or training length than {run['run']}"
            return None
    return trigram


def _text_of(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return result["recipe"], result["train_length"], result["data"]["fingerprint"], result["fingerprint"]


def _check_one_recipe(runs: _Runs, kind: str) -> None:
    recipes = sorted({run["recipe"] for run in runs.values()})
    if len(recipes) > 1:
        raise ValueError(f"folder: got results of the recipes {', '.join(recipes)}, expected those of one")
    texts: dict[tuple[str, str], str] = {}
    for file, run in runs.items() if kind == "text" else ():
        texts.setdefault((run["data"]["fingerprint"], run["fingerprint"]), file.name)
    if len(texts) > 1:
        files = " and ".join(texts.values())
        raise ValueError(f"folder: got results on {len(texts)} texts, those of {files} among them, expected one text")
    seen: dict[tuple[Any, ...], str] = {}
    for file, run in runs.items():
        other = seen.setdefault((*(run[name] for name in _NAMED_BY[kind]), run["seed"]), file.name)
        if other != file.name:
            same = " and ".join((*_NAMED_BY[kind], "seed"))
            raise ValueError(f"folder: got {other} and {file.name} of the same {same}, expected one of them")


def _maps(file: Path, maps_name: str | None, refused: dict[str, str]) -> dict[str, np.ndarray | None]:
    """The attention maps in the folder of a result file, by entry. Their fault is added to `refused`."""
    maps: dict[str, np.ndarray | None] = dict.fromkeys(_MAPS)
    if maps_name is None:
        return maps
    path = file.with_name(Path(maps_name).name)
    for entry, name in _MAPS.items():
        if name in ("weights", "near") or has_maps(path, name):  # older files have none before decay
            try:
                maps[entry] = read_maps(path, name)
            except ValueError as error:
                refused[path.name] = str(error)
    return maps
