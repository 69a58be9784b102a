"""Recipes of language models on text: YAML, whose faults are reported all at once; the runs, and their evaluation."""

from rfa.checks import needs

needs("pydantic", "yaml")

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)

from rfa.models import PRESETS
from rfa_lab.data import is_path
from rfa_lab.record import PROTOCOLS
from rfa_lab.training import TrainingSpec


class RecipeError(ValueError):
    """All faults of a recipe, one a line."""

    def __init__(self, path: Path, faults: Iterable[str]):
        super().__init__("\n".join(f"{path}: {' '.join(fault.split())}" for fault in faults))


_MAX_CHARACTERS = 100_000  # a recipe of the repository has at most 9,000 characters


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 3e-3 as a number and refuses a repeated key, and aliases that expand without end."""

    def construct_document(self, node):
        _check_size(node, {})
        return super().construct_document(node)

    def construct_mapping(self, node, deep=False):
        seen = set()
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, f"line {node.start_mark.line + 1}: expected a mapping")
        for key_node in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key_node.value in seen:
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f"line {line}: {key_node.value!r} stands twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _check_size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """The characters and nodes that a node expands to. Raises for too many: a few aliases of aliases make millions."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # for an alias of itself, within itself
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        within = (1 if isinstance(node, yaml.ScalarNode) else _check_size(part, sizes) for part in parts)
        sizes[id(node)] = 1 + sum(within)
    if sizes[id(node)] > _MAX_CHARACTERS:
        line, expected = node.start_mark.line + 1, f"at most {_MAX_CHARACTERS:,} characters with all aliases expanded"
        raise yaml.constructor.ConstructorError(
            None, None, f"line {line}: got {sizes[id(node)]:,}, expected {expected}"
        )
    return sizes[id(node)]


_Loader.add_implicit_resolver(  # YAML 1.1 requires a point and a sign in such numbers, YAML 1.2 does not
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> Any:
    """What a file of YAML holds. Raises `RecipeError` for another file."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date or number
        raise RecipeError(path, [f"no YAML: {error}"]) from error


# Faults, which pydantic collects

_EXPECTED = {"string_pattern_mismatch": "letters, digits and _.=+-, at most 100", "too_short": "at least one"}


def fault_lines(error: ValidationError, keys: Mapping[str, Iterable[str]]) -> list[str]:
    """The faults that pydantic found, each with its place. A fault in several places is reported once, at the first.

    `keys` has the known keys of each section, those of the recipe itself under "".
    """
    places: dict[str, str] = {}
    for each in error.errors(include_url=False):
        at, kind = [*each["loc"]], each["type"]
        if kind == "default_factory_not_called":  # what it depends on has a fault itself
            continue
        if kind == "value_error":
            said = str(each["ctx"]["error"]).partition("\n")[0]
        elif kind == "missing":
            said = kind
        elif kind == "extra_forbidden":
            said = f"unknown key, expected some of {', '.join(keys[str(at[0]) if len(at) > 1 else ''])}"
        else:
            expected = _EXPECTED.get(kind, each["msg"].removeprefix("Input should be "))
            said = f"got {each['input']!r:.80}, expected {expected}"
        if at and isinstance(at[-1], str) and said.startswith(("got ", "missing", "unknown key")):
            said = f"{at.pop()}: {said}"
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at)
        places.setdefault(said, where.removeprefix(".") or "recipe")
    return [f"{where}: {said}" for said, where in places.items()]


class Section(BaseModel):
    """A mapping of a recipe. Unknown keys and values of other types are faults."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="forbid")


def checked_fields(kind: type, *without: str) -> Callable[[Any], dict[str, Any]]:
    """A check of a mapping against the fields of a dataclass, without some; it returns what was given."""
    hints = get_type_hints(kind)
    known: dict[str, Any] = {each.name: (hints[each.name], None) for each in fields(kind) if each.name not in without}
    section = create_model(kind.__name__, __base__=Section, **known)

    def check(given: Any) -> dict[str, Any]:
        section.model_validate(given)
        return dict(given)  # 30 stays 30 in results, where a field is a float

    return check


# Values and names in recipes


def check_distinct(values: Sequence[Any]) -> Any:
    """Return the values. Raises `ValueError` for one that occurs twice."""
    if twice := [value for index, value in enumerate(values) if value in values[:index]]:
        raise ValueError(f"got {twice[0]!r:.80} twice in {values!r:.80}, expected each once")
    return values


def one_of(names: Collection[str]) -> AfterValidator:
    """Validates text as one of some names."""

    def check(name: str) -> str:
        if name in names:
            return name
        raise ValueError(f"got {name!r:.80}, expected one of {', '.join(names)}")

    return AfterValidator(check)


_AT_LEAST_ONE, _DISTINCT = Field(min_length=1), AfterValidator(check_distinct)
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.=+-]{0,99}$")]  # it becomes part of file names
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.=+ -]{0,99}$")]  # files have - in the place of spaces
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], _AT_LEAST_ONE, _DISTINCT]
Rates = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], _AT_LEAST_ONE, _DISTINCT]
Lengths = Annotated[list[Annotated[int, Field(ge=2)]], _AT_LEAST_ONE, _DISTINCT, AfterValidator(sorted)]


