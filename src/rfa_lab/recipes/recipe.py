"""Recipes of language models on text: the runs, their training and their evaluation."""

from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from rfa.models import PRESETS
from rfa_lab.data import is_path
from rfa_lab.evaluation import PROTOCOLS
from rfa_lab.training import TrainingSpec

from .reading import (
    Label,
    Lengths,
    Name,
    Rates,
    RecipeError,
    Section,
    Seeds,
    check_names,
    checked_fields,
    different,
    fault_lines,
    file_name,
    one_of,
    read_yaml,
)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a recipe.

    Args:
        spec: as written in the recipe; its paths are relative to the recipe's folder.
        suffix: distinguishes the run from other runs of the same preset.
        trial: whether it is a trial of its learning rate (`rates.py`), which has no result itself.
        rates: learning rates that its model tries, to take the best; at most one where there is no choice.
    """

    spec: TrainingSpec
    suffix: str = ""
    trial: bool = False
    rates: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """The label that all seeds of this model share."""
        return f"{self.spec.preset} {self.suffix}".strip()

    @property
    def name(self) -> str:
        """The name of its run folder and its result."""
        rate = f"{Decimal(repr(self.spec.learning_rate)).normalize():e}"
        return f"{file_name(self.label)}-{f'rate-{rate}' if self.trial else f'seed{self.spec.seed}'}"


class EvaluationPlan(Section):
    """The evaluation of each run.

    Args:
        lengths: context lengths in tokens, ascending.
        protocols: the number of tokens of the test split that each protocol scores, spread evenly; None for all.
        by_position: also compute the loss at each position.
        attention: presets whose first run without a label also gets attention maps.
    """

    lengths: Lengths
    protocols: Annotated[dict[Annotated[str, one_of(PROTOCOLS)], int | None], Field(min_length=1)]
    by_position: bool = False
    attention: Annotated[list[str], AfterValidator(different)] = Field(default=[])

    @field_validator("protocols")
    @classmethod
    def _enough_tokens(cls, protocols: dict[str, int | None], info: ValidationInfo) -> dict[str, int | None]:
        longest = max(info.data.get("lengths", [2]))
        for protocol, tokens in protocols.items():
            if tokens is not None and tokens < longest:
                least = f"null or a number of tokens of at least {longest}, the longest context"
                raise ValueError(f"got {tokens} for {protocol}, expected {least}")
        return protocols


class _Entry(Section):
    """An entry of the section `runs`: presets and seeds, with what differs from the recipe's training."""

    presets: Annotated[list[Annotated[str, one_of(PRESETS)]], Field(min_length=1), AfterValidator(different)]
    seeds: Seeds
    model: dict[str, Any] = Field(default={})
    label: Label = ""
    one_group: bool = False
    max_steps: int = 0
    rates: Rates = Field(default=[])

    def runs(self, training: dict[str, Any], rates: list[float]) -> list[PlannedRun]:
        """All presets with the first seed, then all with the next seed."""
        own = self.rates if rates else _alone(self.rates, training)
        rates = own or rates
        changes: dict[str, Any] = {"learning_rate": rates[0]} if rates else {}  # of several, each model takes its best
        changes |= {name: getattr(self, name) for name in ("one_group", "max_steps") if name in self.model_fields_set}
        training = {**training, **changes, "model": {**training.get("model", {}), **self.model}}
        specs = [TrainingSpec(preset, **training, seed=self.seeds[0]) for preset in self.presets]
        return [
            PlannedRun(replace(spec, seed=seed), self.label, rates=tuple(rates))
            for seed in self.seeds
            for spec in specs
        ]


def _alone(rates: list[float], training: dict[str, Any]) -> list[float]:
    if rates and "learning_rate" in training:
        raise ValueError("learning_rate: not in training, expected rates alone")
    return rates


def _check_training(training: dict[str, Any]) -> dict[str, Any]:
    TrainingSpec("m2-sc-rfa", **{**training, "model": {}})  # without the model: its preset is another one
    return training


