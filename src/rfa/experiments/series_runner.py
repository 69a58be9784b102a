"""Run a recipe of series: train each network, score it and the filters on the same series, one file for each run."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal

from rfa.data.simulated_series import SimulatedSeries, SimulatedSetting, simulate_series
from rfa.estimation import recursive_estimate, robust_estimate
from rfa.evaluation import forecast_scores
from rfa.files import held
from rfa.models import RFAForTimeSeries, RFATimeSeriesConfig
from rfa.progress import Stage, StageProgress
from rfa.results.files import write_result
from rfa.training.environment import environment
from rfa.training.series import SeriesBatch, train_on_series

from .plan import selected_names
from .series_recipe import SeriesRecipe, SeriesRun

SERIES_FORMAT = 1
_TEST_SEED, _VALID_SEED = 20_260_000, 10_260_000  # of the series that all runs are scored on, and of those for the rate
_CHUNK = 64  # series scored at once


class Predictions(NamedTuple):
    """What a contestant says of the signal: at the readings' times from readings up to then, and of the forecasts."""

    at_readings: Distribution
    ahead: Distribution


Predict = Callable[[SimulatedSeries], Predictions]


class SeriesOutcome(NamedTuple):
    """The names of the runs that have a result, and of those that another process makes."""

    done: list[str]
    claimed: list[str]


def run_series_recipe(
    recipe: SeriesRecipe, out: str | Path, *, only: tuple[str, ...] = (), progress: StageProgress | None = None
) -> SeriesOutcome:
    """Make all runs that have no result yet. Several processes may share a folder.

    Args:
        recipe: what to run.
        out: the folder; results are written to `out/results/NAME.json`.
        only: names of runs, in which `*` matches any text; all by default.
        progress: called with the stage, the amount done and the total.

    Raises:
        ValueError: for a name in `only` that matches no run, or a result of another recipe or version.
        OSError: if a result cannot be written.
    """
    results = Path(out) / "results"
    outcome = SeriesOutcome([], [])
    names = selected_names([run.name for run in recipe.runs], only)
    chosen = [run for run in recipe.runs if run.name in names]
    for index, run in enumerate(chosen):
        path = results / f"{run.name}.json"
        if progress is not None:
            progress(Stage("runs", run.name), index, len(chosen))
        with held(results / f".{run.name}.lock") as free:
            if not free:
                outcome.claimed.append(run.name)
                continue
            if finished_series_result(recipe, run, path) is None:
                rates = recipe.rates
                first = recipe.first_of(run)
                if first != run and len(rates) > 1:
                    found = finished_series_result(recipe, first, results / f"{first.name}.json")
                    if found is None:  # another process looks for the rate
                        outcome.claimed.append(run.name)
                        continue
                    rates = (found["learning_rate"],)
                write_result(path, _result(recipe, run, rates, progress))
            outcome.done.append(run.name)
    return outcome


def finished_series_result(recipe: SeriesRecipe, run: SeriesRun, path: Path) -> dict[str, Any] | None:
    """The result of a run, or None where it is still to do.

    Raises:
        ValueError: for a damaged file, or one of other settings.
    """
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text("utf-8"))
        same = result["format"] == SERIES_FORMAT and result["spec"] == _spec(recipe, run)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"result: {path} is damaged; delete it, and it is made again") from None
    if not same:
        raise ValueError(
            f"result: {path} is of other settings than {recipe.path} names; delete it, or choose a new folder"
        )
    return result


def _spec(recipe: SeriesRecipe, run: SeriesRun) -> dict[str, Any]:
    """All that a result depends on."""
    contestant = run.contestant
    spec: dict[str, Any] = {"series": recipe.series, "columns": {n: asdict(s) for n, s in recipe.columns.items()}}
    if contestant.preset is not None:
        training = {**asdict(recipe.training), "seed": run.seed, "learning_rate": list(recipe.rates)}
        spec |= {"setting": asdict(recipe.setting), "training": training}
        spec |= {"preset": contestant.preset, "model": dict(contestant.model or {})}
    return spec


