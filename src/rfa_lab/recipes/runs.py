"""The runs of a recipe: trials of learning rates, training, evaluation and the result. Each run is made once. The demo.

<out>/runs/<run>/            run folders; records and metrics stay, models stay only if the recipe keeps them
<out>/runs/<model>-rate-<r>/ the same for trials of learning rates, without models
<out>/results/<run>.parquet  the rows of each finished run (`rfa_lab.record`), whole, and <run>.npz with attention maps
<out>/recipe.json            the recipe's name, title and runs, so that a report can name missing runs
<out>/.claims/<run>.lock     locked by the process that makes the run, until that process ends
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from rfa.checks import require
from rfa.environment import environment
from rfa.files import held, write_text_whole
from rfa.forecasting.figure import save
from rfa.progress import Stage, StageProgress
from rfa_lab import evaluation
from rfa_lab.data import prepare
from rfa_lab.record import PLANNED, measurements, read_record, read_rows, run_rows, run_settings, write_rows
from rfa_lab.report.figures import demo_figure
from rfa_lab.training import TRAINED_ON, RunFolder, Stopped, resume, train
from rfa_lab.training.callbacks import Diverged, read_metrics

from .rates import DIVERGED, needed_rates, possible_rates, trial_loss, trials_by_run, with_best_rate
from .recipe import PlannedRun, Recipe, RecipeError, load_recipe


class Runs:
    """The runs of a recipe in a folder, and the trials of learning rates that they need."""

    def __init__(self, recipe: Recipe, out: Path):
        self.recipe, self.out = recipe, out
        self.trials = trials_by_run(recipe)

    def folder(self, run: PlannedRun) -> RunFolder:
        """The run folder of a run or a trial."""
        return RunFolder(self.out / "runs" / run.name)

    def path(self, run: PlannedRun) -> Path:
        """The path of a run's result."""
        return self.out / "results" / f"{run.name}.parquet"

    def result_of(self, run: PlannedRun) -> Mapping[str, Any] | None:
        """The settings of a finished run, or the run.json of a finished trial; None where it is still to do.

        Raises `ValueError` for a damaged file, or one of other settings.
        """
        if run.trial:
            record = self.record(run)
            return None if record is None or trial_loss(record) is None else record
        path = self.path(run)
        if not path.exists():
            return None
        (found,) = read_rows(path).settings.values()
        wanted = {"recipe": self.recipe.name, "evaluation": self.recipe.evaluation_of(run)}
        wanted["spec"] = _comparable(run.spec.to_dict(), run.rates)
        for name, value in wanted.items():
            given = _comparable(found["spec"], run.rates) if name == "spec" else found.get(name)
            if given != value:
                raise ValueError(
                    f"result: {path} is of another {name} than {self.recipe.path} names: got {given!r}, expected "
                    f"{value!r}; delete it, or choose a new folder"
                )
        return found

    def record(self, run: PlannedRun) -> dict[str, Any] | None:
        """The content of run.json of a run or a trial; None if it was not started.

        Raises `ValueError` if it is damaged, or of another specification. A run may have each possible rate.
        """
        folder, rates = self.folder(run), () if run.trial else run.rates
        if not folder.record.exists():
            return None
        record = folder.read()
        if _comparable(record["spec"], rates) != _comparable(self.recipe.spec_of(run).to_dict(), rates):
            expected = "expected a new folder for --out"
            raise ValueError(f"run: {folder.path} is another run than {self.recipe.path} names, {expected}")
        return record

    def begun_records(self, run: PlannedRun) -> dict[str, dict[str, Any]]:
        """The records of a run and of its trials."""
        records = {unit.name: self.record(unit) for unit in (*self.trials[run.name].values(), run)}
        return {name: record for name, record in records.items() if record is not None}

    def needed_trials(self, run: PlannedRun) -> list[tuple[PlannedRun, Mapping[str, Any] | None]]:
        """The trials that a run needs, as far as is known, and the record of each that is finished."""
        trials = self.trials[run.name]
        records = {rate: record for rate, trial in trials.items() if (record := self.result_of(trial)) is not None}
        losses = {rate: trial_loss(record) or 0.0 for rate, record in records.items()}
        return [(trials[rate], records.get(rate)) for rate in needed_rates(tuple(trials), run.rates, losses)]

    def check_folder(self) -> None:
        """Raise `ValueError` for the folder of another recipe."""
        planned = self.out / PLANNED
        if planned.is_file() and (name := json.loads(planned.read_text(encoding="utf-8"))["name"]) != self.recipe.name:
            raise ValueError(
                f"out: got {self.out}, the folder of the recipe {name}, expected one of {self.recipe.name}"
            )

    def results(self) -> dict[str, Mapping[str, Any]]:
        """The settings of all finished runs by name. Raises `ValueError` for a folder of another recipe."""
        self.check_folder()
        return {run.name: found for run in self.recipe.runs if (found := self.result_of(run)) is not None}

    def runs_named(self, only: Sequence[str]) -> list[PlannedRun]:
        """The runs that are named in `only`, or all if it is empty. `*` in a name matches any text.

        Raises `ValueError` for a name that matches no run.
        """
        names = [run.name for run in self.recipe.runs]
        for pattern in only:
            require(any(fnmatchcase(name, pattern) for name in names), "only", pattern, f"some of {', '.join(names)}")
        return [run for run in self.recipe.runs if not only or any(fnmatchcase(run.name, each) for each in only)]

    def is_lost(self, run: PlannedRun, record: Mapping[str, Any]) -> bool:
        """Whether a trained run has lost its model, so that it cannot be evaluated. It has no result then either."""
        return bool(record["finished"]) and not self.folder(run).model.is_dir()

    # Before the waiting runs

    def check(
        self, waiting: Sequence[PlannedRun], begun: Mapping[str, Mapping[str, Any]], report: StageProgress
    ) -> None:
        """Raise `RecipeError` for a text that is too short for the training or the evaluation.

        Raises `ValueError` if a run that was begun, by its result or its record, has another text.
        """
        spec, plan = self.recipe.spec_of(waiting[0]), self.recipe.evaluation
        text = prepare(spec.data, spec.tokenizer, spec.split_by, progress=partial(report, Stage("text")))
        read = text.fingerprint_of(*TRAINED_ON), text.fingerprints["test"]
        for name, made in begun.items():
            if (made["data"]["fingerprint"], made["data"]["test_fingerprint"]) != read:
                raise ValueError(
                    f"data: {name} was made on another text than {spec.data} holds now, expected a new --out"
                )
        mapped = evaluation.MAP_LENGTHS * spec.length if plan.attention else 0
        needed = {  # the tokens that each split must have, and what for
            "training: data": ("train", spec.batch_size * spec.length),
            "training: data, validation": ("valid", spec.length),
            "evaluation: lengths": ("test", max(plan.lengths)),
            f"evaluation: attention, {evaluation.MAP_LENGTHS} training lengths": ("test", mapped),
        }
        faults = [
            f"{what}: got {len(text.streams[split])} tokens in the {split} split, expected at least {least}"
            for what, (split, least) in needed.items()
            if len(text.streams[split]) < least
        ]
        if faults:
            raise RecipeError(self.recipe.path, faults)

    # One run

    def make(self, run: PlannedRun, report: StageProgress) -> None:
        """Train or resume a run, evaluate it, write the result, and delete the model unless the recipe keeps it.

        A trial has no result; its record has the validation loss. A record keeps that training diverged too: a later
        call says so again, instead of coming to the same step.
        """
        trials = () if run.trial else self.needed_trials(run)
        records = {trial.spec.learning_rate: record for trial, record in trials if record is not None}
        losses = {rate: trial_loss(record) or 0.0 for rate, record in records.items()}
        if losses:
            run = with_best_rate(run, losses)
            self._check_rate(run)
        folder, begun = self.folder(run), self.record(run)
        if begun is not None and DIVERGED in begun:
            raise Diverged(begun[DIVERGED])
        try:
            record = self._train(run, begun, report)
        except Diverged as error:
            said = str(error) if run.trial else f"{error}; delete {folder.path} to make the run again"
            folder.write({**folder.read(), DIVERGED: said})
            if not run.trial:
                raise Diverged(said) from error
        if not run.trial:
            asked = self.recipe.evaluation_of(run)
            maps = self.path(run).with_suffix(".npz") if asked["attention"] else None

            def progress(stage: Stage, done: int, total: int) -> None:
                report(stage._replace(run=run.name), done, total)

            evaluated = evaluation.full_evaluation(folder.path, **{**asked, "attention": maps}, progress=progress)
            settings = run_settings(self.recipe.name, run.spec, record, asked, evaluated)
            settings["trials"] = {f"{rate:g}": loss if math.isfinite(loss) else None for rate, loss in losses.items()}
            settings["versions"] = versions_of(*records.values(), record, {"environment": environment()})
            measured = measurements(evaluated, read_metrics(folder))
            rows = run_rows(run.name, run.label, run.spec.preset, run.spec.seed, settings, measured)
            write_rows(self.path(run), rows)
        if run.trial or not self.recipe.keep_models:
            delete_weights(folder)

    def _check_rate(self, chosen: PlannedRun) -> None:
        """Raise `ValueError` if one of a model's runs has another rate: means over seeds would be of two models."""
        rate = chosen.spec.learning_rate
        for run in self.recipe.runs:
            if self.trials[run.name] != self.trials[chosen.name]:
                continue
            made = self.result_of(run) or self.record(run)
            if made is not None and (found := made["spec"]["learning_rate"]) != rate:
                raise ValueError(
                    f"rates: got {run.name} in {self.out} with {found:g}, but the trials of its model choose {rate:g}; "
                    "expected one rate for all its runs: delete its folder and its result, and it is made again"
                )

    def _train(self, run: PlannedRun, begun: Mapping[str, Any] | None, report: StageProgress) -> dict[str, Any]:
        """Train or resume a run or a trial, and return its record."""

        def training(step: int, steps: int, metrics: dict[str, float]) -> None:
            report(Stage("training", run.name, metrics), step, steps)

        folder, spec = self.folder(run), self.recipe.spec_of(run)
        bars: dict[str, Any] = {"progress": training, "data_progress": partial(report, Stage("text", run.name))}
        if begun is None or self.is_lost(run, begun):
            return train(spec, folder.path, overwrite=begun is not None, **bars)
        wanted = spec.with_absolute_paths().to_dict()
        if begun["spec"] != wanted:  # started in another checkout, whose text may be gone
            folder.write({**begun, "spec": wanted})
        return resume(folder.path, **bars)


