"""Recipes of recall: small language models learn synthetic tasks, and are tested at the trained length and beyond."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, PlainValidator, ValidationInfo, field_validator, model_validator
from torch import nn

from rfa.models import PRESETS, RFAConfig, RFAForCausalLM, preset
from rfa.nn.dynamics import softplus_inverse
from rfa.progress import Stage, StageProgress
from rfa_lab.data.synthetic import TASKS, SyntheticTask
from rfa_lab.training.callbacks import Diverged
from rfa_lab.training.synthetic import TaskScore, TaskTraining, task_score, train_on_task

from .reading import (
    BaseRecipe,
    Label,
    Lengths,
    Network,
    Section,
    Seeds,
    built,
    check_each,
    check_names,
    checked_fields,
    file_name,
    one_of,
)
from .runner import UnsavedRuns

_OF_A_RUN = ("vocab_size", "train_length")  # fields of a configuration that the task and the training set
_MOST = 100_000
_SIZES = {name: checked_fields(kind) for name, kind in TASKS.items()}


class RecallTask(NamedTuple):
    """A task with a name for readers, and the task of its test, which is the same unless a recipe says otherwise."""

    label: str
    task: SyntheticTask
    tested: SyntheticTask


class _TaskName(Section):
    task: Annotated[str, one_of(TASKS)]
    label: Label = Field(default_factory=lambda given: given.get("task", ""))
    test: dict[str, Any] = Field(default={})


def _task(given: Any) -> RecallTask:
    if not isinstance(given, dict):
        raise ValueError(f"got {given!r:.80}, expected a mapping")
    named = _TaskName.model_validate({name: given[name] for name in _TaskName.model_fields if name in given})
    kind, check = TASKS[named.task], _SIZES[named.task]
    sizes = check({name: value for name, value in given.items() if name not in _TaskName.model_fields})
    found = RecallTask(named.label, kind(**sizes), kind(**{**sizes, **check(named.test)}))
    learnt, tested = found.task.vocabulary, found.tested.vocabulary
    if learnt != tested:
        raise ValueError(f"test: got {tested} tokens, expected {learnt} as in training")
    return found


class RecallModel(Network):
    """A model of the comparison. In a recipe, `model` has the fields of all models too.

    Args:
        one_group: whether the parameters of the SDE are trained as all others.
        learning_rate: its own; None for that of all models.
        start: numbers that all layers learn and that begin elsewhere than the preset's, such as `robustness: 0.8`.
        tasks: the labels of its tasks; None for all.
    """

    preset: Annotated[str, one_of(PRESETS)]
    one_group: bool = False
    learning_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    start: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    tasks: list[str] | None = None

    def config(self, vocabulary: int, length: int) -> RFAConfig:
        """The configuration for a task."""
        if of_a_run := [field for field in _OF_A_RUN if field in self.model]:
            raise ValueError(f"model: {of_a_run[0]}: not here, expected other fields of RFAConfig")
        return preset(self.preset, vocab_size=vocabulary, train_length=length, **self.model)

    def build(self, vocabulary: int, length: int) -> RFAForCausalLM:
        """A new model for a task. Raises `ValueError` for a start of what no layer learns."""
        model = RFAForCausalLM(self.config(vocabulary, length))
        for name, value in self.start.items():
            held = [raw for known, raw in model.named_parameters() if known.endswith(f".raw_{name}")]
            if not held:
                raise ValueError(f"start: {name}: got a name that no layer of {self.preset} learns")
            for raw in held:
                nn.init.constant_(raw, softplus_inverse(torch.tensor(value)).item())
        return model


class RecallEvaluation(Section):
    """The lengths of test sequences, and their number at each length. They are the same for all models and seeds."""

    lengths: Lengths
    sequences: Annotated[int, Field(ge=1, le=_MOST)]


@dataclass(frozen=True)
class RecallRun:
    """A model that learns a task with a seed."""

    task: RecallTask
    model: RecallModel
    seed: int

    @property
    def name(self) -> str:
        """The name of its result file."""
        return f"{file_name(f'{self.task.label} {self.model.label}')}-seed{self.seed}"


class RecallRecipe(BaseRecipe):
    """A recipe that was read and checked.

    Args:
        training: of each model; its seed is the run's.
        evaluation: of each model.
        tasks: that the models learn. The key `test` of a task has what differs in the sequences of its test.
        model: fields of the configuration of all models.
        models: that learn them.
        seeds: of the weights and the sequences.
    """

    kind: Literal["recall"]
    training: Annotated[TaskTraining, built(TaskTraining, "seed", "one_group")]
    evaluation: RecallEvaluation
    tasks: Annotated[list[Annotated[RecallTask, PlainValidator(_task)]], Field(min_length=1)]
    model: dict[str, Any] = Field(default={})
    models: Annotated[list[RecallModel], Field(min_length=1)]
    seeds: Seeds

    @field_validator("tasks")
    @classmethod
    def _fit_in_lengths(cls, tasks: list[RecallTask], info: ValidationInfo) -> list[RecallTask]:
        trained, tested = info.data.get("training"), info.data.get("evaluation")
        lengths = [*([trained.length] if trained else []), *(tested.lengths if tested else [])]

        def check(task: RecallTask) -> None:
            for length in lengths:
                task.task.check_length(length)
                task.tested.check_length(length)

        check_each(enumerate(tasks), check)
        check_names(task.label for task in tasks)
        return tasks

    @field_validator("models")
    @classmethod
    def _whole_models(cls, models: list[RecallModel], info: ValidationInfo) -> list[RecallModel]:
        check_names(model.label for model in models)
        known = [task.label for task in info.data.get("tasks", [])]

        def whole(model: RecallModel) -> RecallModel:
            for label in model.tasks or () if known else ():
                if label not in known:
                    raise ValueError(f"tasks: got {label!r:.80}, expected some of {', '.join(known)}")
            model = model.model_copy(update={"model": {**info.data.get("model", {}), **model.model}})
            model.build(vocabulary=2, length=2)
            return model

        return check_each(enumerate(models), whole)

    @model_validator(mode="after")
    def _different_names(self) -> Self:
        check_names(run.name for run in self.runs)
        return self

    @property
    def runs(self) -> list[RecallRun]:
        """The runs in the order in which they are made: the first seed of all models and tasks first."""
        return [
            RecallRun(task, model, seed)
            for seed in self.seeds
            for task in self.tasks
            for model in self.models
            if model.tasks is None or task.label in model.tasks
        ]

    @classmethod
    def with_data(cls, given: Any, data: str) -> Any:
        """Raises `ValueError`: there are none."""
        raise ValueError(f"data: got {data}, expected none: the sequences of this recipe are drawn")

    def config_of(self, run: RecallRun) -> RFAConfig:
        """The configuration of a run's model."""
        return run.model.config(run.task.task.vocabulary, self.training.length)

    def training_of(self, run: RecallRun) -> TaskTraining:
        """The training of a run."""
        rate = self.training.learning_rate if run.model.learning_rate is None else run.model.learning_rate
        return replace(self.training, seed=run.seed, one_group=run.model.one_group, learning_rate=rate)


