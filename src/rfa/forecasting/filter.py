"""Forecasts by filters: one for each channel, its components and its scale given or chosen, and its outliers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from rfa.checks import require
from rfa.progress import Stage, StageProgress

from .choice import Choice, choose
from .components import components_of
from .request import LEVELS, ChannelForecast, ForecastRequest
from .rolling import Channel, FittedChannel, PastErrors
from .scale import COUNTS, SCALES, allowed_scales, supported_growth
from .table import SeriesTable

_MIN_READINGS = 4  # readings of a channel
_FITTED_READINGS = 1000  # readings, the last ones, to which parameters are fitted
_NOTED_REFUSED, _MAX_REFUSED = 0.05, 0.2  # shares of the readings that are refused: it is said; they are no outliers


def forecast_channels(
    request: ForecastRequest,
    table: SeriesTable,
    query_times: Float[np.ndarray, " steps"],
    progress: StageProgress | None = None,
) -> list[ChannelForecast]:
    """Forecasts by a `RobustFilter` for each channel.

    Its parameters are fitted to the last 1,000 readings, or to two of the longest period. Estimates and outliers of
    the past are the smoother's, over the whole series. Bands are those of `PastErrors`. Angles are without jumps, as
    `continuous_angles` makes them; `ChannelForecast.in_turns_of` brings them back.

    Args:
        request: what to forecast.
        table, query_times: as `read_request` returns them.
        progress: called with the stage, the amount done and the total.

    Raises:
        ValueError: for what cannot be forecast.
    """
    if request.components is not None:
        components_of(request.components, table)  # errors come before the first fit
    scales = list[list[str]]()
    for name, values in zip(table.channels, table.values.T, strict=True):
        readings = int((~np.isnan(values)).sum())
        ways = f"at least {_MIN_READINGS}; --values names other columns"
        require(readings >= _MIN_READINGS, "values", f"{readings} readings in {name!r}", ways)
        angle, of = request.angle, (name, values, request.positive, request.counts, table.lines)
        scales.append(["linear"] if angle else allowed_scales(*of))
    return [_forecast_channel(request, table, query_times, k, one, progress) for k, one in enumerate(scales)]


def _forecast_channel(
    request: ForecastRequest,
    table: SeriesTable,
    query_times: np.ndarray,
    place: int,
    scales: list[str],
    progress: StageProgress | None,
) -> ChannelForecast:
    name, values = table.channels[place], table.values[:, place]
    table, values, _ = Channel(table, values, (values, values)).with_readings()
    times, seen = table.times, np.flatnonzero(~np.isnan(values))
    tail = int(seen[-min(_FITTED_READINGS, len(seen))])

    def say(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(Stage(stage, name), done, total)

    def channel(scale: str, first: int = 0) -> Channel:
        on_scale = SCALES[scale].forth(values)
        return Channel(table.rows(slice(first, None)), on_scale[first:], (times, on_scale)).with_readings()

    if request.components is None:
        say("choosing", 0, 1)
        recent = {scale: channel(scale, tail) for scale in scales}
        choice = choose(recent, query_times, request.robust, lambda *far: say("choosing", *far))
    else:
        choice = Choice(request.components, scales[0], {})
    model = components_of(choice.words, table)
    longest = max((component.shortest_span() for component in model.components.components), default=0.0)
    if times[-1] - times[tail] < 2 * longest:
        tail = int(np.searchsorted(times, times[-1] - 2 * longest))
    say("fitting", 0, 3)
    try:
        last, whole = channel(choice.scale, tail), channel(choice.scale)
        return _fitted_forecast(request, name, choice, last, whole, query_times, say)
    except ValueError as error:
        raise ValueError(f"{error} (column {name!r})") from None


def _fitted_forecast(
    request: ForecastRequest,
    name: str,
    choice: Choice,
    recent: Channel,
    whole: Channel,
    query_times: np.ndarray,
    say: Callable[[str, int, int], None],
) -> ChannelForecast:
    """The forecast of a channel whose model is chosen: fitted to recent readings, filtered over all."""
    times, last, back = whole.times, whole.times[-1], SCALES[choice.scale].back
    readings, notes, robust = int((~np.isnan(recent.values)).sum()), list[str](), request.robust
    fitted = FittedChannel.of(recent, choice.words, robust)
    refused = float(np.sum(fitted.filter.filter().outliers)) / readings
    if robust and refused > _MAX_REFUSED:
        robust, fitted = False, FittedChannel.of(recent, choice.words, False)
        notes.append(f"{name}: {refused:.0%} of the readings would be refused, so all of them count fully")
    elif refused > _NOTED_REFUSED:
        notes.append(f"{name}: {refused:.0%} of the readings are refused; the bands count them")
    say("fitting", 1, 3)
    known, sensors = fitted.filter.parameters, sorted({*(whole.sensor or ())})
    if sensors:  # one that the last readings lack takes the median noise of the others
        common = np.median([value for key, value in known.items() if key.startswith("sigma2.irregular.")])
        known = {f"sigma2.irregular.{sensor}": float(common) for sensor in sensors} | known
    final = FittedChannel.of(whole, choice.words, robust, fixed=known)
    past = final.filter.smooth()
    outliers = np.asarray(past.outliers)
    say("fitting", 2, 3)
    season = final.season_at(query_times, last)
    missing = season is not None and bool(np.isnan(season).any())
    require(not missing, "components", " ".join(choice.words), "readings at each phase of the free season")
    ahead = final.filter.forecast(query_times, sensor=sensors[0] if sensors else None, offset=season)
    lags, deviation = query_times - last, np.sqrt(ahead.variance)
    errors = PastErrors.of(final, float(lags[-1]), outliers)
    halves = [errors.half_widths(level, lags, deviation) for level in LEVELS]
    parts = np.stack([0 * deviation, *(sign * half for half in halves for sign in (-1, 1))])
    found = ahead.mean + parts
    say("fitting", 3, 3)
    if choice.scale == COUNTS and found.min() < 0:
        notes.append(f"{name}: whole numbers of at least 0 are counts: no forecast is negative (--counts: their root)")
    elif choice.scale in ("log", "square root"):
        notes.append(f"{name}: filtered on a {choice.scale} scale, so no forecast is negative; `mean` is the median")
    if choice.scale == "log":
        most, most_end = supported_growth(times, np.where(outliers, np.nan, whole.values), lags)
        bounded = np.minimum(np.minimum(ahead.mean, most) + parts, most_end)
        if (bounded < found).any():
            notes.append(f"{name}: {readings} readings do not support so much growth: the forecast is bounded")
        found = bounded
    if not fitted.filter.converged:
        notes.append(f"{name}: the search of the parameters found no maximum (`converged`): others may fit better")
    mean, *ends = back(found)
    unknown = np.zeros(len(times), dtype=bool) if final.season is None else np.isnan(final.season)
    expected, lower, upper = (back(np.where(unknown, np.nan, part)) for part in (past.mean, *past.interval(0.9)))
    cleaned = {"time": times, "reading": back(whole.values), "estimate": expected, "lower_90": lower, "upper_90": upper}
    label, given = final.label(), " + ".join(choice.words)
    details: dict[str, Any] = {
        "components": label,
        "scale": choice.scale,
        "robust": robust,
        "chosen": request.components is None,
        "tried": {words.replace(given, label): score for words, score in choice.tried.items()},
        "parameters": final.filter.parameters,
        "log_likelihood": fitted.filter.log_likelihood,
        "fitted_readings": readings,
        "converged": fitted.filter.converged,
        **({"sensor": str(ahead.sensor[0])} if sensors else {}),
    }
    more = {"weight": past.weights, "outlier": outliers, **({"sensor": whole.sensor} if sensors else {})}
    intervals = dict(zip(LEVELS, zip(ends[::2], ends[1::2], strict=True), strict=True))
    rows = pd.DataFrame({**cleaned, **more})
    return ChannelForecast(name=name, mean=mean, intervals=intervals, past=rows, notes=notes, details=details)
