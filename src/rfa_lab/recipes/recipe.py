"""Recipes: the models, the training and the evaluation of a table, as frozen values read from YAML."""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from rfa.models import PRESETS
from rfa_lab.data import is_path
from rfa_lab.evaluation import PROTOCOLS
from rfa_lab.training import TrainingSpec

from .reading import Faults, check_rates, read_yaml, repeated, take

_RECIPE = {
    "name": str, "title": str, "training": dict, "rates": list, "runs": list, "evaluation": dict, "keep_models": bool,
    "train_tokens": int,
}  # fmt: skip
_RUNS = {
    "presets": list,
    "seeds": list,
    "model": dict,
    "label": str,
    "one_group": bool,
    "max_steps": int,
    "rates": list,
}
_EVALUATION = {"lengths": list, "protocols": dict, "by_position": bool, "passkey": bool, "attention": list}
_OF_A_RUN = {"preset", "seed"}  # fields of TrainingSpec that the section `runs` sets
_OF_AN_ENTRY = ("one_group", "max_steps")  # those that an entry of `runs` may set
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+-]{0,99}")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a recipe.

    Args:
        spec: as written in the recipe; its paths are relative to the recipe's folder.
        suffix: distinguishes the run from other runs of the same preset.
        trial: whether it is a trial of its learning rate (`rfa_lab.recipes.run_result`), which has no result itself.
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


