"""Recipes of series: networks and filters compared on simulated processes, or networks on a table of readings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rfa.models import PRESETS, RFATimeSeriesConfig
from rfa.models.flat import FLAT_NAMES
from rfa_lab.data.public_series import TableSetting
from rfa_lab.data.simulated_series import SimulatedSetting
from rfa_lab.training.series import SeriesTraining

from .reading import Faults, built, check_rates, check_seeds, read_yaml, repeated, take
from .recipe import NAME
from .series_contestants import FILTERS, NETWORKS, Setting, check_network

KIND = "series"
_RECIPE = {
    "kind": str, "name": str, "title": str, "setting": dict, "training": dict, "models": list, "filters": list,
    "rates": list, "seeds": list, "evaluation": dict,
}  # fmt: skip
_MODEL = {"label": str, "preset": str, "model": dict, "setting": dict}
# transformers keeps unknown arguments of a configuration: a misspelt field would have no effect
_FIELDS = FLAT_NAMES | {
    name
    for kind in RFATimeSeriesConfig.__mro__
    if kind.__module__.startswith("rfa.")
    for name in vars(kind).get("__annotations__", {})
}
_EVALUATION = {"series": int, "columns": dict}


@dataclass(frozen=True)
class SeriesContestant:
    """One row of a table: a network that is trained, or a filter with the true model.

    Args:
        label: a name for readers, which becomes part of file names.
        preset: of the network; None for a filter, whose label is one of `FILTERS`.
        model: fields of the network's configuration.
        setting: of the series from which the network learns, where it is not the recipe's.
    """

    label: str
    preset: str | None = None
    model: Mapping[str, Any] | None = None
    setting: Setting | None = None


@dataclass(frozen=True)
class SeriesRun:
    """A contestant with a seed. Filters have the seed 0 alone."""

    contestant: SeriesContestant
    seed: int

    @property
    def name(self) -> str:
        """The name of its result file."""
        return f"{self.contestant.label.replace(' ', '-')}-seed{self.seed}"


@dataclass(frozen=True)
class SeriesRecipe:
    """A recipe that was read and checked.

    Args:
        path: of its file.
        name: a short name.
        title: a title for readers.
        setting: of the series to learn from.
        training: of each network; its seed is the run's.
        rates: learning rates. The first seed of each network tries all of them with a third of the steps. The best one
            serves all its seeds.
        runs: in the order in which they are made: seed 0 of all contestants first.
        columns: the settings of the evaluation by name.
        series: number of series of each evaluation. They are the same for all runs.
    """

    path: Path
    name: str
    title: str
    setting: Setting
    training: SeriesTraining
    rates: tuple[float, ...]
    runs: tuple[SeriesRun, ...]
    columns: Mapping[str, Setting]
    series: int

    def learnt(self, run: SeriesRun) -> Setting:
        """The setting of the series from which a run learns."""
        return run.contestant.setting or self.setting

    def of(self, run: SeriesRun, rate: float) -> SeriesTraining:
        """The training of a run with a learning rate."""
        return replace(self.training, seed=run.seed, learning_rate=rate)

    def trial(self, run: SeriesRun, rate: float) -> SeriesTraining:
        """The training by which a learning rate is tried: a third of the steps."""
        return replace(self.of(run, rate), steps=max(1, self.training.steps // 3))

    def first_of(self, run: SeriesRun) -> SeriesRun:
        """The run of the same contestant that looks for the learning rate."""
        return next(other for other in self.runs if other.contestant == run.contestant)


def load_series_recipe(path: str | Path, data: str | None = None) -> SeriesRecipe:
    """Read a recipe and check all of it.

    Args:
        path: of the recipe.
        data: a local copy of the recipe's table, instead of fetching it.

    Raises:
        RecipeError: with all faults of the recipe.
        OSError: if it cannot be read.
    """
    path, faults = Path(path), Faults(str(path))
    required = ("kind", "name", "setting", "training", "models", "seeds", "evaluation")
    given = take(read_yaml(path), _RECIPE, "recipe", faults, required=required)
    name = given.get("name", "")
    if "name" in given and not NAME.fullmatch(name):
        faults.add("name", f"got {name!r}, expected letters, digits and _.=+-, at most 100")
    base = dict(given.get("setting", {}))
    of_table = "table" in base
    if data is not None:
        if of_table:
            base["path"] = data
        else:
            faults.add("data", f"got {data}, expected none: the series of this recipe are simulated")
    kind = TableSetting if of_table else SimulatedSetting
    setting = built(kind, base, "setting", faults)
    training = built(SeriesTraining, given.get("training", {}), "training", faults)
    if "seed" in given.get("training", {}):
        faults.add("training", "seed: not here, expected seeds at the top")
    rates = given.get("rates", [training.learning_rate])
    check_rates(rates, faults)
    contestants = [SeriesContestant(label) for label in given.get("filters", [])]
    for contestant in contestants:
        if not isinstance(contestant.label, str):
            faults.add("filters", f"got {contestant.label!r:.80}, expected some of {', '.join(FILTERS)}")
            faults.raise_if_any()
        if of_table:
            faults.add("filters", f"got {contestant.label!r}, expected none: the model of a table is not known")
        if contestant.label not in FILTERS:
            faults.add("filters", f"got {contestant.label!r}, expected some of {', '.join(FILTERS)}")
    contestants += [
        _contestant(entry, index, setting, base, faults) for index, entry in enumerate(given.get("models", []))
    ]
    labels = [SeriesRun(contestant, 0).name for contestant in contestants]
    for twice in repeated(labels):
        label, times = twice.removesuffix("-seed0"), labels.count(twice)
        faults.add("models", f"{label}: named {times} times, expected once (a label tells models and files apart)")
    if not contestants:
        faults.add("models", "got none, expected at least one network or filter")
    seeds = given.get("seeds", [])
    check_seeds(seeds, faults)
    evaluation = take(given.get("evaluation", {}), _EVALUATION, "evaluation", faults, required=tuple(_EVALUATION))
    columns = {}
    for column, changes in evaluation.get("columns", {}).items():
        known = changes if isinstance(changes, dict) else {}
        if not isinstance(changes, dict):
            faults.add(f"evaluation.columns.{column}", f"got {changes!r}, expected a mapping")
        columns[str(column)] = built(kind, {**base, **known}, f"evaluation.columns.{column}", faults)
    if "columns" in evaluation and not columns:
        faults.add("evaluation", "columns: got none, expected at least one")
    of_contestants = [contestant.setting for contestant in contestants if contestant.setting is not None]
    for other in (*columns.values(), *of_contestants):
        source = "table" if of_table else "process"
        if getattr(other, source) != getattr(setting, source):
            faults.add("setting", f"{source}: got another one in a column or a model, expected the same for all")
    series = evaluation.get("series", 0)
    if not 2 <= series <= 100_000:
        faults.add("evaluation", f"series: got {series}, expected 2 to 100,000")
    faults.raise_if_any()
    runs = tuple(
        SeriesRun(contestant, seed)
        for place, seed in enumerate(seeds)
        for contestant in contestants
        if contestant.preset is not None or not place
    )
    title = given.get("title", name)
    return SeriesRecipe(path, name, title, setting, training, tuple(rates), runs, columns, series)


def _contestant(entry: Any, index: int, setting: Setting, base: Mapping[str, Any], faults: Faults) -> SeriesContestant:
    where = f"models[{index}]"
    given = take(entry, _MODEL, where, faults, required=("preset",))
    preset = given.get("preset", "")
    if "preset" in given and preset not in NETWORKS:
        faults.add(where, f"preset: got {preset!r}, expected one of {', '.join(NETWORKS)}")
    label = given.get("label", preset)
    if not NAME.fullmatch(label.replace(" ", "-")):
        faults.add(where, f"label: got {label!r}, expected letters, digits, spaces and _.=+-, at most 100")
    own = None
    if "setting" in given:
        own = built(type(setting), {**base, **given["setting"]}, f"{where}.setting", faults)
    model = given.get("model", {})
    unknown = sorted(model.keys() - _FIELDS, key=str) if preset in PRESETS else []
    for field in unknown:
        faults.add(where, f"model: {field}: unknown field, expected some of {', '.join(sorted(_FIELDS))}")
    if preset in NETWORKS and not unknown:
        try:
            check_network(preset, model, own or setting)
        except (ValueError, TypeError) as error:
            faults.add(where, f"model: {str(error).splitlines()[0]}")
    return SeriesContestant(label, preset, model, own)
