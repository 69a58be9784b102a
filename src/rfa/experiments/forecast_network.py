"""Forecasts by a trained network, and what it takes for outliers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import require
from rfa.data.series_table import SeriesTable
from rfa.evaluation import central_interval
from rfa.models import RFAForTimeSeries

from .forecast_windows import FEWEST_READINGS
from .forecasting import LEVELS, ChannelForecast, Forecaster
from .network_folder import load_network, predicted

_QUERIES = 1024  # asked at once; no query sees another one
_FAR = 6.0  # deviations of its one-step forecast at which a reading is an outlier; 4 are common where tails are heavy
_BEFORE = 1e-6  # typical gaps before a reading its one-step forecast is asked for, so that it does not see the reading


def forecast_by_network(folder: Path) -> tuple[Forecaster, dict[str, Any]]:
    """Forecasts by the network of a folder, all channels at once, and the folder's record.

    An outlier is a reading more than six deviations from what the network expects after the earlier readings. The
    deviation is the scale of the Student-t distribution, which a share of wrong readings in training hardly changes. A
    network gives no weights.

    Raises:
        ValueError: as `load_network`. The forecaster raises it for other channels, times of another kind, and sensors.
    """
    model, record = load_network(folder)

    def forecast(table: SeriesTable, query_times: Float[np.ndarray, " steps"]) -> list[ChannelForecast]:
        asked = table.channels
        table, ratio = _as_trained(table, record)
        last = table.times[-1]
        recent = table.rows(slice(max(0, len(table.times) - record["context"]), None))
        leads = torch.tensor(query_times) * ratio - last
        found = [predicted(model, recent, last, part) for part in leads.split(_QUERIES)]
        ends = {}
        for level in LEVELS:
            lower, upper = zip(*(central_interval(part, level) for part in found), strict=True)
            ends[level] = torch.cat(lower).numpy(), torch.cat(upper).numpy()
        past, outliers = _judged(model, table, record["context"])
        result = []
        for place, name in enumerate(table.channels):
            channel = past[1][:, place], past[2][:, place], past[3][:, place]
            result.append(
                ChannelForecast(
                    name=name,
                    mean=torch.cat([part.mean for part in found])[:, place].numpy(),
                    intervals={level: (lower[:, place], upper[:, place]) for level, (lower, upper) in ends.items()},
                    past=(past[0] / ratio, *channel),
                    outliers=[
                        {
                            "time": table.label(float(past[0][row])),
                            "at": float(past[0][row] / ratio),
                            "value": float(past[4][row, place]),
                            "expected": float(past[1][row, place]),
                            "weight": None,
                        }
                        for row in np.flatnonzero(outliers[:, place])
                    ],
                )
            )
        return sorted(result, key=lambda one: asked.index(one.name))

    return forecast, record


def _as_trained(table: SeriesTable, record: dict[str, Any]) -> tuple[SeriesTable, float]:
    """The series with the network's channels and unit, and how many of its units are one of the series'."""
    channels = record["channels"]
    expected = f"the channels of the network, {', '.join(channels)}"
    require(sorted(table.channels) == sorted(channels), "values", list(table.channels), expected)
    kinds = {True: "dates", False: "numbers"}
    given, trained = bool(table.unit), record["unit"] is not None
    require(given == trained, "time", kinds[given], f"{kinds[trained]}, as in the network's training")
    require(not table.sensor, "sensor", "a column of sensors", "none with a network; --model filter takes several")
    seen = int((~table.values.isnan().all(1)).sum())
    require(seen >= FEWEST_READINGS, "file", f"{seen} readings", f"at least {FEWEST_READINGS} for a network")
    order = [table.channels.index(name) for name in channels]
    table = table._replace(values=table.values[:, order], channels=tuple(channels))
    unit = record["unit"] or ""
    return table.in_unit(unit), float(table._replace(times=torch.ones(1)).in_unit(unit).times)


def _judged(model: RFAForTimeSeries, table: SeriesTable, context: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """One-step forecasts of the past.

    Returns:
        Times `(n,)`, means, lower and upper ends of the 90 % interval, and values, `(n, channels)` each. And which of
        the values are outliers.
    """
    before, half = _BEFORE * model.config.typical_gap, max(1, context // 2)
    parts: list[list[Tensor]] = []
    total = len(table.times)
    for first in range(0, max(1, total - half), half):
        window = table.rows(slice(first, first + context))
        judged = slice(min(FEWEST_READINGS, total - 1) if first == 0 else context - half, None)
        times = window.times[judged]
        if not len(times):
            continue
        found = predicted(model, window, window.times[-1], times - window.times[-1] - before)
        deviation = found.scale  # type: ignore[attr-defined]
        parts.append([times, found.mean, *central_interval(found, 0.9), window.values[judged], deviation])
    joined = [torch.cat(each).numpy() for each in zip(*parts, strict=True)]
    deviation = joined.pop()
    return tuple(joined), np.abs(joined[4] - joined[1]) > _FAR * deviation