@dataclass(frozen=True)
class EvaluationPlan:
    """The evaluation of each run.

    Args:
        lengths: context lengths in tokens, ascending.
        protocols: the number of tokens of the test split that each protocol scores, spread evenly; None for all.
        by_position: also compute the loss at each position.
        passkey: also run the retrieval probes.
        attention: presets whose first run without a label also gets attention maps.
    """

    lengths: tuple[int, ...]
    protocols: Mapping[str, int | None]
    by_position: bool = False
    passkey: bool = False
    attention: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read and checked.

    Args:
        path: of its file.
        name: a short name, which becomes part of file names.
        title: a title for readers.
        runs: in the order in which they are made.
        evaluation: of each run.
        keep_models: keep the checkpoints and the model of a run after its result is written.
        train_tokens: about the number of tokens of the training split, for `rfa experiment --dry-run` before the text
            is read; None if it is not known.
    """

    path: Path
    name: str
    title: str
    runs: tuple[PlannedRun, ...]
    evaluation: EvaluationPlan
    keep_models: bool = False
    train_tokens: int | None = None

    def asked_of(self, run: PlannedRun) -> dict[str, Any]:
        """The evaluation that the recipe asks of a run, in the form in which the result records it."""
        preset, evaluation = run.spec.preset, self.evaluation
        first = next((other for other in self.runs if other.label == preset), None)
        asked = {**asdict(evaluation), "lengths": list(evaluation.lengths)}
        attention = first is not None and run.name == first.name and preset in evaluation.attention
        return {**asked, "attention": attention}

    def resolved(self, run: PlannedRun) -> TrainingSpec:
        """The specification of a run with absolute paths."""
        folder, spec = self.path.resolve().parent, run.spec
        form, _, vocabulary = spec.tokenizer.partition(":")
        if form == "gpt2" and vocabulary:
            spec = replace(spec, tokenizer=f"gpt2:{(folder / vocabulary).resolve()}")
        return replace(spec, data=str((folder / spec.data).resolve())) if is_path(spec.data) else spec


def load_recipe(path: str | Path, data: str | None = None) -> Recipe:
    """Read a recipe and check all of it.

    Args:
        path: of a YAML file, as in `recipes/`.
        data: a corpus, file or folder that replaces the recipe's.

    Raises:
        RecipeError: with all faults of the recipe.
        OSError: if it cannot be read.
    """
    path, faults = Path(path), Faults(str(path))
    given = take(read_yaml(path), _RECIPE, "recipe", faults, required=("name", "training", "runs", "evaluation"))
    name = given.get("name", "")
    if "name" in given:
        _check_name(name, "name", faults)
    training = dict(given.get("training", {}))
    if data is not None:
        training["data"] = str(Path(data).resolve()) if is_path(data) else data
    for field in sorted(training.keys() & _OF_A_RUN):
        faults.add("training", f"{field}: not here, expected {field}s in runs")
        del training[field]
    invalid = set()
    for field in sorted(training.keys() - {f.name for f in fields(TrainingSpec)}, key=str):
        expected = ", ".join(f.name for f in fields(TrainingSpec) if f.name not in _OF_A_RUN)
        faults.add("training", f"{field}: unknown key, expected some of {expected}")
        invalid.add(field)
    if not isinstance(training.get("model", {}), dict):
        faults.add("training", f"model: got {training['model']!r}, expected a mapping")
        invalid.add("model")
    elif "model" in training:
        training["model"] = _named(training["model"], "training", faults)
    training = {field: value for field, value in training.items() if field not in invalid}
    if rates := _rates(given, training, "rates", faults):
        training["learning_rate"] = rates[0]  # of several, each run gets the one that its model chooses
    # check it alone too, without its model, because the runs may name no valid preset
    _check_spec("m2-sc-rfa", {**training, "model": {}}, {}, "training", faults)
    entries = enumerate(given.get("runs", []))
    runs = [run for index, entry in entries for run in _runs(entry, index, training, rates, faults)]
    if "runs" in given and not given["runs"]:
        faults.add("runs", "got none, expected at least one")
    names = [run.name for run in runs]
    for twice in repeated(names):
        faults.add("runs", f"{twice}: named {names.count(twice)} times, expected once (a label tells runs apart)")
    plan = EvaluationPlan((), {})
    if "evaluation" in given:
        plan = _evaluation(given["evaluation"], {run.label for run in runs}, faults)
    tokens = given.get("train_tokens")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        faults.add("recipe", f"train_tokens: got {tokens!r}, expected at least 1")
    faults.raise_if_any()
    title, keep = given.get("title", name), given.get("keep_models", False)
    return Recipe(path, name, title, tuple(runs), plan, keep, tokens)


def _rates(given: Mapping[str, Any], training: Mapping[str, Any], where: str, faults: Faults) -> tuple[float, ...]:
    """The learning rates that each model of the recipe or of an entry tries."""
    if "rates" not in given:
        return ()
    rates = given["rates"]
    if not check_rates(rates, faults):
        return ()
    if len(set(rates)) < len(rates):
        faults.add(where, f"got {rates!r:.80}, expected each once")
    elif "learning_rate" in training:
        faults.add("training", "learning_rate: not here, expected rates alone")
    else:
        return tuple(rates)
    return ()


def _check_name(name: str, where: str, faults: Faults) -> None:
    if not NAME.fullmatch(name):
        faults.add(where, f"got {name!r}, expected up to 100 letters, digits and _.=+-, for it names files")


def _runs(
    entry: Any, index: int, training: dict[str, Any], rates: tuple[float, ...], faults: Faults
) -> Iterator[PlannedRun]:
    """The runs of one entry: all presets with the first seed, then all with the next seed."""
    where = f"runs[{index}]"
    given = take(entry, _RUNS, where, faults, required=("presets", "seeds"))
    presets, seeds, suffix = given.get("presets", []), given.get("seeds", []), given.get("label", "")
    model = _named(given.get("model", {}), where, faults)
    if own := _rates(given, {} if rates else training, f"{where}.rates", faults):
        rates, training = own, {**training, "learning_rate": own[0]}
    training = {**training, **{name: given[name] for name in _OF_AN_ENTRY if name in given}}
    if suffix:
        _check_name(suffix, f"{where}.label", faults)
    for what, values in (("presets", presets), ("seeds", seeds)):
        if what in given and not values:
            faults.add(where, f"{what}: got none, expected at least one")
        for twice in {repr(value): value for value in values if values.count(value) > 1}.values():
            faults.add(where, f"{what}: got {twice} twice, expected once")
    for seed in seeds:
        if type(seed) is not int or not 0 <= seed < 2**32:
            faults.add(where, f"seeds: got {seed!r}, expected a whole number from 0 to 2^32 - 1")
    right = [seed for seed in seeds if type(seed) is int and 0 <= seed < 2**32]
    good = []
    for preset in dict.fromkeys(preset for preset in presets if isinstance(preset, str)):
        if preset not in PRESETS:
            faults.add(where, f"preset: got {preset!r}, expected one of those that `rfa doctor` lists")
        elif not _check_spec(preset, training, model, where, faults, own=given.keys()):
            good.append(preset)
    for other in (preset for preset in presets if not isinstance(preset, str)):
        faults.add(where, f"presets: got {other!r}, expected a name")
    for seed in dict.fromkeys(right):
        for preset in good:
            yield PlannedRun(_spec(preset, training, model, seed), suffix, rates=rates)


def _named(model: dict[Any, Any], where: str, faults: Faults) -> dict[str, Any]:
    """The entries of a mapping whose keys are text. YAML allows other keys; they are faults here."""
    for key in (key for key in model if not isinstance(key, str)):
        faults.add(where, f"model: got the key {key!r}, expected names of fields of RFAConfig")
    return {key: value for key, value in model.items() if isinstance(key, str)}


def _spec(preset: str, training: dict[str, Any], model: dict[str, Any], seed: int = 0) -> TrainingSpec:
    values = {**asdict(TrainingSpec("m2-sc-rfa")), **training, "preset": preset, "seed": seed}
    return TrainingSpec.from_dict({**values, "model": {**training.get("model", {}), **model}})


def _check_spec(
    preset: str,
    training: dict[str, Any],
    model: dict[str, Any],
    where: str,
    faults: Faults,
    own: Set[str] = frozenset(),
) -> bool:
    """Whether a specification has faults. Each field with a fault is removed, to find the others too.

    Faults of fields in `model` or `own` are reported at `where`, those of other fields at "training".
    """
    training, shared, model = dict(training), dict(training.get("model", {})), dict(model)
    wrong = False
    while True:
        try:
            _spec(preset, {**training, "model": shared}, model)
            return wrong
        except ValueError as error:
            wrong, field = True, str(error).partition(":")[0]
            elsewhere = field not in model and field not in own and (field in shared or field in training)
            faults.add("training" if elsewhere else where, str(error))
            source = next((given for given in (model, shared, training) if field in given), None)
            if source is None:
                return wrong
            del source[field]


def _evaluation(given: Any, labels: set[str], faults: Faults) -> EvaluationPlan:
    taken = take(given, _EVALUATION, "evaluation", faults, required=("lengths", "protocols"))
    lengths = [length for length in taken.get("lengths", []) if type(length) is int]
    for length in taken.get("lengths", []):
        if type(length) is not int or length < 2:
            faults.add("evaluation", f"lengths: got {length!r}, expected whole numbers of at least 2")
    for twice in sorted({length for length in lengths if lengths.count(length) > 1}):
        faults.add("evaluation", f"lengths: got {twice} twice, expected once")
    protocols = taken.get("protocols", {})
    for what in ("lengths", "protocols"):
        if what in taken and not taken[what]:
            faults.add("evaluation", f"{what}: got none, expected at least one")
    for protocol, tokens in protocols.items():
        if protocol not in PROTOCOLS:
            faults.add("evaluation", f"protocols: got {protocol!r}, expected some of {', '.join(PROTOCOLS)}")
        if tokens is not None and (type(tokens) is not int or tokens < max([2, *lengths])):
            least = f"null or a number of tokens of at least {max([2, *lengths])}, the longest context"
            faults.add("evaluation", f"protocols: got {tokens!r} for {protocol}, expected {least}")
    maps = taken.get("attention", [])
    for preset in maps:
        if not isinstance(preset, str) or preset not in labels:
            faults.add("evaluation", f"attention: got {preset!r}, expected presets of the runs, those without a label")
        elif maps.count(preset) > 1:
            faults.add("evaluation", f"attention: got {preset} {maps.count(preset)} times, expected once")
    options = {name: taken[name] for name in ("by_position", "passkey") if name in taken}
    return EvaluationPlan(tuple(sorted(lengths)), protocols, attention=tuple(map(str, maps)), **options)
