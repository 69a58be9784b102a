"""Run a recipe of series: train each network, score it and the filters on the same series, one file for each run."""

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from rfa.environment import environment
from rfa.progress import Stage, StageProgress
from rfa_lab.results import Planned
from rfa_lab.training.callbacks import Diverged
from rfa_lab.training.series import SeriesTraining

from .plan import selected_names
from .recall_runner import ClaimedOutcome, damaged, make_claimed, stored_result
from .series_contestants import (
    Setting,
    best_soft,
    build_network,
    filter_predictor,
    network_predictor,
    score,
    train_network,
    validation_loss,
)
from .series_recipe import SeriesRecipe, SeriesRun

SERIES_FORMAT = 2
_SAMPLE = 128  # series by which rates, and WoLF, are chosen


def run_series_recipe(
    recipe: SeriesRecipe,
    out: str | Path,
    *,
    only: tuple[str, ...] = (),
    seconds: float | None = None,
    other_version: bool = False,
    progress: StageProgress | None = None,
) -> ClaimedOutcome:
    """Make all runs that have no result yet. Several processes may share a folder.

    Args:
        recipe: what to run.
        out: the folder; results are written to `out/results/NAME.json`.
        only: names of runs, in which `*` matches any text; all by default. The first seed of a network is made too: it
            looks for the learning rate.
        seconds: time after which the call stops; the next call begins its last run anew. None for no limit.
        other_version: go on where another version or commit of rfa made some of the results. Each names its own.
        progress: called with the stage, the amount done and the total.

    Raises:
        ValueError: for a name in `only` that matches no run, a result of another recipe, or one of another version
            without `other_version`.
        OSError: if a result cannot be written.
    """
    results = Path(out) / "results"
    names = selected_names([run.name for run in recipe.runs], only)
    wanted = [run for run in recipe.runs if run.name in names]
    chosen = [run.name for run in recipe.runs if run in wanted or run in map(recipe.first_of, wanted)]
    planned = {run.name: run for run in recipe.runs}

    def make(name: str, report: StageProgress) -> dict[str, Any] | None:
        run, rate = planned[name], None
        first = recipe.first_of(run)
        if first != run:
            found = finished_series_result(recipe, first, results / f"{first.name}.json")
            if found is None:  # another process looks for the rate
                return None
            rate = found["learning_rate"]
        return _result(recipe, run, rate, report)

    def finished(name: str) -> dict[str, Any] | None:
        return finished_series_result(recipe, planned[name], results / f"{name}.json")

    return make_claimed(
        chosen,
        Planned(name=recipe.name, title=recipe.title, runs=list(planned), kind="series"),
        results,
        finished,
        make,
        seconds=seconds,
        other_version=other_version,
        progress=progress,
    )


def finished_series_result(recipe: SeriesRecipe, run: SeriesRun, path: Path) -> dict[str, Any] | None:
    """The result of a run, or None where it is still to do.

    Raises:
        ValueError: for a damaged file, or one of other settings.
    """
    result = stored_result(path, SERIES_FORMAT, _spec(recipe, run), recipe.path)
    try:
        float((result or {}).get("learning_rate", 0.0))
    except (ValueError, TypeError):
        raise damaged(path) from None
    return result


def _spec(recipe: SeriesRecipe, run: SeriesRun) -> dict[str, Any]:
    """All that a result depends on. A table's place on this machine is not part of it."""
    contestant = run.contestant
    spec: dict[str, Any] = {"series": recipe.series, "columns": {n: _named(s) for n, s in recipe.columns.items()}}
    spec["setting"] = _named(recipe.learnt(run))
    if contestant.preset is not None:
        training = {**asdict(recipe.training), "seed": run.seed, "learning_rate": list(recipe.rates)}
        spec |= {"training": training, "preset": contestant.preset, "model": dict(contestant.model or {})}
    return spec


def _named(setting: Setting) -> dict[str, Any]:
    return {name: value for name, value in asdict(setting).items() if name != "path"}


def _result(recipe: SeriesRecipe, run: SeriesRun, rate: float | None, progress: StageProgress) -> dict[str, Any]:
    contestant, started = run.contestant, time.perf_counter()
    if contestant.preset is None:
        soft = best_soft(recipe.setting, 2 * _SAMPLE) if contestant.label == "wolf" else 0.0
        made: dict[str, Any] = {"parameters": 0, "c^2": soft} if soft else {"parameters": 0}
        predict_of = filter_predictor(contestant.label, soft)
    else:
        network, made = _trained(recipe, run, rate, progress)
        predict_of = lambda setting: network_predictor(network)  # noqa: E731
    trained = time.perf_counter()
    scores = {}
    for index, (column, setting) in enumerate(() if made.get("fault") else recipe.columns.items()):
        progress(Stage("evaluation", run.name), index, len(recipe.columns))
        scores[column] = score(predict_of(setting), setting, recipe.series)
    return {
        "format": SERIES_FORMAT,
        "recipe": recipe.name,
        "title": recipe.title,
        "run": run.name,
        "label": contestant.label,
        "seed": run.seed,
        "spec": _spec(recipe, run),
        **made,
        "scores": scores,
        "seconds": {"training": trained - started, "evaluation": time.perf_counter() - trained},
        "environment": environment(),
    }


def _trained(
    recipe: SeriesRecipe, run: SeriesRun, rate: float | None, progress: StageProgress
) -> tuple[nn.Module, dict[str, Any]]:
    """The network of a run, and what its result says of the training. Without a rate all rates are tried.

    Where training diverges, a trial has lost, and the result of the run says so as its `fault`: the other runs go on.
    """
    setting, contestant = recipe.learnt(run), run.contestant
    tried: dict[float, float] = {}

    def made(training: SeriesTraining, name: str) -> tuple[nn.Module, list[float], float, str | None]:
        """The network, the losses of training and validation, and why training stopped."""

        def report(done: int, total: int) -> None:
            progress(Stage("training", name), done, total)

        network = build_network(str(contestant.preset), contestant.model or {}, setting, run.seed)
        try:
            losses = train_network(network, setting, training, report)
        except Diverged as error:
            return network, [], math.inf, str(error)
        return network, losses, validation_loss(network, setting, _SAMPLE), None

    if rate is None:
        for one in recipe.rates if len(recipe.rates) > 1 else ():
            _, _, tried[one], _ = made(recipe.trial(run, one), f"{run.name}, rate {one:g}")
        rate = min(tried, key=lambda one: tried[one]) if tried else recipe.rates[0]
    network, losses, validation, fault = made(recipe.of(run, rate), run.name)
    return network, {
        "parameters": sum(p.numel() for p in network.parameters()),
        "losses": losses[:: max(1, len(losses) // 50)],
        "learning_rate": rate,
        "trials": {str(one): value if math.isfinite(value) else None for one, value in tried.items()},
        "validation": validation if math.isfinite(validation) else None,
        "fault": fault,
    }