# A recipe and its runs


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
        return f"{self.label.replace(' ', '-')}-{f'rate-{rate}' if self.trial else f'seed{self.spec.seed}'}"


class EvaluationPlan(Section):
    """The evaluation of each run.

    Args:
        lengths: context lengths in tokens, ascending.
        protocols: the number of tokens of the test split that each protocol scores, spread evenly; None for all.
        attention: presets whose first run without a label also gets attention maps.
    """

    lengths: Lengths
    protocols: Annotated[dict[Annotated[str, one_of(PROTOCOLS)], int | None], _AT_LEAST_ONE]
    attention: Annotated[list[str], _DISTINCT] = Field(default=[])

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

    presets: Annotated[list[Annotated[str, one_of(PRESETS)]], _AT_LEAST_ONE, _DISTINCT]
    seeds: Seeds
    model: dict[str, Any] = Field(default={})
    label: Label = ""
    one_group: bool = False
    max_steps: int = 0
    rates: Rates = Field(default=[])

    def runs(self, training: dict[str, Any], rates: list[float]) -> list[PlannedRun]:
        """All presets with the first seed, then all with the next seed."""
        own = self.rates if rates else _check_one_place(self.rates, training)
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


def _check_one_place(rates: list[float], training: dict[str, Any]) -> list[float]:
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
    _path: Path = PrivateAttr(Path())

    @property
    def path(self) -> Path:
        """The recipe's file."""
        return self._path

    @field_validator("rates")
    @classmethod
    def _rates_in_one_place(cls, rates: list[float], info: ValidationInfo) -> list[float]:
        return _check_one_place(rates, info.data.get("training", {}))

    @field_validator("runs", mode="plain")
    @classmethod
    def _planned_runs(cls, given: Any, info: ValidationInfo) -> tuple[PlannedRun, ...]:
        training, rates = info.data.get("training"), info.data.get("rates")

        def planned(entry: _Entry) -> list[PlannedRun]:
            return [] if training is None or rates is None else entry.runs(training, rates)

        entries = list[Annotated[_Entry, AfterValidator(planned)]]  # faults of all entries come at once
        checked = TypeAdapter(Annotated[entries, Field(min_length=1)]).validate_python(given)
        runs = [run for of_entry in cast(list[list[PlannedRun]], checked) for run in of_entry]
        names = [run.name for run in runs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"{twice[0]}: named {names.count(twice[0])} times, expected once (a label tells them apart)"
            )
        return tuple(runs)

    @field_validator("evaluation")
    @classmethod
    def _maps_of_runs(cls, plan: EvaluationPlan, info: ValidationInfo) -> EvaluationPlan:
        labels = {run.label for run in info.data.get("runs", ())}
        if labels and (other := [preset for preset in plan.attention if preset not in labels]):
            raise ValueError(f"attention: got {other[0]!r}, expected presets of the runs, those without a label")
        return plan

    def evaluation_of(self, run: PlannedRun) -> dict[str, Any]:
        """The evaluation that the recipe asks of a run, in the form in which the result records it."""
        preset = run.spec.preset
        first = next((other for other in self.runs if other.label == preset), None)
        attention = first is not None and run.name == first.name and preset in self.evaluation.attention
        return {**self.evaluation.model_dump(), "attention": attention}

    def spec_of(self, run: PlannedRun) -> TrainingSpec:
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
        data: a corpus, or a file or folder from the working folder, that replaces the recipe's.

    Raises:
        RecipeError: with all faults of the recipe.
        OSError: if it cannot be read.
    """
    path = Path(path)
    given = read_yaml(path)
    if data is not None and isinstance(given, dict) and isinstance(given.get("training"), dict):
        given["training"]["data"] = str(Path(data).resolve()) if is_path(data) else data
    try:
        recipe = Recipe.model_validate(given)
    except ValidationError as error:
        raise RecipeError(path, fault_lines(error, _KEYS)) from None
    recipe._path = path
    return recipe
