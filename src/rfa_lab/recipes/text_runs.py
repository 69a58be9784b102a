"""Runs of language models: the trials of a learning rate, training, evaluation and the result.

<out>/runs/<run>/            run folders; records and metrics stay, models stay only if the recipe keeps them
<out>/runs/<model>-rate-<r>/ the same for trials of learning rates, without models
<out>/results/trigram.json   the same evaluation of a trigram, trained on the same tokens
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rfa.progress import Stage
from rfa_lab import evaluation
from rfa_lab.data import PreparedData, prepare
from rfa_lab.evaluation.probes import ProbeKind
from rfa_lab.results import read_result, write_result
from rfa_lab.training import TRAINED_ON, RunFolder, resume, train, trial_step
from rfa_lab.training.callbacks import Diverged

from .rates import possible_rates
from .reading import RecipeError
from .recipe import PlannedRun, Recipe
from .run_result import (
    DIVERGED,
    losses_of,
    make_result,
    needed_trials,
    trial_loss,
    trials_by_run,
    with_best_rate,
)
from .runner import Runs, TimeLimit
from .trigram_result import RecipeTrigram


class TextRuns(Runs[Recipe, PlannedRun]):
    """The runs of a recipe of language models, and the trials that they need."""

    def __init__(self, recipe: Recipe, out: Path):
        super().__init__(recipe, out)
        self.trials = trials_by_run(recipe)

    def folder(self, run: PlannedRun) -> RunFolder:
        """The run folder of a run or a trial."""
        return RunFolder(self.out / "runs" / run.name)

    def finished(self, run: PlannedRun) -> Mapping[str, Any] | None:
        """The result of a run, or the record of a trial; None where it is still to do."""
        if run.trial:
            record = self.record(run)
            return None if record is None or trial_loss(record) is None else record
        path = self.path(run)
        if not path.exists():
            return None
        result, wanted = read_result(path), self.recipe.entry_of(run)
        wanted["spec"] = _comparable(wanted["spec"], run.rates)
        self.check_same(path, {**result, "spec": _comparable(result["spec"], run.rates)}, wanted)
        return result

    def record(self, run: PlannedRun) -> dict[str, Any] | None:
        """The content of run.json of a run or a trial; None if it was not started.

        Raises `ValueError` if it is damaged, or of another specification. A run may have each possible rate.
        """
        folder, rates = self.folder(run), () if run.trial else run.rates
        if not folder.record.exists():
            return None
        record = folder.read()
        if _comparable(record["spec"], rates) != _comparable(self.recipe.resolved(run).to_dict(), rates):
            expected = "expected a new folder for --out"
            raise ValueError(f"run: {folder.path} is another run than {self.recipe.path} names, {expected}")
        return record

    def begun(self, run: PlannedRun) -> Mapping[str, Mapping[str, Any]]:
        """The records of a run and of its trials."""
        records = {unit.name: self.record(unit) for unit in (*self.trials[run.name], run)}
        return {name: record for name, record in records.items() if record is not None}

    def tried(self, run: PlannedRun) -> list[tuple[PlannedRun, Mapping[str, Any] | None]]:
        """The trials that a run needs, as far as is known, and the record of each that is finished."""
        trials = self.trials[run.name]
        records = {trial.spec.learning_rate: record for trial in trials if (record := self.finished(trial)) is not None}
        needed = needed_trials(trials, run.rates, losses_of(records))
        return [(trial, records.get(trial.spec.learning_rate)) for trial in needed]

    def needs(self, run: PlannedRun) -> Sequence[PlannedRun]:
        """The trials that are not finished. A finished run needs none."""
        if self.finished(run) is not None:
            return ()
        return [trial for trial, record in self.tried(run) if record is None]

    def prepare(self, finished: Sequence[PlannedRun], waiting: Sequence[PlannedRun], limit: TimeLimit) -> None:
        """Check the text, make a step of each model on this machine, and make the trigram of the text."""
        trials = [trial for run in waiting for trial, record in self.tried(run) if record is not None]
        for run in (*trials, *(() if self.recipe.keep_models else finished)):  # a process may have been killed before
            _delete_weights(self.folder(run))
        trigram = RecipeTrigram(self.recipe, self.out)
        if waiting or trigram.is_missing():
            text = self._check_text(waiting, limit)
            self._check_machine(waiting, limit)
            if trigram.is_missing() or trigram.is_of_another_text(text):
                with self.claimed(trigram.path.stem) as mine:  # the other processes begin to train
                    if mine:
                        trigram.write(text)

    def make(self, run: PlannedRun, limit: TimeLimit) -> None:
        """Train or resume a run, evaluate it, write the result, and delete the model unless the recipe keeps it.

        A trial has no result; its record has the validation loss. A record keeps that training diverged too: a later
        call says so again, instead of coming to the same step.
        """
        trials = () if run.trial else self.tried(run)
        tried = {trial.spec.learning_rate: record for trial, record in trials if record is not None}
        if tried:
            run = with_best_rate(run, losses_of(tried))
            self._check_rate(run)
        folder, begun = self.folder(run), self.record(run)
        if begun is not None and DIVERGED in begun:
            raise Diverged(begun[DIVERGED])
        try:
            record = self._trained(run, begun, limit)
        except Diverged as error:
            said = str(error) if run.trial else f"{error}; delete {folder.path} to make the run again"
            folder.write({**folder.read(), DIVERGED: said})
            if not run.trial:
                raise Diverged(said) from error
        if not run.trial:
            evaluated = self._evaluated(run, limit)
            write_result(self.path(run), make_result(self.recipe, run, folder, record, evaluated, tried))
            _delete_parts(folder)
        if run.trial or not self.recipe.keep_models:
            _delete_weights(folder)

    def _evaluated(self, run: PlannedRun, limit: TimeLimit) -> dict[str, Any]:
        """What `rfa_lab.evaluation.full_evaluation` returns.

        Under a time limit it is made in parts that are kept, so that it ends after several calls. Then the result has
        the "environments" in which they were made. Without a limit the run is loaded once, unless there are parts.
        """
        folder, asked = self.folder(run), self.recipe.asked_of(run)
        maps = self.path(run).with_name(f"{run.name}.attention.npz")

        def progress(stage: Stage, done: int, total: int) -> None:
            limit.report(stage._replace(run=run.name), done, total)

        def evaluated(part: Mapping[str, Any]) -> dict[str, Any]:
            attention = maps if part["attention"] else None
            return evaluation.full_evaluation(folder.path, **{**part, "attention": attention}, progress=progress)

        if limit.until is None and not (folder.path / _PARTS).is_dir():
            return evaluated(asked)
        whole: dict[str, Any] = {"evaluations": {}, "environments": []}
        for name, part in _parts(asked):
            path = folder.path / _PARTS / f"{name}.json"
            found = _stored_part(path, part)
            if found is None or (part["attention"] and not maps.is_file()):
                found = evaluated(part)
                write_result(path, {"asked": part, "found": found})
            whole["evaluations"] |= found.pop("evaluations")
            whole["environments"].append(found["environment"])
            whole |= {entry: value for entry, value in found.items() if value is not None or entry not in whole}
        return whole

    def _check_rate(self, chosen: PlannedRun) -> None:
        """Raise `ValueError` if one of a model's runs has another rate: means over seeds would be of two models."""
        rate = chosen.spec.learning_rate
        for run in self.planned:
            if self.trials[run.name] != self.trials[chosen.name]:
                continue
            made = self.finished(run) or self.record(run)
            if made is not None and (found := made["spec"]["learning_rate"]) != rate:
                raise ValueError(
                    f"rates: got {run.name} in {self.out} with {found:g}, but the trials of its model choose {rate:g}; "
                    "expected one rate for all its runs: delete its folder and its result, and it is made again"
                )

    def _trained(self, run: PlannedRun, begun: Mapping[str, Any] | None, limit: TimeLimit) -> dict[str, Any]:
        """Train or resume a run or a trial, and return its record."""

        def training(step: int, steps: int, metrics: dict[str, float]) -> None:
            limit.show(Stage("training", run.name, metrics), step, steps)

        folder, spec = self.folder(run), self.recipe.resolved(run)
        bars: dict[str, Any] = {"progress": training, "data_progress": partial(limit.report, Stage("text", run.name))}
        bars["until"] = limit.until
        if begun is None or self.is_lost(run, begun):
            _delete_parts(folder)
            return train(spec, folder.path, overwrite=begun is not None, **bars)
        wanted = spec.with_absolute_paths().to_dict()
        if begun["spec"] != wanted:  # started in another checkout, whose text may be gone
            folder.write({**begun, "spec": wanted})
        return resume(folder.path, **bars)

    def is_lost(self, run: PlannedRun, record: Mapping[str, Any]) -> bool:
        """Whether a trained run has lost its model, so that it cannot be evaluated. It has no result then either."""
        return bool(record["finished"]) and not self.folder(run).model.is_dir()

    def _check_text(self, waiting: Sequence[PlannedRun], limit: TimeLimit) -> PreparedData:
        """The text that all runs share. Raises `RecipeError` with everything that it is too short for.

        Raises `ValueError` if a run that was begun has another text.
        """
        spec, plan = self.recipe.resolved((*waiting, self.recipe.runs[0])[0]), self.recipe.evaluation
        text = prepare(spec.data, spec.tokenizer, spec.split_by, progress=partial(limit.report, Stage("text")))
        read = text.fingerprint_of(*TRAINED_ON), text.fingerprints["test"]
        begun = {name: record for run in waiting for name, record in self.begun(run).items()}
        for name, made in {**self.results(), **begun}.items():
            if (made["data"]["fingerprint"], made["data"]["test_fingerprint"]) != read:
                raise ValueError(
                    f"data: {name} was made on another text than {spec.data} holds now, expected a new --out"
                )
        faults = []
        for split, least in (("train", spec.batch_size), ("valid", 1)):
            if (blocks := len(text.streams[split]) // spec.length) < least:
                expected = f"at least {least} of {spec.length} tokens"
                faults.append(f"training: data: got {blocks} blocks in the {split} split, expected {expected}")
        longest, stream = max(plan.lengths), text.streams["test"]
        if longest > len(stream):
            expected = f"at most the {len(stream)} tokens of the test split"
            faults.append(f"evaluation: lengths: got {longest}, expected {expected}")
        for kind in get_args(ProbeKind) if plan.passkey else ():
            try:
                evaluation.probe_layout(kind, stream, spec.length, longest, text.tokenizer)
            except ValueError as error:
                faults.append(f"evaluation: passkey: {error}")
        if plan.attention and (mapped := evaluation.MAP_LENGTHS * spec.length) > len(stream):
            expected = f"at least {mapped} tokens, {evaluation.MAP_LENGTHS} training lengths"
            faults.append(f"evaluation: attention: got a test split of {len(stream)} tokens, expected {expected}")
        if faults:
            raise RecipeError(self.recipe.path, dict.fromkeys(faults))
        return text

    def _check_machine(self, waiting: Sequence[PlannedRun], limit: TimeLimit) -> None:
        """Make a step of each model, and raise `RecipeError` with all models that cannot run here."""
        faults: dict[str, str] = {}
        models = list({(run.spec.preset, repr(run.spec.model)): run for run in waiting}.values())
        for done, run in enumerate(models):
            limit.report(Stage("trial_steps"), done, len(models))
            try:
                trial_step(run.spec)
            except Exception as error:  # compilers raise exceptions of their own
                said = f"cannot make a step on this machine: {type(error).__name__}: {error}"
                faults.setdefault(said, f"{run.name}: {said}")
        limit.report(Stage("trial_steps"), len(models), len(models))
        if faults:
            raise RecipeError(self.recipe.path, faults.values())


def _delete_weights(folder: RunFolder) -> None:
    """Delete the model and the checkpoints, which are large. Record, metrics and tokenizer stay."""
    for path in (folder.model, folder.checkpoints):
        shutil.rmtree(path, ignore_errors=True)


def _delete_parts(folder: RunFolder) -> None:
    """Delete the parts of an evaluation: the result is written, or the run is trained anew."""
    shutil.rmtree(folder.path / _PARTS, ignore_errors=True)


def _comparable(spec: Mapping[str, Any], rates: Sequence[float]) -> dict[str, Any]:
    """A specification with names instead of paths, and without a learning rate that may be chosen from `rates`.

    Another checkout can have its data in other folders. `gutenberg:novels` and a folder `novels` have the same name: a
    check of the text's fingerprint tells them apart.
    """
    tokenizer = "gpt2" if spec["tokenizer"].startswith("gpt2:") else spec["tokenizer"]
    named = {**spec, "data": Path(spec["data"]).name.removeprefix("gutenberg:"), "tokenizer": tokenizer}
    return named | ({"learning_rate": "chosen"} if spec.get("learning_rate") in possible_rates(rates) else {})


_PARTS = "evaluation"  # the folder of the parts of an evaluation


def _parts(asked: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the arguments of each part. The loss by position comes with `blocks`, which computes it anyway."""
    nothing = {**asked, "protocols": {}, "by_position": False, "passkey": False, "attention": False}
    for protocol, tokens in asked["protocols"].items():
        with_positions = asked["by_position"] and protocol == "blocks"
        yield protocol, {**nothing, "protocols": {protocol: tokens}, "by_position": with_positions}
    for name in ("by_position", "passkey", "attention"):
        if asked[name] and not (name == "by_position" and "blocks" in asked["protocols"]):
            yield name, {**nothing, name: True}


def _stored_part(path: Path, part: Mapping[str, Any]) -> dict[str, Any] | None:
    """A part that was evaluated before; None if there is none, one of other arguments, or a damaged one."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        # older parts name the file of maps, or have None
        asked = {**stored["asked"], "attention": bool(stored["asked"]["attention"])}
        return dict(stored["found"]) if asked == part else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
