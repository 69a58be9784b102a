"""Recipes of recall: small language models compared on synthetic tasks, at the trained length and beyond."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rfa.models import PRESETS, RFAConfig, preset
from rfa_lab.data.synthetic import TASKS, SyntheticTask
from rfa_lab.training.synthetic import TaskTraining

from .reading import Faults, built, check_seeds, read_yaml, repeated, take
from .recipe import NAME

RECALL_KIND = "recall"
_RECIPE = {
    "kind": str, "name": str, "title": str, "model": dict, "training": dict, "tasks": list, "models": list,
    "seeds": list, "evaluation": dict,
}  # fmt: skip
_REQUIRED = ("kind", "name", "training", "tasks", "models", "seeds", "evaluation")
_MODEL = {"label": str, "preset": str, "model": dict, "one_group": bool, "tasks": list}
_EVALUATION = {"lengths": list, "sequences": int}
_OF_A_RUN = ("vocab_size", "train_length")  # fields of a configuration that the task and the training set
_LONGEST, _MOST = 100_000, 100_000


@dataclass(frozen=True)
class RecallTask:
    """A task with a name for readers."""

    label: str
    task: SyntheticTask


@dataclass(frozen=True)
class RecallModel:
    """A model of the comparison.

    Args:
        label: a name for readers.
        preset: one of `PRESETS`.
        model: all fields in which its configuration differs from the preset.
        one_group: whether the parameters of the SDE are trained as all others.
        tasks: the labels of its tasks; None for all.
    """

    label: str
    preset: str
    model: Mapping[str, Any]
    one_group: bool = False
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RecallRun:
    """A model that learns a task with a seed."""

    task: RecallTask
    model: RecallModel
    seed: int

    @property
    def name(self) -> str:
        """The name of its result file."""
        return f"{self.task.label} {self.model.label}".replace(" ", "-") + f"-seed{self.seed}"


@dataclass(frozen=True)
class RecallRecipe:
    """A recipe that was read and checked.

    Args:
        path: of its file.
        name: a short name.
        title: a title for readers.
        training: of each model; its seed is the run's.
        runs: in the order in which they are made: the first seed of all models and tasks first.
        lengths: of the sequences that each model is tested on, ascending.
        sequences: number of test sequences of each length. They are the same for all models and seeds.
    """

    path: Path
    name: str
    title: str
    training: TaskTraining
    runs: tuple[RecallRun, ...]
    lengths: tuple[int, ...]
    sequences: int

    def training_of(self, run: RecallRun) -> TaskTraining:
        """The training of a run."""
        return replace(self.training, seed=run.seed, one_group=run.model.one_group)

    def config_of(self, run: RecallRun) -> RFAConfig:
        """The configuration of a run's model."""
        return _config(run.task, run.model, self.training)


def load_recall_recipe(path: str | Path) -> RecallRecipe:
    """Read a recipe and check all of it.

    Raises:
        RecipeError: with all faults of the recipe.
        OSError: if it cannot be read.
    """
    path, faults = Path(path), Faults(str(path))
    given = take(read_yaml(path), _RECIPE, "recipe", faults, required=_REQUIRED)
    name = given.get("name", "")
    if "name" in given and not NAME.fullmatch(name):
        faults.add("name", f"got {name!r}, expected letters, digits and _.=+-, at most 100")
    training = built(TaskTraining, given.get("training", {}), "training", faults)
    if "seed" in given.get("training", {}):
        faults.add("training", "seed: not here, expected seeds at the top")
    if "one_group" in given.get("training", {}):
        faults.add("training", "one_group: not here, expected at a model")
    lengths, sequences = _evaluation(given.get("evaluation"), faults)
    tasks = [
        _task(entry, f"tasks[{index}]", (training.length, *lengths), faults)
        for index, entry in enumerate(given.get("tasks", []))
    ]
    of_all = given.get("model", {})
    models = [
        _model(entry, f"models[{index}]", of_all, training, faults)
        for index, entry in enumerate(given.get("models", []))
    ]
    for what, found in (("tasks", tasks), ("models", models)):
        labels = [entry.label.replace(" ", "-") for entry in found]
        if what in given and not found:
            faults.add(what, f"got no {what}, expected at least one")
        for label in repeated(labels):
            faults.add(what, f"{label}: named {labels.count(label)} times, expected once (a label tells them apart)")
    known = [task.label for task in tasks]
    for index, model in enumerate(models):
        for label in model.tasks or ():
            if label not in known:
                faults.add(f"models[{index}]", f"tasks: got {label!r:.80}, expected some of {', '.join(known)}")
    seeds = given.get("seeds", [])
    check_seeds(seeds, faults)
    faults.raise_if_any()
    runs = tuple(
        RecallRun(task, model, seed)
        for seed in seeds
        for task in tasks
        for model in models
        if model.tasks is None or task.label in model.tasks
    )
    for twice in repeated([run.name for run in runs]):
        faults.add("models", f"{twice}: the name of two runs, expected labels that tell tasks with models apart")
    faults.raise_if_any()
    return RecallRecipe(path, name, given.get("title", name), training, runs, lengths, sequences)