_TEST_SEED = 20_260_000  # of the sequences that all models and seeds are tested on


class RecallRuns(UnsavedRuns[RecallRecipe, RecallRun]):
    """The runs of a recipe of recall."""

    form, scores = 1, "tests"

    def spec(self, run: RecallRun) -> dict[str, Any]:
        """All that a result depends on."""
        task, tested, evaluation = run.task.task, run.task.tested, self.recipe.evaluation
        return {
            "task": _entry_of(task),
            **({} if tested == task else {"test": _entry_of(tested)}),
            "preset": run.model.preset,
            "model": run.model.model,
            **({"start": run.model.start} if run.model.start else {}),
            "training": asdict(self.recipe.training_of(run)),
            "lengths": evaluation.lengths,
            "sequences": evaluation.sequences,
        }

    def tests(self) -> dict[str, int]:
        """The lengths of the test."""
        return {str(length): length for length in self.recipe.evaluation.lengths}

    def trained(self, run: RecallRun, report: StageProgress) -> tuple[Callable[[int], Any], dict[str, Any]]:
        """Train a model on its task."""
        recipe, task, training = self.recipe, run.task.task, self.recipe.training_of(run)
        torch.manual_seed(run.seed)
        model = run.model.build(task.vocabulary, training.length)
        curve: dict[int, TaskScore] = {}
        fault = None
        try:
            curve = train_on_task(model, task, training, partial(report, Stage("training", run.name)))
        except Diverged as error:
            fault = str(error)

        def score(length: int) -> dict[str, Any]:
            generator = torch.Generator().manual_seed(_TEST_SEED)
            return _entries(task_score(model, run.task.tested.sample(recipe.evaluation.sequences, length, generator)))

        tokens = training.batch_size * training.length
        return score, {
            "task": run.task.label,
            "label": run.model.label,
            "seed": run.seed,
            "chance": 1 / task.answers,
            "parameters": sum(p.numel() for p in model.parameters()),
            "curve": [{"step": step, "tokens": step * tokens, **_entries(score)} for step, score in curve.items()],
            "fault": fault,
        }


def _entry_of(task: SyntheticTask) -> dict[str, Any]:
    return {"kind": type(task).__name__, **asdict(task)}  # type: ignore[call-overload]


def _entries(score: TaskScore) -> dict[str, Any]:
    """A score for a file. A loss that is not finite is None."""
    return {**score._asdict(), "loss": score.loss if math.isfinite(score.loss) else None}
