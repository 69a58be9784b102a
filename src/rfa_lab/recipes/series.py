"""Recipes of series: networks and filters compared on simulated processes, or networks on a table of readings."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, field_validator, model_validator
from torch import nn

from rfa.models import PRESETS, RFATimeSeriesConfig
from rfa.models.flat import FLAT_NAMES
from rfa.progress import Stage, StageProgress
from rfa_lab.data.public_series import TableSetting
from rfa_lab.data.simulated_series import SimulatedSetting
from rfa_lab.data.unseen_series import UnseenSetting
from rfa_lab.training.callbacks import Diverged
from rfa_lab.training.series import SeriesTraining

from .rates import TRIAL_PART, needed_rates, possible_rates
from .reading import (
    BaseRecipe,
    Network,
    Rates,
    Section,
    Seeds,
    built,
    check_each,
    check_names,
    checked_fields,
    different,
    file_name,
    one_of,
)
from .runner import UnsavedRuns
from .series_contestants import (
    FILTERS,
    FITTED,
    NETWORKS,
    Scores,
    Setting,
    best_soft,
    build_network,
    check_network,
    filter_predictor,
    network_predictor,
    score,
    train_network,
    validation_loss,
)

# transformers keeps unknown arguments of a configuration: a misspelt field would have no effect
_FIELDS = FLAT_NAMES | {
    name
    for kind in RFATimeSeriesConfig.__mro__
    if kind.__module__.startswith("rfa.")
    for name in vars(kind).get("__annotations__", {})
}
_SETTINGS: dict[type, Any] = {kind: checked_fields(kind) for kind in (TableSetting, SimulatedSetting, UnseenSetting)}


def _setting(given: Any) -> Setting:
    known = {"table": TableSetting, "unseen": UnseenSetting} if isinstance(given, dict) else {}
    kind = next((kind for name, kind in known.items() if name in given), SimulatedSetting)
    return kind(**_SETTINGS[kind](given))


def _changed(setting: Setting, changes: dict[str, Any]) -> Setting:
    """A setting with other values of some fields. The table or the process stays; unseen series may be any."""
    found = replace(setting, **_SETTINGS[type(setting)](changes))
    if isinstance(setting, UnseenSetting):
        return found
    source = "table" if isinstance(setting, TableSetting) else "process"
    if getattr(found, source) != getattr(setting, source):
        raise ValueError(f"setting: {source}: got {getattr(found, source)!r}, expected the same for all")
    return found


class SeriesContestant(Network):
    """A network that is trained, or without preset a filter, whose label is one of `FILTERS` or `FITTED`.

    Args:
        setting: what differs in the series from which the network learns.
    """

    preset: Annotated[str, one_of(NETWORKS)]
    setting: dict[str, Any] = Field(default={})

    def check(self, setting: Setting) -> None:
        """Check the network before there are data."""
        setting = _changed(setting, self.setting)
        if unknown := sorted(self.model.keys() - _FIELDS) if self.preset in PRESETS else []:
            raise ValueError(f"model: {unknown[0]}: unknown field, expected some of {', '.join(sorted(_FIELDS))}")
        try:
            check_network(self.preset, self.model, setting)
        except (ValueError, TypeError) as error:
            raise ValueError(f"model: {error}") from error


class SeriesEvaluation(Section):
    """The number of series, the same for all runs, and what differs from the recipe's setting in each column."""

    series: Annotated[int, Field(ge=2, le=100_000)]
    columns: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]


@dataclass(frozen=True)
class SeriesRun:
    """A contestant with a seed. A filter has the first seed alone."""

    contestant: SeriesContestant
    seed: int

    @property
    def name(self) -> str:
        """The name of its result file."""
        return f"{file_name(self.contestant.label)}-seed{self.seed}"


