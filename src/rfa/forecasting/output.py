"""The forecast of a CSV file as files: `forecast.csv`, `cleaned.csv`, `forecast.json` and `figure.png`."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from rfa.checks import require
from rfa.environment import environment
from rfa.files import sha256, whole_name, write_text_whole
from rfa.progress import StageProgress

from .filter import forecast_channels
from .request import ChannelForecast, ForecastRequest, read_request
from .scale import continuous_angles
from .table import SeriesTable

FORECAST_FORMAT = 1
FILES = ("forecast.csv", "cleaned.csv", "forecast.json", "figure.png")


def forecast_file(
    request: ForecastRequest, out: str | Path, *, overwrite: bool = False, progress: StageProgress | None = None
) -> dict[str, Any]:
    """Forecast a CSV file, and write `forecast.csv`, `cleaned.csv`, `figure.png` and last `forecast.json`.

    Args:
        request: what to forecast.
        out: the folder.
        overwrite: replace a forecast that is there.
        progress: called with the stage, the amount done and the total.

    Returns:
        The content of `forecast.json`.

    Raises:
        ValueError: naming the argument, for bad data or a folder with other files.
        OSError: if a file cannot be written.
    """
    out = Path(out)
    check_folder(out, FILES, overwrite)
    given, query_times = read_request(request)
    table, period = given, request.angle
    if period is not None:
        table = given._replace(values=np.stack([continuous_angles(each, period) for each in given.values.T], axis=1))
    drawn = forecasts = forecast_channels(request, table, query_times, progress)
    if period is not None:
        forecasts = [one.in_turns_of(each, period) for one, each in zip(drawn, given.values.T, strict=True)]
    bad = [one.name for one in forecasts if not all(np.isfinite(x).all() for x in (one.mean, *one.intervals[0.9]))]
    said, expected = f"numbers that are not finite for {bad}", "finite ones; are values or times too large?"
    require(not bad, "forecast", said, expected)
    content = _content(request, table, query_times, forecasts)
    ahead, past = list[pd.DataFrame](), list[pd.DataFrame]()
    for one in forecasts:
        rows: dict[str, Any] = {"time": table.labels(query_times), "channel": one.name, "mean": one.mean}
        for level, (lower, upper) in one.intervals.items():
            rows |= {f"lower_{level * 100:.0f}": lower, f"upper_{level * 100:.0f}": upper}
        ahead.append(pd.DataFrame(rows))
        past.append(one.past.assign(time=table.labels(one.past["time"].to_numpy())))
        past[-1].insert(1, "channel", one.name)
    from .figure import forecast_figure, save  # matplotlib only where a figure is drawn

    save(forecast_figure(drawn, table, query_times), out / "figure.png")
    for name, parts in (("forecast.csv", ahead), ("cleaned.csv", past)):
        write_text_whole(out / name, pd.concat(parts).to_csv(index=False))
    write_text_whole(out / "forecast.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    return content


def check_folder(out: Path, files: Collection[str], overwrite: bool) -> None:
    """Raise `ValueError` unless the folder is free, or holds a forecast, of these files, that may be replaced."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file, expected a folder")
    there = {whole_name(path) for path in out.iterdir()} if out.exists() else set()
    if foreign := sorted(there - {*files}):
        raise ValueError(f"out: {out} has other files, {', '.join(foreign)[:80]}, expected an empty folder")
    if there and not overwrite:
        held = ", ".join(sorted(there))
        raise ValueError(f"out: {out} has {held} already, expected an empty folder, or --overwrite")


def _content(
    request: ForecastRequest,
    table: SeriesTable,
    query_times: Float[np.ndarray, " steps"],
    forecasts: list[ChannelForecast],
) -> dict[str, Any]:
    """The content of `forecast.json`. An outlier has its time as the file writes it, and what was expected there."""
    times, last = table.labels(query_times), float(table.times[-1])
    channels = dict[str, Any]()
    for one in forecasts:
        outliers = one.past[one.past["outlier"]]
        found = outliers.rename(columns={"reading": "value", "estimate": "expected"})[["value", "expected", "weight"]]
        found.insert(0, "time", table.labels(outliers["time"].to_numpy()))
        channels[one.name] = {
            "times": times,
            "mean": one.mean.tolist(),
            "intervals": {
                f"{level:.0%}"[:-1]: {"lower": lower.tolist(), "upper": upper.tolist()}
                for level, (lower, upper) in one.intervals.items()
            },
            "outliers": found.to_dict("records"),
            **one.details,
        }
    return {
        "format": FORECAST_FORMAT,
        "robust": request.robust,
        "file": str(request.file),
        "sha256": sha256(request.file),
        "time": request.time,
        "unit": table.unit or None,
        "readings": dict(zip(table.channels, (~np.isnan(table.values)).sum(0).tolist(), strict=True)),
        "last": table.label(last),
        "horizon": request.horizon,
        "notes": [*table.notes, *(note for one in forecasts for note in one.notes)],
        "step": float(query_times[-1] - last) / len(query_times),
        "channels": channels,
        "environment": environment(),
    }