def _evaluation(given: Any, faults: Faults) -> tuple[tuple[int, ...], int]:
    """The lengths and the number of sequences of a test."""
    if given is None:
        return (), 0
    taken = take(given, _EVALUATION, "evaluation", faults, required=tuple(_EVALUATION))
    lengths, sequences = taken.get("lengths", []), taken.get("sequences", _MOST)
    whole = all(type(length) is int and 2 <= length <= _LONGEST for length in lengths)
    if "lengths" in taken and not (whole and lengths and len(set(lengths)) == len(lengths)):
        faults.add("evaluation", f"lengths: got {lengths!r:.80}, expected different whole numbers, 2 to {_LONGEST:,}")
        lengths = []
    if isinstance(sequences, bool) or not 1 <= sequences <= _MOST:
        faults.add("evaluation", f"sequences: got {sequences}, expected 1 to {_MOST:,}")
    return tuple(sorted(lengths)), sequences


def _label(label: Any, where: str, faults: Faults) -> str:
    if isinstance(label, str) and NAME.fullmatch(label.replace(" ", "-")):
        return label
    faults.add(where, f"label: got {label!r:.80}, expected letters, digits, spaces and _.=+-, at most 100")
    return ""


def _task(entry: Any, where: str, lengths: tuple[int, ...], faults: Faults) -> RecallTask:
    fields = dict(entry) if isinstance(entry, dict) else {}
    kind = fields.pop("task", None)
    label = _label(fields.pop("label", kind), where, faults)
    if not isinstance(kind, str) or kind not in TASKS:
        faults.add(where, f"task: got {kind!r:.80}, expected one of {', '.join(TASKS)}")
        return RecallTask(label, TASKS["recall"]())
    before = len(faults)
    task: SyntheticTask = built(TASKS[kind], fields, where, faults)
    for length in lengths if len(faults) == before else ():
        try:
            task.check_length(length)
        except ValueError as error:
            faults.add(where, str(error))
    return RecallTask(label, task)


def _model(entry: Any, where: str, of_all: Mapping[str, Any], training: TaskTraining, faults: Faults) -> RecallModel:
    given = take(entry, _MODEL, where, faults, required=("preset",))
    name = given.get("preset", "")
    fields = {**of_all, **given.get("model", {})}
    label, tasks = _label(given.get("label", name), where, faults), given.get("tasks")
    chosen = None if tasks is None else tuple(tasks)
    model = RecallModel(label, name, fields, given.get("one_group", False), chosen)
    if "preset" in given and name not in PRESETS:
        faults.add(where, f"preset: got {name!r}, expected one of those that `rfa doctor` lists")
    for field in (*_OF_A_RUN, *(field for field in fields if not isinstance(field, str))):
        if field in fields:
            faults.add(where, f"model: {field}: not here, expected other fields of RFAConfig")
            return model
    if name in PRESETS:
        try:
            _config(RecallTask("recall", TASKS["recall"]()), model, training)
        except (ValueError, TypeError) as error:
            faults.add(where, f"model: {str(error).splitlines()[0]}")
    return model


def _config(task: RecallTask, model: RecallModel, training: TaskTraining) -> RFAConfig:
    return preset(model.preset, vocab_size=task.task.vocabulary, train_length=training.length, **model.model)