class SeriesRecipe(BaseRecipe):
    """A recipe that was read and checked.

    Args:
        setting: of the series to learn from.
        training: of each network; its seed is the run's.
        rates: learning rates. The first seed of each network tries all of them with a third of the steps, and the next
            one beyond while the best is at an end. The best one serves all its seeds.
        filters: that know the model of the process; of unseen series, filters that are fitted to each.
        models: networks.
        seeds: of the networks.
        evaluation: of all of them.
    """

    kind: Literal["series"]
    setting: Annotated[Setting, PlainValidator(_setting)]
    training: Annotated[SeriesTraining, built(SeriesTraining, "seed")]
    rates: Rates = Field(default_factory=lambda given: [given["training"].learning_rate] if "training" in given else [])
    filters: Annotated[list[Annotated[str, one_of((*FILTERS, *FITTED))]], AfterValidator(different)] = Field(default=[])
    models: list[SeriesContestant]
    seeds: Seeds
    evaluation: SeriesEvaluation

    @field_validator("filters")
    @classmethod
    def _known_process(cls, filters: list[str], info: ValidationInfo) -> list[str]:
        setting = info.data.get("setting")
        if filters and isinstance(setting, TableSetting):
            raise ValueError(f"got {filters}, expected none: the model of a table is not known")
        fits = FITTED if isinstance(setting, UnseenSetting) else FILTERS
        if setting is not None and (other := [name for name in filters if name not in fits]):
            raise ValueError(f"got {other[0]!r}, expected some of {', '.join(fits)}")
        return filters

    @field_validator("models")
    @classmethod
    def _fit_the_series(cls, models: list[SeriesContestant], info: ValidationInfo) -> list[SeriesContestant]:
        if "setting" in info.data:
            check_each(enumerate(models), lambda model: model.check(info.data["setting"]))
        return models

    @field_validator("evaluation")
    @classmethod
    def _settings_of_columns(cls, evaluation: SeriesEvaluation, info: ValidationInfo) -> SeriesEvaluation:
        if "setting" in info.data:
            columns = {f"columns.{name}": changes for name, changes in evaluation.columns.items()}
            check_each(columns.items(), lambda changes: _changed(info.data["setting"], changes))
        return evaluation

    @model_validator(mode="after")
    def _different_contestants(self) -> Self:
        check_names(each.label for each in self.contestants)
        if not self.contestants:
            raise ValueError("models: got none, expected at least one network or filter")
        return self

    @property
    def contestants(self) -> list[SeriesContestant]:
        """Filters, then networks."""
        given: dict[str, Any] = {"preset": "", "model": {}, "setting": {}}
        return [*(SeriesContestant.model_construct(label=name, **given) for name in self.filters), *self.models]

    @property
    def runs(self) -> list[SeriesRun]:
        """The runs in the order in which they are made: the first seed of all contestants first."""
        return [
            SeriesRun(contestant, seed)
            for place, seed in enumerate(self.seeds)
            for contestant in self.contestants
            if contestant.preset or not place
        ]

    @property
    def columns(self) -> dict[str, Setting]:
        """The settings of the evaluation by name."""
        return {name: _changed(self.setting, changes) for name, changes in self.evaluation.columns.items()}

    @classmethod
    def with_data(cls, given: Any, data: str) -> Any:
        """With a local copy of the recipe's table, instead of fetching it."""
        setting = given.get("setting")
        if not (isinstance(setting, dict) and "table" in setting):
            raise ValueError(f"data: got {data}, expected none: the series of this recipe are simulated")
        return {**given, "setting": {**setting, "path": data}}

    def learnt(self, run: SeriesRun) -> Setting:
        """The setting of the series from which a run learns."""
        return _changed(self.setting, run.contestant.setting)


_SAMPLE = 128  # series by which rates, and WoLF, are chosen


