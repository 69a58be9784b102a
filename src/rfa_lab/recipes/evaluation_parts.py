"""An evaluation under a time limit: in parts that are kept, so that it ends after several calls.

<run folder>/evaluation/<part>.json    what `full_evaluation` returns for one protocol, the probes, or the maps
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rfa.progress import StageProgress
from rfa_lab import evaluation
from rfa_lab.results import write_result
from rfa_lab.training import RunFolder

_FOLDER = "evaluation"
_ALONE = ("by_position", "passkey", "attention")  # entries of a result that are None in the other parts


def evaluated_in_parts(
    run: RunFolder, asked: Mapping[str, Any], progress: StageProgress, limited: bool
) -> dict[str, Any]:
    """What `rfa_lab.evaluation.full_evaluation` returns, and with parts the "environments" in which they were made.

    Args:
        run: the folder of a trained run.
        asked: the arguments of `full_evaluation`.
        progress: as there. If it raises, finished parts stay.
        limited: whether time is limited. Otherwise all is evaluated at once, with the run loaded once, unless there are
            parts of an earlier call.
    """
    if not limited and not (run.path / _FOLDER).is_dir():
        return evaluation.full_evaluation(run.path, **asked, progress=progress)
    whole: dict[str, Any] = {}
    environments = []
    for name, part in _parts(asked):
        path = run.path / _FOLDER / f"{name}.json"
        found = _finished(path, part)
        if found is None:
            found = evaluation.full_evaluation(run.path, **part, progress=progress)
            write_result(path, {"asked": _named(part), "found": found})
        given = {entry: value for entry, value in found.items() if value is not None or entry not in whole}
        evaluations = {**whole.get("evaluations", {}), **found["evaluations"]}
        whole = {**whole, **given, "evaluations": evaluations}
        environments.append(found["environment"])
    return {**whole, "environments": environments}


def delete_parts(run: RunFolder) -> None:
    """Delete the parts of a run: its result is written, or it is trained anew."""
    shutil.rmtree(run.path / _FOLDER, ignore_errors=True)


def _parts(asked: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the arguments of each part. The loss by position comes with `blocks`, which computes it anyway."""
    nothing = {**asked, "protocols": {}, "by_position": False, "passkey": False, "attention": None}
    for protocol, tokens in asked["protocols"].items():
        with_positions = asked["by_position"] and protocol == "blocks"
        yield protocol, {**nothing, "protocols": {protocol: tokens}, "by_position": with_positions}
    for name in _ALONE:
        if asked[name] and not (name == "by_position" and "blocks" in asked["protocols"]):
            yield name, {**nothing, name: asked[name]}


def _finished(path: Path, part: Mapping[str, Any]) -> dict[str, Any] | None:
    """A part that was evaluated before; None if there is none, or one of other arguments."""
    maps = part["attention"]
    if not path.is_file() or (maps is not None and not maps.is_file()):
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return stored["found"] if stored["asked"] == _named(part) else None
    except (ValueError, KeyError, TypeError):  # damaged: it is made again
        return None


def _named(part: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as JSON holds them. Maps have the name of their file, because folders move."""
    maps = part["attention"]
    return {**part, "lengths": list(part["lengths"]), "attention": None if maps is None else maps.name}
