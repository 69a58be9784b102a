"""The demo of series: two networks learn to filter a tracked oscillator, beside filters that know its model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rfa.environment import environment
from rfa.files import write_text_whole
from rfa.forecasting.scores import central_interval
from rfa.forecasting.style import save
from rfa.progress import Stage, StageProgress
from rfa_lab.data.simulated_series import SimulatedSeries, SimulatedSetting, simulate_series
from rfa_lab.report.figures.comparison import filtered_series
from rfa_lab.results import write_result
from rfa_lab.training.series import SeriesTraining

from .series import SeriesRuns
from .series_contestants import (
    Predict,
    PredictOf,
    Scores,
    build_network,
    filter_predictor,
    network_predictor,
    score,
    train_network,
)

SETTING = SimulatedSetting(length=48, horizon=6.0, forecasts=24)
TRAINING = SeriesTraining(steps=240, batch_size=32, learning_rate=1e-2)
COLUMNS = {"as trained": SETTING, "20 % of readings x30": SETTING.changed(outliers=0.2, size=30.0)}
COLUMNS["four times as many"] = SETTING.changed(length=192)
SERIES = 32
# scaled by its window, a network would know of later readings; the filters do not
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "scaling": "training"}
NETWORKS = {"RFA": "x2-riccati-alibi", "RoPE on real times": "b1-rope"}
FILTERS = {"robust filter, true model": "robust", "Kalman filter, true model": "kalman"}
_MADE = {"results.json", "figure.png", "results", "report"}


def run_series_demo(
    out: str | Path, *, overwrite: bool = False, progress: StageProgress | None = None
) -> dict[str, Any]:
    """Train two networks, score them and two filters, write `results.json`, `figure.png` and a result file for each.

    They are written after each contestant, so that a demo that is stopped leaves what is finished. `rfa report` reads
    the folder.

    Args:
        out: a folder; it may exist if it is empty, or with `overwrite`.
        overwrite: replace the results of an earlier demo.
        progress: called with the stage, the amount done and the total.

    Returns:
        The content of `results.json`: mean squared errors by contestant, setting, and "filter" or "forecast".

    Raises:
        ValueError: if the folder has other files.
        OSError: if the results cannot be written.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file, expected a folder")
    there = {path.name for path in out.iterdir()} if out.exists() else set()
    demos = "results.json" in there and there <= _MADE
    if there and not (overwrite and demos):
        expected = "an empty folder, or --overwrite" if demos else "an empty folder"
        raise ValueError(f"out: {out} has {', '.join(sorted(there))[:80]}, expected {expected}")
    shown = simulate_series(SETTING, 1, torch.Generator().manual_seed(7))
    results: dict[str, dict[str, dict[str, float | None]]] = {}
    content = {"settings": list(COLUMNS), "mse": results}
    bands = {}
    for name in (*NETWORKS, *FILTERS):
        predict_of = filter_predictor(FILTERS[name]) if name in FILTERS else _learned(name, progress)
        scores = {}
        for index, (column, setting) in enumerate(COLUMNS.items()):
            if progress is not None:
                progress(Stage("evaluation", name), index + 1, len(COLUMNS))
            scores[column] = score(predict_of(setting), setting, SERIES)
        results[name] = {column: {part: each["mse"] for part, each in scores[column].items()} for column in scores}
        if FILTERS.get(name) != "kalman":
            bands[name] = _band(predict_of(SETTING), shown)
        write_text_whole(out / "results.json", json.dumps(content, indent=2) + "\n")
        write_result(_result_path(out, name), _result(name, scores))
        for later in (NETWORKS | FILTERS).keys() - results.keys():
            _result_path(out, later).unlink(missing_ok=True)  # of an earlier demo
        _draw(out, shown, bands)
    return content


def _result_path(out: Path, name: str) -> Path:
    return out / "results" / f"{(NETWORKS | FILTERS)[name]}.json"


def _result(name: str, scores: Mapping[str, Scores]) -> dict[str, Any]:
    """The result file of a contestant, as those of a recipe of series."""
    return {
        "format": SeriesRuns.form,
        "recipe": "demo of series",
        "label": name,
        "seed": TRAINING.seed,
        "scores": dict(scores),
        "environment": environment(),
    }


def _draw(out: Path, shown: SimulatedSeries, bands: Mapping[str, Any]) -> None:
    """The figure of one series, with what the contestants that are finished make of it."""
    times, values, wrong = (x[0].flatten().numpy() for x in (shown.times, shown.values, shown.wrong))
    signal_times = torch.cat([shown.times, shown.query_times], dim=1)[0].numpy()
    signal = torch.cat([shown.signal, shown.future], dim=1)[0].flatten().numpy()
    figure = filtered_series((times, values, wrong), (signal_times, signal), bands, float(times[-1]))
    save(figure, out / "figure.png")


def _learned(name: str, progress: StageProgress | None) -> PredictOf:
    """A network after its training."""

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(Stage("training", name), done, total)

    network = build_network(NETWORKS[name], _SIZES, SETTING, TRAINING.seed)
    train_network(network, SETTING, TRAINING, report)
    return lambda _: network_predictor(network)


def _band(predict: Predict, series: SimulatedSeries) -> tuple[Any, ...]:
    """Times, means and 90 % intervals at the readings and of the forecasts, of one series."""
    batch = series.batch()
    with torch.no_grad():
        found = predict(batch)
    return tuple(x[0].flatten().numpy() for x in (batch.times, found.mean, *central_interval(found, 0.9)))
