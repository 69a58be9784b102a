"""Make all runs of a recipe, of whatever kind. Several processes can share the work; each run is made once.

<out>/results/<run>.json     one result file for each run, whole
<out>/recipe.json            the recipe's name, title and runs, so that a report can name missing runs
<out>/.claims/<run>.lock     locked by the process that makes the run or the trigram, until that process ends
"""

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import torch

from rfa.environment import environment
from rfa.files import held
from rfa.progress import Stage, StageProgress
from rfa_lab.results import Planned, read_result, recipe_of, write_planned, write_result
from rfa_lab.training import OutOfTime, Stopped

from .reading import BaseRecipe

# The time given to a call

_DURATION = re.compile(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)


def seconds_of(duration: str) -> float:
    """The seconds of a duration such as `9m`, `90s` or `1h30m`.

    Raises:
        ValueError: for another text, or no time at all.
    """
    found = _DURATION.fullmatch(duration)
    hours, minutes, seconds = map(int, found.groups(default="0")) if found else (0, 0, 0)
    given = float(3600 * hours + 60 * minutes + seconds)
    if not given:
        raise ValueError(f"for: got {duration!r:.40}, expected a duration such as 9m, 90s or 1h30m")
    return given


class TimeIsUp(Exception):
    """The time given is over, at a place where nothing has to be saved."""


_ANEW = "which begins anew (it has to fit into the time given)"


class TimeLimit:
    """The time until which a call may go on, None for no limit, and where it is. `progress` sees every stage."""

    def __init__(self, seconds: float | None, progress: StageProgress | None):
        self.until = None if seconds is None else time.monotonic() + seconds
        self.where = "before the first run"
        self._progress = progress or (lambda *_: None)

    def show(self, stage: Stage, done: int, total: int) -> None:
        """Report progress of training that is saved when its time is over."""
        self._progress(stage, done, total)
        self.where = f"at step {done:,} of {total:,} of {stage.run}"

    def report(self, stage: Stage, done: int, total: int, then: str = _ANEW) -> None:
        """Report progress. Raises `TimeIsUp` if the time is over, except where all is done. `then`: what follows."""
        self._progress(stage, done, total)
        if stage.run:
            self.where = f"in {stage.run}: {stage.name}, {then}"
        if self.until is not None and time.monotonic() >= self.until and (stage.name, done) != ("runs", total):
            raise TimeIsUp


# The runs of a recipe, which each kind of recipe makes in its own way


class _Named(Protocol):
    @property
    def name(self) -> str: ...


RecipeType = TypeVar("RecipeType", bound=BaseRecipe)
RunType = TypeVar("RunType", bound=_Named)


