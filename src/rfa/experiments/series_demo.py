"""The demo of series: two networks learn to filter a tracked oscillator, beside filters that know its model."""

import json
from pathlib import Path
from typing import Any

import torch

from rfa.data.simulated_series import SimulatedSeries, SimulatedSetting, simulate_series
from rfa.evaluation import central_interval
from rfa.files import write_text_whole
from rfa.progress import Stage, StageProgress
from rfa.report.figures import filtered_series, save
from rfa.training.series import SeriesTraining

from .series_recipe import SeriesContestant, SeriesRecipe, SeriesRun
from .series_runner import Predict, filter_of, network_predictions, score, trained_network

SETTING = SimulatedSetting(length=48, horizon=6.0, forecasts=24)
TRAINING = SeriesTraining(steps=240, batch_size=32, learning_rate=1e-2)
COLUMNS = {"as trained": SETTING, "20 % of readings x30": SETTING.changed(outliers=0.2, size=30.0)}
COLUMNS["four times as many"] = SETTING.changed(length=192)
SERIES = 32
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONTESTANTS = {
    "RFA": SeriesContestant("RFA", "x2-riccati-alibi", _SIZES),
    "RoPE on real times": SeriesContestant("RoPE", "b1-rope", _SIZES),
    "robust filter, true model": SeriesContestant("robust"),
    "Kalman filter, true model": SeriesContestant("kalman"),
}


def run_series_demo(
    out: str | Path, *, overwrite: bool = False, progress: StageProgress | None = None
) -> dict[str, Any]:
    """Train two networks, score them and two filters, write `results.json` and `figure.png`.

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
    if there and not (overwrite and there <= {"results.json", "figure.png"}):
        expected = "an empty folder, or --overwrite" if there <= {"results.json", "figure.png"} else "an empty folder"
        raise ValueError(f"out: {out} has {', '.join(sorted(there))[:80]}, expected {expected}")
    runs = tuple(SeriesRun(contestant, 0) for contestant in CONTESTANTS.values())
    recipe = SeriesRecipe(
        Path("demo"), "demo", "demo", SETTING, TRAINING, (TRAINING.learning_rate,), runs, COLUMNS, SERIES
    )
    shown = simulate_series(SETTING, 1, torch.Generator().manual_seed(7))
    results: dict[str, dict[str, dict[str, float]]] = {}
    bands = {}
    for name, run in zip(CONTESTANTS, runs, strict=True):
        network = None
        if run.contestant.preset is not None:
            network, _ = trained_network(recipe, run, TRAINING.learning_rate, progress)
        results[name] = {}
        for index, (column, setting) in enumerate(COLUMNS.items()):
            if progress is not None:
                progress(Stage("evaluation", run.contestant.label), index + 1, len(COLUMNS))
            predict = _predict(network, run.contestant.label, setting)
            found = score(predict, setting, SERIES)
            results[name][column] = {part: scores["mse"] for part, scores in found.items()}
        if run.contestant.label != "kalman":
            bands[name] = _band(_predict(network, run.contestant.label, SETTING), shown)
    content = {"settings": list(COLUMNS), "mse": results}
    write_text_whole(out / "results.json", json.dumps(content, indent=2) + "\n")
    times, values, wrong = (x[0].flatten().numpy() for x in (shown.times, shown.values, shown.wrong))
    signal_times = torch.cat([shown.times, shown.query_times], dim=1)[0].numpy()
    signal = torch.cat([shown.signal, shown.future], dim=1)[0].flatten().numpy()
    figure = filtered_series((times, values, wrong), (signal_times, signal), bands, float(times[-1]))
    save(figure, out / "figure.png")
    return content


def _predict(network: Any, label: str, setting: SimulatedSetting) -> Predict:
    if network is None:
        return filter_of(label)(setting)
    return lambda series: network_predictions(network, series)


def _band(predict: Predict, series: SimulatedSeries) -> tuple[Any, ...]:
    """Times, means and 90 % intervals at the readings and of the forecasts, of one series."""
    with torch.no_grad():
        found = predict(series)
    parts = [(part.mean, *central_interval(part, 0.9)) for part in found]
    mean, lower, upper = (torch.cat(both, dim=1)[0, :, 0].numpy() for both in zip(*parts, strict=True))
    return torch.cat([series.times, series.query_times], dim=1)[0].numpy(), mean, lower, upper
