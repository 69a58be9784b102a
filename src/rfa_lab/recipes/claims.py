"""Runs that leave a result file alone: each is claimed by one process, and a finished one is never made again."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rfa.files import held
from rfa.progress import Stage, StageProgress
from rfa_lab.results import Planned, write_planned, write_result

from .plan import check_folder, check_versions
from .time_limit import TimeIsUp, TimeLimit


class ClaimedOutcome(NamedTuple):
    """The names of the runs that have a result, and of those that another process makes.

    Args:
        done: names of runs that have a result.
        claimed: names of runs that other processes are making.
        stopped: where the call stopped because its time was over; None if it came to its end.
    """

    done: list[str]
    claimed: list[str]
    stopped: str | None = None


def make_claimed(
    names: Sequence[str],
    planned: Planned,
    results: Path,
    finished: Callable[[str], Mapping[str, Any] | None],
    make: Callable[[str, StageProgress], Mapping[str, Any] | None],
    seconds: float | None = None,
    other_version: bool = False,
    progress: StageProgress | None = None,
) -> ClaimedOutcome:
    """Make the runs that have no result yet, and write each result whole. Several processes may share a folder.

    The list of all runs is written beside the results, so that a report can name those that are missing.

    Args:
        names: of the runs, in the order in which they are made.
        planned: name, title and kind of the recipe, and the names of all its runs.
        results: the folder of `NAME.json`.
        finished: the result of a run; None if it has none.
        make: the result of a run, which it reports to the function given; None if another process has to finish first.
        seconds: time after which the call stops; a run that was begun is lost. None for no limit.
        other_version: go on where another version or commit of rfa made some of the results.
        progress: called with the stage, the amount done and the total.

    Raises:
        ValueError: for a folder of another recipe, and for results of another version or commit without
            `other_version`, if there is more to make.
        OSError: if a result cannot be written.
    """
    check_folder(results.parent, planned["name"])
    if not other_version:
        stored = {name: result for name in planned["runs"] if (result := finished(name)) is not None}
        if any(name not in stored for name in names):
            check_versions(stored, results.parent)
    write_planned(results.parent, planned)
    outcome, limit = ClaimedOutcome([], []), TimeLimit(seconds, progress, saves=False)
    try:
        for index, name in enumerate(names):
            limit.report(Stage("runs", name), index, len(names))
            with held(results / f".{name}.lock") as free:
                if not free:
                    outcome.claimed.append(name)
                    continue
                if finished(name) is None:
                    result = make(name, limit.report)
                    if result is None:
                        outcome.claimed.append(name)
                        continue
                    write_result(results / f"{name}.json", result)
                outcome.done.append(name)
    except TimeIsUp:
        rest = [name for name in names if name not in (*outcome.done, *outcome.claimed)]
        made_elsewhere = [name for name in rest if finished(name) is not None]
        outcome.done.extend(made_elsewhere)
        return outcome._replace(stopped=limit.where() if len(made_elsewhere) < len(rest) else None)
    return outcome


def stored_result(path: Path, form: int, spec: Mapping[str, Any], recipe: Path) -> dict[str, Any] | None:
    """The result of a run, or None where it is still to do.

    Args:
        path: of the result.
        form: the format that it should have.
        spec: all that it should depend on.
        recipe: the recipe's file, for the message.

    Raises:
        ValueError: for a damaged file, or one of other settings.
    """
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text("utf-8"))
        same = result["format"] == form and result["spec"] == spec
        if not isinstance(result["environment"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(path) from None
    if not same:
        raise ValueError(f"result: {path} is of other settings than {recipe} names; delete it, or choose a new folder")
    return result


def damaged(path: Path) -> ValueError:
    """The error of a file that cannot be read."""
    return ValueError(f"result: {path} is damaged; delete it, and it is made again")
