"""Forecasts by filters: one for each channel, its components given or chosen, and its outliers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from rfa.checks import require
from rfa.estimation import RobustFilter
from rfa.progress import Stage, StageProgress

from .components import chosen_components, components_of
from .request import LEVELS, ChannelForecast, Forecaster, ForecastRequest, outlier_entry
from .table import SeriesTable

_FEWEST = 4  # readings of a channel
_FITTED = 1000  # readings, the last ones, to which parameters are fitted


def forecast_by_filter(request: ForecastRequest, progress: StageProgress | None = None) -> Forecaster:
    """Forecasts by a `RobustFilter` for each channel.

    Its parameters are fitted to the last 1,000 readings, or to two of the longest period. Estimates and outliers of
    the past are the smoother's, over the whole series.
    """

    def forecast(table: SeriesTable, query_times: Float[np.ndarray, " steps"]) -> list[ChannelForecast]:
        if request.components is not None:
            components_of(request.components, table)  # errors come before the first fit
        for name, readings in zip(table.channels, (~table.values.isnan()).sum(0).tolist(), strict=True):
            require(readings >= _FEWEST, "values", f"{readings} readings in {name!r}", f"at least {_FEWEST} for a fit")
        return [_filtered(request, table, query_times, place, progress) for place in range(len(table.channels))]

    return forecast


def _filtered(
    request: ForecastRequest,
    table: SeriesTable,
    query_times: np.ndarray,
    place: int,
    progress: StageProgress | None,
) -> ChannelForecast:
    name = table.channels[place]
    table, values = _with_readings(table, table.values[:, place].numpy())

    def say(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(Stage(stage, name), done, total)

    seen = np.flatnonzero(~np.isnan(values))
    words, tried = request.components, dict[str, float]()
    tail = slice(int(seen[-min(_FITTED, len(seen))]), None)
    if words is None:
        say("choosing", 0, 1)
        recent = _with_readings(table.rows(tail), values[tail])
        words, tried = chosen_components(*recent, lambda *far: say("choosing", *far))
    model = components_of(words, table)
    longest = max((component.shortest_span() for component in model.components), default=0.0)
    times = table.times.numpy()
    if times[-1] - times[tail.start] < 2 * longest:
        tail = slice(int(np.searchsorted(times, times[-1] - 2 * longest)), None)
    sensor = list(table.sensor) or None
    recent = _with_readings(table.rows(tail), values[tail])
    say("fitting", 0, 3)
    try:
        fitted = RobustFilter(model, request.robust)
        fitted.fit(recent[0].times.numpy(), recent[1], sensor=list(recent[0].sensor) or None)
        say("fitting", 1, 3)
        known = fitted.parameters
        if sensor is not None:  # a sensor that the last readings lack takes the noise of the others
            known = _with_all_sensors(known, sorted(set(table.sensor)))
        whole = RobustFilter(model, request.robust).fit(times, values, sensor=sensor, fixed=known)
        past = whole.smooth()
        say("fitting", 2, 3)
        ahead = whole.forecast(query_times)
    except ValueError as error:
        raise ValueError(f"{error} (column {name!r})") from None
    say("fitting", 3, 3)
    outliers = [
        outlier_entry(table.label(times[row]), times[row], values[row], past.mean[row], past.weights[row])
        for row in np.flatnonzero(past.outliers)
    ]
    details: dict[str, Any] = {
        "components": " + ".join(words),
        "chosen": request.components is None,
        "tried": tried,
        "parameters": whole.parameters,
        "log_likelihood": fitted.log_likelihood,
        "fitted_readings": int((~np.isnan(values[tail])).sum()),
        "converged": fitted.converged,
    }
    if sensor is not None:
        details["sensor"] = str(ahead.sensor[0])
    return ChannelForecast(
        name=name,
        mean=ahead.mean,
        intervals={level: ahead.interval(level) for level in LEVELS},
        past=(times, past.mean, *past.interval(0.9)),
        outliers=outliers,
        details=details,
    )


def _with_readings(table: SeriesTable, values: np.ndarray) -> tuple[SeriesTable, np.ndarray]:
    """The rows of sensors that have a reading among the values, and the values: others have no noise to fit."""
    if not table.sensor:
        return table, values
    sensor = np.asarray(table.sensor)
    rows = np.isin(sensor, sensor[~np.isnan(values)])
    return table.rows(rows), values[rows]


def _with_all_sensors(parameters: dict[str, float], sensors: Sequence[str]) -> dict[str, float]:
    """With the median noise for sensors that the parameters lack."""
    common = float(np.median([value for name, value in parameters.items() if name.startswith("sigma2.irregular.")]))
    return {f"sigma2.irregular.{sensor}": common for sensor in sensors} | parameters