def delete_weights(folder: RunFolder) -> None:
    """Delete the model and the checkpoints, which are large. Record, metrics and tokenizer stay."""
    for path in (folder.model, folder.checkpoints):
        shutil.rmtree(path, ignore_errors=True)


def _comparable(spec: Mapping[str, Any], rates: Sequence[float]) -> dict[str, Any]:
    """A specification with names instead of paths, and without a learning rate that may be chosen from `rates`.

    Another checkout can have its data in other folders: a check of the text's fingerprint tells texts apart.
    """
    tokenizer = "gpt2" if spec["tokenizer"].startswith("gpt2:") else spec["tokenizer"]
    named = {**spec, "data": Path(spec["data"]).name, "tokenizer": tokenizer}
    return named | ({"learning_rate": "chosen"} if spec.get("learning_rate") in possible_rates(rates) else {})


# Make them


@dataclass
class Outcome:
    """The outcome of a call in one process.

    Args:
        done: names of runs that have a result.
        claimed: names of runs that other processes are making.
        failed: the error of each failed run, by name.
    """

    done: tuple[str, ...] = ()
    claimed: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)


_SECONDS_BETWEEN_LOOKS = 2.0  # at runs that other processes make


def run_recipe(
    recipe: Recipe,
    out: str | Path,
    *,
    only: Sequence[str] = (),
    other_version: bool = False,
    progress: StageProgress | None = None,
    failure: Callable[[str, str], None] | None = None,
) -> Outcome:
    """Make every run that has no result yet: train or resume it, evaluate it, and write the result.

    Several processes may share a folder. A process skips a run that another one is making, and checks it again later.
    It ends when every run is done, is made by another process, or has failed here. After a failure the other runs are
    still made. A run whose learning rate others choose comes after them.

    Args:
        recipe: the recipe.
        out: the folder.
        only: names of runs, in which `*` matches any text; empty for all runs.
        other_version: go on in a folder that another version or commit of rfa began. Results name all of them.
        progress: called with the stage, the amount done and the total. Stages of the whole call are "runs" (the number
            of runs) and "text". Stages of a run are "text", "training" and those of its evaluation.
        failure: called with the name of a failed run and the reason.

    Raises:
        ValueError: before any run. The reason is an unknown name in `only`, a damaged result or run folder, one of
            another recipe, one of another version without `other_version`, bad data, lengths longer than the test
            split, or processes that were launched to share one run.
        OSError: if the disk is full.
        torch.AcceleratorError: for an error after which this process cannot use the device any more.
        Stopped, KeyboardInterrupt: on Ctrl-C. A run that is being trained is saved first.
    """
    if (launched := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(
            f"processes: got {launched} that share each run, expected `rfa experiment` itself, started once for each "
            "device (CUDA_VISIBLE_DEVICES=0, 1, ...): the processes share the recipe"
        )
    runs = Runs(recipe, Path(out))
    chosen, results = runs.runs_named(only), runs.results()
    waiting = [run for run in chosen if run.name not in results]
    begun = {name: found for run in waiting for name, found in runs.begun_records(run).items()}
    if waiting and not other_version:
        _check_versions({**results, **begun}, runs.out)
    outcome, report = Outcome(), progress or (lambda *_: None)
    for run in chosen:  # a process may have been killed before it deleted them
        trained = [trial for trial, record in runs.needed_trials(run) if record is not None]
        for each in (*trained, *((run,) if run.name in results and not recipe.keep_models else ())):
            delete_weights(runs.folder(each))
    if waiting:
        runs.check(waiting, {**results, **begun}, report)
    planned = {"name": recipe.name, "title": recipe.title, "runs": [run.name for run in recipe.runs]}
    write_text_whole(runs.out / PLANNED, json.dumps(planned, indent=1) + "\n")
    waiting = _make_waiting(runs, waiting, len(chosen), report, outcome.failed, failure)
    outcome.claimed = tuple(run.name for run in waiting)
    left = {*outcome.failed, *(run.name for run in waiting)}
    outcome.done = tuple(run.name for run in chosen if run.name not in left)
    return outcome


def _make_waiting(
    runs: Runs,
    waiting: list[PlannedRun],
    total: int,
    report: StageProgress,
    failed: dict[str, str],
    failure: Callable[[str, str], None] | None,
) -> list[PlannedRun]:
    """Make the waiting runs, and return those that other processes make. A run that fails is among `failed`."""
    going = True
    while waiting and going:
        states: list[str] = []
        for run in waiting:
            report(Stage("runs"), total - len(waiting) + states.count("done"), total)
            try:
                states.append(_advance(runs, run, report))
            except (Stopped, OSError, torch.AcceleratorError):
                raise
            except Exception as error:  # of any type: the other runs may still succeed
                if os.environ.get("RFA_DEBUG"):
                    raise
                named = isinstance(error, ValueError | RuntimeError)
                failed[run.name] = str(error) if named else f"{type(error).__name__}: {error}"
                if failure is not None:
                    failure(run.name, failed[run.name])
                states.append("done")
        made, elsewhere = "done" in states, "trials are made elsewhere" in states
        waiting = [run for run, state in zip(waiting, states, strict=True) if state != "done"]
        waiting = [run for run in waiting if runs.result_of(run) is None]
        going = made or elsewhere
        if elsewhere and not made:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    report(Stage("runs"), total - len(waiting), total)
    return waiting


def _advance(
    runs: Runs, run: PlannedRun, report: StageProgress
) -> Literal["done", "claimed", "trials are made elsewhere"]:
    """Make the trials that a run needs and no other process makes, then the run itself.

    While it waits for another process it holds no lock, so no two processes wait for each other.
    """
    if runs.result_of(run) is None:
        while needed := [trial for trial, record in runs.needed_trials(run) if record is None]:
            if not all([_claim(runs, trial, report) for trial in needed]):
                return "trials are made elsewhere"
    return "done" if _claim(runs, run, report) else "claimed"


def _claim(runs: Runs, run: PlannedRun, report: StageProgress) -> bool:
    """Make a run unless another process makes it. Whether it is finished."""
    with held(runs.out / ".claims" / f"{run.name}.lock") as mine:
        if mine and runs.result_of(run) is None:
            runs.make(run, report)
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


def versions_of(*made: Mapping[str, Any]) -> list[str]:
    """The versions and commits of rfa in words, each once, that made results or what run.json tells of."""
    environments = [one for each in made for one in (each.get("environment", {}), *each.get("resumed", []))]
    named = [f"{one.get('rfa')}{f' {commit}' if (commit := one.get('commit')) else ''}" for one in environments if one]
    return list(dict.fromkeys(named))


# The demo

DEMO = Path(__file__).with_name("demo.yaml")


def run_demo(
    out: str | Path, *, overwrite: bool = False, resume: bool = False, progress: StageProgress | None = None
) -> pd.DataFrame:
    """Make the runs of the recipe `demo.yaml`, and draw `figure.png` of those that are finished, also after Ctrl-C.

    Args:
        out: the folder of the demo, as of `run_recipe`.
        overwrite: make the runs again that are there.
        resume: keep finished runs, and continue a run that was stopped.
        progress: as for `run_recipe`.

    Returns:
        A row for each model: its perplexities by context length, `parameters` and `tokens/s`.

    Raises:
        ValueError: if the folder exists and neither `overwrite` nor `resume` is given, or has other runs or files; or
            if a run failed.
        Stopped: on Ctrl-C, after saving.
    """
    runs = Runs(load_recipe(DEMO), Path(out))
    begun = (runs.out / PLANNED).is_file()
    empty = not runs.out.exists() or (runs.out.is_dir() and not any(runs.out.iterdir()))
    require(begun or empty, "out", f"{out}, which is no demo's folder", "a new or an empty one")
    require(empty or overwrite or resume, "out", f"{out}, which exists", "a new folder, --resume or --overwrite")
    runs.check_folder()
    for run in runs.recipe.runs if overwrite else ():
        runs.folder(run).clear()
        runs.path(run).unlink(missing_ok=True)
    try:
        outcome = run_recipe(runs.recipe, runs.out, other_version=resume, progress=progress)
    finally:
        if any((runs.out / "results").glob("*.parquet")):
            record, _ = read_record(runs.out)
            save(demo_figure(record), runs.out / "figure.png")
    require(not outcome.failed, "demo", "; ".join(map(": ".join, outcome.failed.items())), "no failed run")
    results = np.exp(record.values("loss blocks")).droplevel("seed").loc[[run.label for run in runs.recipe.runs]]
    of_training = {name: record.of(name)[0]["training"] for name in results.index}
    results = results.rename(columns=int).rename_axis("model").reset_index().rename_axis(columns=None)
    results["parameters"] = [each["parameters"] for each in of_training.values()]
    return results.assign(**{"tokens/s": [each["tokens_per_second"] for each in of_training.values()]})