def _result(
    recipe: SeriesRecipe, run: SeriesRun, rates: tuple[float, ...], progress: StageProgress | None
) -> dict[str, Any]:
    contestant, started = run.contestant, time.perf_counter()
    made: dict[str, Any] = {"parameters": 0, "losses": []}
    if contestant.preset is None:
        predict_of = filter_of(contestant.label)
    else:
        tried = {}
        for rate in rates:
            model, losses = trained_network(recipe, run, rate, progress)
            tried[rate] = _validation(model, recipe.setting), model, losses
        rate, (_, model, losses) = min(tried.items(), key=lambda item: item[1][0])
        made = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "losses": losses[:: max(1, len(losses) // 50)],
            "learning_rate": rate,
            "validation": {str(rate): value for rate, (value, _, _) in tried.items()},
        }

        def predict_of(setting: SimulatedSetting) -> Predict:
            return lambda series: network_predictions(model, series)

    trained = time.perf_counter()
    scores = {}
    for index, (column, setting) in enumerate(recipe.columns.items()):
        if progress is not None:
            progress(Stage("evaluation", run.name), index, len(recipe.columns))
        scores[column] = score(predict_of(setting), setting, recipe.series)
    return {
        "format": SERIES_FORMAT,
        "recipe": recipe.name,
        "run": run.name,
        "label": contestant.label,
        "seed": run.seed,
        "spec": _spec(recipe, run),
        **made,
        "scores": scores,
        "seconds": {"training": trained - started, "evaluation": time.perf_counter() - trained},
        "environment": environment(),
    }


def trained_network(
    recipe: SeriesRecipe, run: SeriesRun, rate: float, progress: StageProgress | None = None
) -> tuple[RFAForTimeSeries, list[float]]:
    """The network of a run after its training, and its losses."""
    training, contestant = recipe.of(run, rate), run.contestant
    torch.manual_seed(training.seed)
    sample = simulate_series(recipe.setting, 256, torch.Generator().manual_seed(training.seed))
    series = zip(sample.times, sample.values, strict=True)
    config = RFATimeSeriesConfig.from_data(series, preset=contestant.preset, **dict(contestant.model or {}))
    model = RFAForTimeSeries(config)

    def draw(series: int, generator: torch.Generator) -> SeriesBatch:
        found = simulate_series(recipe.setting, series, generator)
        return SeriesBatch(found.times, found.values, found.signal, found.query_times, found.future)

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(Stage("training", run.name), done, total)

    return model, train_on_series(model, draw, training, report)


def _validation(model: RFAForTimeSeries, setting: SimulatedSetting) -> float:
    """The mean negative log likelihood by which learning rates are compared; infinite where it is none."""
    found = score(lambda series: network_predictions(model, series), setting, 2 * _CHUNK, _VALID_SEED)
    value = sum(part["nll"] for part in found.values()) / len(found)
    return value if math.isfinite(value) else math.inf


def score(
    predict: Predict, setting: SimulatedSetting, series: int, seed: int = _TEST_SEED
) -> dict[str, dict[str, float]]:
    """The scores at the readings and of the forecasts, over series that are the same for every contestant."""
    generator = torch.Generator().manual_seed(seed)
    drawn = simulate_series(setting, series, generator)
    parts = []
    for start in range(0, series, _CHUNK):
        chunk = SimulatedSeries(*(x[start : start + _CHUNK] for x in drawn))
        with torch.no_grad():
            parts.append(predict(chunk))
    return {
        "filter": _scores([part.at_readings for part in parts], drawn.signal),
        "forecast": _scores([part.ahead for part in parts], drawn.future),
    }


def _scores(parts: list[Distribution], targets: Tensor) -> dict[str, float]:
    sums: dict[str, float] = {}
    start = 0
    for part in parts:
        own = targets[start : start + part.batch_shape[0]]
        found = forecast_scores(part, own.to(part.mean))._asdict()
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value * (1 if name == "targets" else found["targets"])
        start += len(own)
    return {name: value if name == "targets" else value / sums["targets"] for name, value in sums.items()}


def network_predictions(model: RFAForTimeSeries, series: SimulatedSeries) -> Predictions:
    """A network's predictions of the signal."""
    at_readings = model(series.times, series.values).distribution
    ahead = model(series.times, series.values, query_times=series.query_times).distribution
    return Predictions(at_readings, ahead)


def filter_of(label: str) -> Callable[[SimulatedSetting], Predict]:
    """A filter with the true model, started at the process' own distribution: "kalman", or "robust"."""

    def predict_of(setting: SimulatedSetting) -> Predict:
        sde = setting.sde
        size, row = sde.state_size, sde.observation
        try:
            spread = sde.stationary_covariance()
        except ValueError:  # a tracker starts at zero
            spread = 1e-9 * torch.eye(size, dtype=torch.float64)
        initial = torch.zeros(size, dtype=torch.float64), spread

        def predict(series: SimulatedSeries) -> Predictions:
            given = sde, series.times, series.values
            found = []
            for times in (series.times, series.query_times):
                asked: dict[str, Any] = {"query_times": times, "initial": initial}
                if label == "robust":
                    estimate: Any = recursive_estimate(*given, **asked)
                else:
                    estimate = robust_estimate(*given, nu=math.inf, return_weights=False, **asked)
                variance = (row @ estimate.covariance @ row.mT).diagonal(dim1=-2, dim2=-1)
                found.append(Normal(estimate.mean @ row.mT, variance.clamp(min=1e-12).sqrt()))
            return Predictions(*found)

        return predict

    return predict_of