class SeriesRuns(UnsavedRuns[SeriesRecipe, SeriesRun]):
    """The runs of a recipe of series. The first seed of a network looks for its learning rate."""

    form, scores = 2, "scores"
    stopped = "which goes on from its last 200 steps"

    def first_of(self, run: SeriesRun) -> SeriesRun:
        """The run of the same contestant that looks for the learning rate."""
        return next(other for other in self.planned if other.contestant.label == run.contestant.label)

    def needs(self, run: SeriesRun) -> Sequence[SeriesRun]:
        """The first seed of the network, unless it is finished."""
        first = self.first_of(run)
        return [first] if first != run and self.finished(first) is None else ()

    def spec(self, run: SeriesRun) -> dict[str, Any]:
        """All that a result depends on. A table's place on this machine is not part of it."""
        recipe, contestant = self.recipe, run.contestant
        columns = {name: _named(setting) for name, setting in recipe.columns.items()}
        spec = {"series": recipe.evaluation.series, "columns": columns, "setting": _named(recipe.learnt(run))}
        if contestant.preset:
            training = {**asdict(recipe.training), "seed": run.seed, "learning_rate": recipe.rates}
            spec |= {"training": training, "preset": contestant.preset, "model": contestant.model}
        return spec

    def tests(self) -> dict[str, Setting]:
        """The settings of the evaluation."""
        return self.recipe.columns

    def trained(self, run: SeriesRun, report: StageProgress) -> tuple[Callable[[Setting], Scores], dict[str, Any]]:
        """Train a network, or take a filter."""
        recipe, contestant = self.recipe, run.contestant
        if contestant.preset:
            network, made = self._trained_network(run, report)
            predict = network_predictor(network)
        else:
            soft = best_soft(recipe.setting, 2 * _SAMPLE) if contestant.label == "wolf" else 0.0
            made = {"parameters": 0, "c^2": soft} if soft else {"parameters": 0}
            predict = filter_predictor(contestant.label, soft)
        names = {"label": contestant.label, "seed": run.seed}
        return lambda setting: score(predict, setting, recipe.evaluation.series), {**names, **made}

    def _trained_network(self, run: SeriesRun, report: StageProgress) -> tuple[nn.Module, dict[str, Any]]:
        """The network of a run, and what its result says of the training. The first seed tries the rates.

        Where training diverges, a trial has lost.
        """
        recipe, contestant, steps = self.recipe, run.contestant, self.recipe.training.steps
        setting, first = recipe.learnt(run), self.finished(self.first_of(run))

        def made(rate: float, steps: int, name: str) -> tuple[nn.Module, list[float], float | None, str | None]:
            """The network, the losses of training, that of validation if it is finite, and why training stopped."""
            training = replace(recipe.training, seed=run.seed, learning_rate=rate, steps=steps)
            network = build_network(contestant.preset, contestant.model, setting, run.seed)
            about = hashlib.sha256(json.dumps([self.spec(run), steps]).encode()).hexdigest()[:8]
            checkpoint = self.out / "checkpoints" / f"{run.name}-{rate:g}-{about}.pt"
            try:
                losses = train_network(network, setting, training, partial(report, Stage("training", name)), checkpoint)
            except Diverged as error:
                return network, [], None, str(error)
            loss = validation_loss(network, setting, _SAMPLE)
            return network, losses, loss if math.isfinite(loss) else None, None

        tried: dict[float, float] = {}
        possible = possible_rates(recipe.rates) if first is None and len(recipe.rates) > 1 else ()
        while left := [rate for rate in needed_rates(possible, recipe.rates, tried) if rate not in tried]:
            for rate in left:
                loss = made(rate, max(1, steps // TRIAL_PART), f"{run.name}, rate {rate:g}")[2]
                tried[rate] = math.inf if loss is None else loss
        best = min(tried, key=tried.__getitem__, default=recipe.rates[0])
        rate = best if first is None else first["learning_rate"]
        network, losses, validation, fault = made(rate, steps, run.name)
        return network, {
            "parameters": sum(p.numel() for p in network.parameters()),
            "losses": losses[:: max(1, len(losses) // 50)],
            "learning_rate": rate,
            "trials": {str(one): loss if math.isfinite(loss) else None for one, loss in tried.items()},
            "validation": validation,
            "fault": fault,
        }


def _named(setting: Setting) -> dict[str, Any]:
    return {name: value for name, value in asdict(setting).items() if name != "path"}
