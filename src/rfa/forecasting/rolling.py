"""One channel, its model fitted, what the model would have forecast from earlier readings, and how wrong it was."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from rfa.estimation import RobustFilter

from .components import components_of, free_season, period_text
from .table import SeriesTable

_ORIGINS, _TARGETS = 40, 60  # of rolling forecasts, and readings that each of them forecasts, at most
_POOLED_SHARE = 0.25  # of the horizon: errors of steps so near to each other are pooled
_FEW_ERRORS_CORRECTION = 0.5  # share of the correction for few errors, which is right where they are independent
_MAX_PROBABILITY = 0.995  # to which it may raise the probability of a band
_MIN_ERRORS = 20  # errors
_RECENT_READINGS = 400  # readings, at most half of the series, over which origins are spread


class Channel(NamedTuple):
    """A channel of a table on the scale on which it is filtered, and its past, in which free seasons are found."""

    table: SeriesTable
    values: Float[np.ndarray, " T"]  # of the rows of the table, NaN where nothing was read
    past: tuple[Float[np.ndarray, " all"], Float[np.ndarray, " all"]]  # times and values of all rows

    @property
    def times(self) -> Float[np.ndarray, " T"]:
        """Times of the rows."""
        return self.table.times

    @property
    def sensor(self) -> list[str] | None:
        """Sensors of the rows, None where no column names sensors."""
        return list(self.table.sensor) or None

    def with_readings(self) -> "Channel":
        """Without the rows of sensors that have no reading here: they have no noise to fit."""
        if not self.table.sensor:
            return self
        sensor = np.asarray(self.table.sensor)
        rows = np.isin(sensor, sensor[~np.isnan(self.values)])
        return self._replace(table=self.table.rows(rows), values=self.values[rows])


class Origins(NamedTuple):
    """Which readings are forecast from which: their rows, a pair for each."""

    rows: Int[np.ndarray, " pairs"]
    targets: Int[np.ndarray, " pairs"]

    @classmethod
    def of(cls, channel: Channel, horizon: float) -> "Origins":
        """Forecasts of the readings within the horizon, from up to 40 readings of the later half of the series."""
        times, seen = channel.times, np.flatnonzero(~np.isnan(channel.values))
        count = len(seen)
        first = seen[max(count // 2, count - _RECENT_READINGS)]
        last = int(np.searchsorted(times, times[-1] - horizon, side="right")) - 1
        if last <= first:  # a short series, or a far horizon
            first = seen[max(count // 3, min(3, count - 1))]
        spread = np.linspace(first, max(last, first), _ORIGINS).astype(int)
        rows, targets = list[int](), list[int]()
        for row in sorted({int(seen[seen <= place].max()) for place in spread}):
            later = seen[(times[seen] > times[row]) & (times[seen] <= times[row] + horizon * (1 + 1e-6))]
            if len(later) > _TARGETS:
                later = later[np.linspace(0, len(later) - 1, _TARGETS).astype(int)]
            rows += [row] * len(later)
            targets += later.tolist()
        return cls(np.array(rows, dtype=np.int64), np.array(targets, dtype=np.int64))


@dataclass(frozen=True)
class FittedChannel:
    """A channel and the filter of its model."""

    channel: Channel
    filter: RobustFilter
    words: list[str]  # of the components
    period: float | None  # of the free season
    season: Float[np.ndarray, " T"] | None  # the free season at the rows, NaN in the first period

    @classmethod
    def of(cls, channel: Channel, words: list[str], robust: bool, **options: Any) -> "FittedChannel":
        """Fit the model of some words. `options` are those of `RobustFilter.fit`."""
        times, past = channel.past
        model, values, season = components_of(words, channel.table, float(times[-1] - times[0])), channel.values, None
        if model.period is not None:
            season = free_season(times, past, model.period, channel.times)
            values = np.where(np.isnan(season), np.nan, values)
        fitted, offset = RobustFilter(model.components, robust), None if season is None else np.nan_to_num(season)
        fitted.fit(channel.times, values, sensor=channel.sensor, offset=offset, **options)
        return cls(channel, fitted, words, model.period, season)

    def label(self) -> str:
        """The words of the components, of a cycle with its fitted period, not the one where its search began."""
        frequency, unit = self.filter.parameters.get("frequency.cycle"), self.channel.table.unit
        own = "" if frequency is None else f"cycle:{period_text(2 * np.pi / frequency)}{unit}"
        return " + ".join(own if word.partition(":")[0] == "cycle" else word for word in self.words)

    def season_at(self, times: Float[np.ndarray, " n"], until: Any) -> Float[np.ndarray, " n"] | None:
        """The free season at times, by readings until others."""
        return None if self.period is None else free_season(*self.channel.past, self.period, times, until)

    def rolling(self, origins: Origins) -> tuple[Float[np.ndarray, " pairs"], Float[np.ndarray, " pairs"]]:
        """Mean and variance of the readings that are forecast, each from its origin."""
        mean, variance = self.filter.rolling_forecast(*origins)
        times = self.channel.times
        season = self.season_at(times[origins.targets], times[origins.rows])
        if season is not None:
            assert self.season is not None
            mean = mean - np.nan_to_num(self.season[origins.targets]) + season
        return mean, variance


class PastErrors(NamedTuple):
    """What rolling forecasts have got wrong, by which bands are as wide as such errors (conformal prediction).

    Fields:
        lags: from the origin to the reading, `(pairs,)`.
        errors: their absolute size, over the standard deviation that the model has expected.
        horizons: how many horizons the origins span: so many errors of a step are independent.
        horizon: the longest lag.
        refused: the share of forecasts whose reading is refused. They lie outside of each band.
    """

    lags: Float[np.ndarray, " pairs"]
    errors: Float[np.ndarray, " pairs"]
    horizons: float
    horizon: float
    refused: float = 0.0

    @classmethod
    def of(cls, fitted: FittedChannel, horizon: float, refused: Bool[np.ndarray, " T"]) -> "PastErrors":
        """Errors of a model. Forecasts from refused readings do not count; of those of such readings the share does."""
        origins, times = Origins.of(fitted.channel, horizon), fitted.channel.times
        mean, variance = fitted.rolling(origins)
        errors = np.abs(fitted.channel.values[origins.targets] - mean) / np.sqrt(variance)
        known, wrong = np.isfinite(errors) & ~refused[origins.rows], refused[origins.targets]
        kept, share = known & ~wrong, float(wrong[known].mean()) if known.any() else 0.0
        rows, lags = origins.rows[kept], (times[origins.targets] - times[origins.rows])[kept]
        span = float(np.ptp(times[rows])) if len(rows) else 0.0
        return cls(lags, errors[kept], 1 + span / horizon, horizon, share)

    def half_widths(
        self, probability: float, lags: Float[np.ndarray, " steps"], deviation: Float[np.ndarray, " steps"]
    ) -> Float[np.ndarray, " steps"]:
        """Half widths of the band that holds a reading with this probability, `(steps,)`, by the model's deviations.

        The quantile of the errors at lags within a quarter of the horizon, of a higher level where readings are
        refused. Where few errors are independent it is wider, as a normal band of a higher level is: the largest error
        of all would be that of one reading. Where there are fewer than 20 errors, the model's band. It gets narrower
        along the horizon only as far as the model's own one does.

        Source: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (2005).
        """
        normal = NormalDist().inv_cdf((1 + probability) / 2)
        if len(self.errors) < _MIN_ERRORS:
            return normal * deviation
        higher = min(_MAX_PROBABILITY, probability * (1 + _FEW_ERRORS_CORRECTION / self.horizons))
        wider = NormalDist().inv_cdf((1 + higher) / 2) / normal
        level = min(1.0, probability / (1 - self.refused))
        order = np.argsort(self.lags, kind="stable")
        known, errors = self.lags[order], self.errors[order]
        margin = _POOLED_SHARE * self.horizon * (1 + 1e-9)  # in any unit of time, whose lags are rounded
        ends = np.searchsorted(known, [lags - margin, lags + margin])
        near = ((first, last) if last - first >= _MIN_ERRORS else (0, len(errors)) for first, last in ends.T.tolist())
        widest = np.maximum.accumulate(deviation)
        found = np.maximum.accumulate([np.quantile(errors[slice(*some)], level) for some in near] * widest)
        return wider * found * deviation / np.where(widest > 0, widest, 1.0)