class Runs(ABC, Generic[RecipeType, RunType]):
    """The runs of a recipe in a folder of run folders and results."""

    def __init__(self, recipe: RecipeType, out: Path):
        self.recipe, self.out = recipe, out
        self.planned: Sequence[RunType] = cast(Any, recipe).runs  # in the order in which they are made

    @abstractmethod
    def finished(self, run: RunType) -> Mapping[str, Any] | None:
        """What a finished run has left; None where it is still to do.

        Raises `ValueError` for a damaged file, or one of other settings.
        """

    @abstractmethod
    def make(self, run: RunType, limit: TimeLimit) -> None:
        """Make a run, or go on with it, and write its result."""

    def needs(self, run: RunType) -> Sequence[RunType]:
        """The runs that are not finished and have to be, before this one is made."""
        return ()

    def begun(self, run: RunType) -> Mapping[str, Mapping[str, Any]]:
        """What is there of a run without a result, by the names of the run and of those that it needs."""
        return {}

    def prepare(self, finished: Sequence[RunType], waiting: Sequence[RunType], limit: TimeLimit) -> None:
        """What comes once, before the waiting runs. Finished runs are those that the call names."""

    def path(self, run: RunType) -> Path:
        """The path of a run's result."""
        return self.out / "results" / f"{run.name}.json"

    def claimed(self, name: str) -> AbstractContextManager[bool]:
        """Whether this process alone makes what has the name, as `rfa.files.held`."""
        return held(self.out / ".claims" / f"{name}.lock")

    def results(self) -> dict[str, Mapping[str, Any]]:
        """All results of the recipe, by the run's name.

        Raises `ValueError` for a damaged result or list of runs, or a folder of another recipe.
        """
        if (name := recipe_of(self.out)) not in (self.recipe.name, None):
            raise ValueError(
                f"out: got {self.out}, the folder of the recipe {name}, expected one of {self.recipe.name}"
            )
        return {run.name: result for run in self.planned if (result := self.finished(run)) is not None}

    def selected(self, only: Sequence[str]) -> list[RunType]:
        """The runs that are named in `only`, or all if it is empty. `*` in a name matches any text.

        Raises `ValueError` for a name that matches no run.
        """
        names = [run.name for run in self.planned]
        for pattern in only:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"only: got {pattern!r}, expected some of {', '.join(names)}")
        return [run for run in self.planned if not only or any(fnmatchcase(run.name, pattern) for pattern in only)]

    def check_same(self, path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Raise `ValueError` if a result is of another recipe or of other settings."""
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ValueError(
                    f"result: {path} is of another {name} than {self.recipe.path} names: "
                    f"{name}{_difference(found.get(name), value)}; delete it, or choose a new folder"
                )


class UnsavedRuns(Runs[RecipeType, RunType]):
    """Runs that leave a result file. One that is stopped is made anew, but for training that has checkpoints."""

    form: int  # the format of the results
    scores: str  # their entry of the scores
    stopped = _ANEW  # what training does after a stop

    @abstractmethod
    def spec(self, run: RunType) -> dict[str, Any]:
        """All that a result depends on."""

    @abstractmethod
    def tests(self) -> Mapping[str, Any]:
        """What each run is scored on, by name."""

    @abstractmethod
    def trained(self, run: RunType, report: StageProgress) -> tuple[Callable[[Any], Any], dict[str, Any]]:
        """Train a network. Returns its score of a test, and entries of the result.

        Training that diverges is the entry `fault`: a later call finds it, and the other runs go on.
        """

    def make(self, run: RunType, limit: TimeLimit) -> None:
        """Train a network, score it on all tests, and write the result."""
        started, report, tests = time.perf_counter(), limit.report, self.tests()
        score, entries = self.trained(run, partial(report, then=self.stopped))
        trained, scores = time.perf_counter(), {}
        for index, (name, test) in enumerate(() if entries.get("fault") else tests.items()):
            report(Stage("evaluation", run.name), index, len(tests))
            scores[name] = score(test)
        recipe = self.recipe
        about = {"format": self.form, "kind": recipe.kind, "recipe": recipe.name, "title": recipe.title}
        measured = {
            self.scores: scores,
            "seconds": {"training": trained - started, "evaluation": time.perf_counter() - trained},
            "environment": environment(),
        }
        write_result(self.path(run), {**about, "run": run.name, "spec": self.spec(run), **entries, **measured})

    def finished(self, run: RunType) -> Mapping[str, Any] | None:
        """The result of a run; None where it is still to do."""
        path = self.path(run)
        if not path.is_file():
            return None
        result = read_result(path, self.recipe.kind)
        self.check_same(path, result, {"format": self.form, "spec": self.spec(run)})
        return result


def _difference(found: Any, wanted: Any) -> str:
    """The first difference of two values, in words."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *found]:
            if found.get(key) != wanted.get(key):
                return f".{key}{_difference(found.get(key), wanted.get(key))}"
    return f": got {found!r}, expected {wanted!r}"


def versions_of(*made: Mapping[str, Any]) -> list[str]:
    """The versions and commits of rfa in words, each once, that made results or what run.json tells of."""
    environments = [one for each in made for one in (each.get("environment", {}), *each.get("resumed", []))]
    named = [f"{one.get('rfa')}{f' {commit}' if (commit := one.get('commit')) else ''}" for one in environments if one]
    return list(dict.fromkeys(named))


# Make them


@dataclass
class Outcome:
    """The outcome of a call in one process.

    Args:
        done: names of runs that have a result.
        claimed: names of runs that other processes are making.
        failed: the error of each failed run, by name.
        stopped: where the call stopped because its time was over; None if it came to its end.
    """

    done: tuple[str, ...] = ()
    claimed: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    stopped: str | None = None


_PAUSE = 2.0  # seconds between looks at runs that other processes make


def make_runs(
    runs: Runs[Any, Any],
    *,
    only: Sequence[str] = (),
    seconds: float | None = None,
    other_version: bool = False,
    progress: StageProgress | None = None,
    failure: Callable[[str, str], None] | None = None,
) -> Outcome:
    """Make every run that has no result yet: train or resume it, evaluate it, and write the result.

    Several processes may share a folder. A process skips a run that another one is making, and checks it again later.
    It ends when every run is done, is made by another process, or has failed here. After a failure the other runs are
    still made. A run whose learning rate others choose comes after them.

    Args:
        runs: of a recipe, in a folder.
        only: names of runs, in which `*` matches any text; empty for all runs.
        seconds: time after which the call saves and stops; a step of training that was begun is made. All state is in
            the folder, which can be carried elsewhere. A run of recall begins anew, one of series goes on from its last
            checkpoint. None for no limit.
        other_version: go on in a folder that another version or commit of rfa began. Results name all of them.
        progress: called with the stage, the amount done and the total. Stages of the whole call are "runs" (the number
            of runs), "text" and "trial_steps" (a step of each model). Stages of a run are "text", "training" and those
            of its evaluation.
        failure: called with the name of a failed run and the reason.

    Raises:
        ValueError: before any run. The reason is an unknown name in `only`, a damaged result or run folder, one of
            another recipe, one of another version without `other_version`, bad data, lengths longer than the test
            split, a model that cannot make a step here, or processes that were launched to share one run.
        OSError: if the disk is full.
        torch.AcceleratorError: for an error after which this process cannot use the device any more.
        Stopped, KeyboardInterrupt: on Ctrl-C. A run that is being trained is saved first.
    """
    if (launched := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(
            f"processes: got {launched} that share each run, expected `rfa experiment` itself, started once for each "
            "device (CUDA_VISIBLE_DEVICES=0, 1, ...): the processes share the recipe"
        )
    chosen, results = runs.selected(only), runs.results()
    needed = {other.name for run in chosen if run.name not in results for other in runs.needs(run)}
    needed |= {run.name for run in chosen}
    chosen = [run for run in runs.planned if run.name in needed]
    waiting = [run for run in chosen if run.name not in results]
    begun = {name: found for run in waiting for name, found in runs.begun(run).items()}
    if waiting and not other_version:
        _check_versions({**results, **begun}, runs.out)
    outcome, limit = Outcome(), TimeLimit(seconds, progress)
    try:
        runs.prepare([run for run in chosen if run.name in results], waiting, limit)
        recipe, names = runs.recipe, [run.name for run in runs.planned]
        planned = Planned(name=recipe.name, title=recipe.title, runs=names)
        write_planned(runs.out, planned if recipe.kind == "text" else {**planned, "kind": recipe.kind})
        waiting = _make_waiting(runs, waiting, len(chosen), limit, outcome.failed, failure)
        outcome.claimed = tuple(run.name for run in waiting)
    except (OutOfTime, TimeIsUp):
        waiting = [run for run in chosen if run.name not in outcome.failed and runs.finished(run) is None]
        outcome.stopped = limit.where if waiting else None
    left = {*outcome.failed, *(run.name for run in waiting)}
    outcome.done = tuple(run.name for run in chosen if run.name not in left)
    return outcome


def _make_waiting(
    runs: Runs[Any, Any],
    waiting: list[Any],
    total: int,
    limit: TimeLimit,
    failed: dict[str, str],
    failure: Callable[[str, str], None] | None,
) -> list[Any]:
    """Make the waiting runs, and return those that other processes make. A run that fails is among `failed`."""
    going = True
    while waiting and going:
        states: list[str] = []
        for run in waiting:
            limit.where = f"before {run.name}"
            limit.report(Stage("runs"), total - len(waiting) + states.count("done"), total)
            try:
                states.append(_advance(runs, run, limit, failed))
            except (Stopped, TimeIsUp, OSError, torch.AcceleratorError):
                raise
            except Exception as error:  # of any type: the other runs may still succeed
                if os.environ.get("RFA_DEBUG"):
                    raise
                named = isinstance(error, ValueError | RuntimeError)
                failed[run.name] = str(error) if named else f"{type(error).__name__}: {error}"
                if failure is not None:
                    failure(run.name, failed[run.name])
                states.append("done")
        made, elsewhere = "done" in states, "needed runs are made elsewhere" in states
        waiting = [run for run, state in zip(waiting, states, strict=True) if state != "done"]
        waiting = [run for run in waiting if runs.finished(run) is None]
        going = made or elsewhere
        if elsewhere and not made:
            time.sleep(_PAUSE)
    limit.report(Stage("runs"), total - len(waiting), total)
    return waiting


def _advance(
    runs: Runs[Any, Any], run: Any, limit: TimeLimit, failed: Mapping[str, str]
) -> Literal["done", "claimed", "needed runs are made elsewhere"]:
    """Make the runs that a run needs and no other process makes, then the run itself.

    While it waits for another process it holds no lock, so no two processes wait for each other.
    """
    while needed := runs.needs(run):
        if lost := [other.name for other in needed if other.name in failed]:
            raise ValueError(f"needs {lost[0]}, which failed")
        if not all([_claim(runs, other, limit) for other in needed]):
            return "needed runs are made elsewhere"
    return "done" if _claim(runs, run, limit) else "claimed"


def _claim(runs: Runs[Any, Any], run: Any, limit: TimeLimit) -> bool:
    """Make a run unless another process makes it. Whether it is finished."""
    with runs.claimed(run.name) as mine:
        if mine and runs.finished(run) is None:
            runs.make(run, limit)
        return mine


def _check_versions(begun: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Raise `ValueError` if another version or commit of rfa began the folder, by results and run.json of its runs."""
    (here,) = versions_of({"environment": environment()})
    for name, made in begun.items():
        if other := [version for version in versions_of(made) if version != here]:
            raise ValueError(
                f"out: {name} in {out} was made by rfa {other[0]}, this is {here}; expected the same, a new folder, or "
                "--other-version: the results say what made them"
            )