class Recipe(Section):
    """A recipe that was read and checked.

    Args:
        name: a short name, which becomes part of file names.
        title: a title for readers.
        training: fields of `TrainingSpec` that all runs share.
        rates: learning rates that each model tries, to take the best.
        runs: in the order in which they are made.
        evaluation: of each run.
        keep_models: keep the checkpoints and the model of a run after its result is written.
        train_tokens: about the number of tokens of the training split, for `rfa experiment --dry-run` before the text
            is read; None if it is not known.
    """

    name: Name
    title: str = Field(default_factory=lambda given: given.get("name", ""))
    training: Annotated[
        dict[str, Any],
        BeforeValidator(checked_fields(TrainingSpec, "preset", "seed")),
        AfterValidator(_check_training),
    ]
    rates: Rates = Field(default=[])
    runs: tuple[PlannedRun, ...]
    evaluation: EvaluationPlan
    keep_models: bool = False
    train_tokens: Annotated[int, Field(ge=1)] | None = None
    _path: Path = PrivateAttr(Path())

    @property
    def path(self) -> Path:
        """The recipe's file."""
        return self._path

    @field_validator("rates")
    @classmethod
    def _one_place(cls, rates: list[float], info: ValidationInfo) -> list[float]:
        return _alone(rates, info.data.get("training", {}))

    @field_validator("runs", mode="plain")
    @classmethod
    def _planned(cls, given: Any, info: ValidationInfo) -> tuple[PlannedRun, ...]:
        training, rates = info.data.get("training"), info.data.get("rates")

        def planned(entry: _Entry) -> list[PlannedRun]:
            return [] if training is None or rates is None else entry.runs(training, rates)

        entries = list[Annotated[_Entry, AfterValidator(planned)]]  # faults of all entries come at once
        checked = TypeAdapter(Annotated[entries, Field(min_length=1)]).validate_python(given)
        runs = [run for of_entry in cast(list[list[PlannedRun]], checked) for run in of_entry]
        check_names(run.name for run in runs)
        return tuple(runs)

    @field_validator("evaluation")
    @classmethod
    def _maps_of_runs(cls, plan: EvaluationPlan, info: ValidationInfo) -> EvaluationPlan:
        labels = {run.label for run in info.data.get("runs", ())}
        if labels and (other := [preset for preset in plan.attention if preset not in labels]):
            raise ValueError(f"attention: got {other[0]!r}, expected presets of the runs, those without a label")
        return plan

    @classmethod
    def with_data(cls, given: Any, data: str) -> Any:
        """With another corpus, file or folder, whose path is relative to the working folder, and whose size is open."""
        training = given.get("training") if isinstance(given, dict) else None
        path = str(Path(data).resolve()) if is_path(data) else data
        if not isinstance(training, dict):
            return given
        kept = {name: value for name, value in given.items() if name != "train_tokens" or data == training.get("data")}
        return {**kept, "training": {**training, "data": path}}

    def asked_of(self, run: PlannedRun) -> dict[str, Any]:
        """The evaluation that the recipe asks of a run, in the form in which the result records it."""
        preset = run.spec.preset
        first = next((other for other in self.runs if other.label == preset), None)
        attention = first is not None and run.name == first.name and preset in self.evaluation.attention
        return {**self.evaluation.model_dump(), "attention": attention}

    def resolved(self, run: PlannedRun) -> TrainingSpec:
        """The specification of a run with absolute paths."""
        folder, spec = self.path.resolve().parent, run.spec
        form, _, vocabulary = spec.tokenizer.partition(":")
        if form == "gpt2" and vocabulary:
            spec = replace(spec, tokenizer=f"gpt2:{(folder / vocabulary).resolve()}")
        return replace(spec, data=str((folder / spec.data).resolve())) if is_path(spec.data) else spec


_KEYS = {
    "": list(Recipe.model_fields),
    "training": [each.name for each in fields(TrainingSpec) if each.name not in ("preset", "seed")],
    "runs": list(_Entry.model_fields),
    "evaluation": list(EvaluationPlan.model_fields),
}


def load_recipe(path: str | Path, data: str | None = None) -> Recipe:
    """Read a recipe and check all of it.

    Args:
        path: of a YAML file, as in `recipes/`.
        data: a corpus, file or folder that replaces the recipe's.

    Raises:
        RecipeError: with all faults of the recipe.
        OSError: if it cannot be read.
    """
    path = Path(path)
    given = read_yaml(path)
    try:
        recipe = Recipe.model_validate(given if data is None else Recipe.with_data(given, data))
    except ValidationError as error:
        raise RecipeError(path, fault_lines(error, _KEYS)) from None
    recipe._path = path
    return recipe
