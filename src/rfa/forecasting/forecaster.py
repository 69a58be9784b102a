"""Forecasts of one series or of a panel: tables in, tables out. The numbers are of `engine`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rfa.checks import require
from rfa.files import write_whole
from rfa.progress import Progress
from rfa.steps import Length, StampKind, Steps, horizon, past_windows, steps_of_series, whole_number

from . import engine
from .frames import Ids, Names, Panel, Quantiles, future_regressors, read_panel, stamp_column
from .saved import LIBRARIES, packed, unpacked

_BLOCK = 1024  # series that are handed to the engine at once: so much work Ctrl-C loses
_HISTORY = 90  # percent: the engine's band of the past
_FEW = 5  # readings of which the simplest forecast is the median


class FailedSeries(NamedTuple):
    """A series that was not done as asked: its id, None where there is one series, and why."""

    id: Any
    reason: str


@dataclass
class _Fitted:
    """A series that was forecast."""

    place: int  # of its id
    steps: Steps
    first: float  # the position of its first stamp: the engine's times begin there
    ahead: np.ndarray  # stamps
    rows: list[tuple[np.ndarray, np.ndarray, engine.SeriesForecast]]  # stamps, values, what was said: of each call

    @property
    def forecast(self) -> engine.SeriesForecast:
        """The last one."""
        return self.rows[-1][2]


@dataclass
class _Forecasts:
    """What a call of `forecast` leaves for the others."""

    ids: Ids
    kind: StampKind
    h: int | Length
    bands: Quantiles
    regressors: list[str]
    series: dict[Any, _Fitted]  # by their keys


class Forecaster:
    """Forecasts with bands for one series, or for each series of a table.

    A series keeps its own times: gaps are gaps, irregular times are irregular, and missing or wrong readings are
    neither filled nor dropped. Each series is forecast by several robust filters, weighed by how they forecast before.

    A series that cannot be done does not stop the others: `failed` has its id and the reason. Cells that are no number
    are left out, which `failed` says too. Where one series is given, a `ValueError` is raised instead.

    Args:
        robust: whether wrong readings get a small weight. False: all readings count alike.
        id_col: the column of ids, of any type. A table without it is one series.
        time_col: the column of times: dates, with or without a zone, or numbers.
        target_col: the column of readings. Each other column is a regressor. Numbers may be written as text.
        workers: threads.
        season_length: the length of the season in steps, 0 for none. None: a year of months, quarters or weeks, a week
            of days (from two years on a year too), a day and a week of shorter steps; the readings decide on its use.

    Attributes:
        names, failed: the columns `(id, time, target)`; `FailedSeries(id, reason)` of the last call.

    Examples:
        >>> import pandas as pd
        >>> from rfa.forecasting import Forecaster
        >>> months = pd.date_range("2020-01-31", periods=48, freq="ME")
        >>> df = pd.DataFrame({"unique_id": "a", "ds": months, "y": range(48)})
        >>> Forecaster().forecast(df, h="3M", level=[90])["ds"].dt.day.tolist()
        [31, 29, 31]
    """

    _usual: Steps | None = None  # of the series of which these are some

    def __init__(
        self,
        robust: bool = True,
        id_col: str = "unique_id",
        time_col: str = "ds",
        target_col: str = "y",
        workers: int = 1,
        season_length: float | None = None,
    ):
        names = Names(id_col, time_col, target_col)
        names.check("id_col", "time_col", "target_col")
        require(len({*names}) == 3, "id_col, time_col, target_col", tuple(names), "three names")
        good = isinstance(season_length, int | float | np.number) and not isinstance(season_length, bool)
        good = season_length is None or (good and 0 <= season_length < np.inf)
        require(bool(good), "season_length", season_length, "a number of steps, or 0")
        self.robust = bool(robust)
        self.workers = whole_number("workers", workers)
        self.season_length = season_length
        self.failed: list[FailedSeries] = []
        self.names = names
        self._last: _Forecasts | None = None

    def forecast(
        self,
        df: Any,
        h: int | str,
        level: Iterable[float] | float | None = (80, 90),
        quantiles: Iterable[float] | None = None,
        X: Any = None,
        progress: Progress | None = None,
    ) -> Any:
        """Forecast each series after its last time.

        Args:
            df: a table of pandas or polars with a row for each reading, in any order; or a Series of pandas, whose
                index is the times. NaN and None are missing readings.
            h: a number of steps of each series, or a length: "24h", "12M", "52w". Stamps are on the calendar of the
                series: ends of months stay ends, midnights stay midnights in their zone.
            level: of the bands, in percent.
            quantiles: probabilities.
            X: future values of the regressors, joined by the names of columns, id and time.
            progress: called with the number of series that are done, and of all.

        Returns:
            A table of the library of `df`: id, time, `rfa` (the mean), then `rfa-lo-80`, `rfa-hi-80` for each level
            and `rfa-q-10` for each quantile (in percent). Ids, times and zone are of the types given.

        Raises:
            ValueError: for arguments or a table that cannot be read, or where no series can be done.
            KeyboardInterrupt: on Ctrl-C; what was done until then stays: `result`, `history`, `explain` have it.
        """
        steps_ahead, bands = horizon(h), Quantiles.of(level, quantiles)
        panel = read_panel(df, self.names)
        steps, ahead = self._ahead(panel, steps_ahead)
        future = future_regressors(panel, X, self.names, ahead)
        places = [place for place in ahead if place not in panel.refused]
        requests = []
        for place in places:
            readings = panel.stamps[place], panel.values[place], panel.regressors[place]
            requests.append(self._request(steps[place], *readings, ahead[place], future.get(place)))
        self._last = last = _Forecasts(panel.ids, panel.kind, steps_ahead, bands, panel.names, {})
        problems = panel.left_out | panel.refused
        try:
            for place, each in zip(places, self._results(requests, bands, progress), strict=True):
                if isinstance(each, str):
                    simple = _simplest(panel.values[place], len(ahead[place]), len(bands.columns), each)
                    if simple is None:
                        problems[place] = "; ".join(filter(None, [problems.get(place), each]))
                        continue
                    problems[place], each = simple.note, simple
                first = float(steps[place].positions(panel.stamps[place][:1])[0])
                rows = [(panel.stamps[place], panel.values[place], each)]
                last.series[panel.ids.keys[place]] = _Fitted(place, steps[place], first, ahead[place], rows)
        except KeyboardInterrupt:
            rest = [place for place in places if panel.ids.keys[place] not in last.series and place not in problems]
            self._report(panel, problems | dict.fromkeys(rest, "stopped by Ctrl-C before it was done"), None)
            raise
        self._report(panel, problems, last.series)
        return self.result()

    def result(self) -> Any:
        """The table of the last forecast, or of what Ctrl-C has left of it.

        Raises:
            ValueError: before `forecast`.
        """
        return self._table(list(self._forecasts.series.values()))

    def cross_validation(
        self,
        df: Any,
        h: int | str,
        n_windows: int = 1,
        step_size: int = 1,
        level: Iterable[float] | float | None = (80, 90),
        quantiles: Iterable[float] | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Forecast readings from those before them, at several earlier times.

        Args:
            df, h, level, quantiles, progress: as in `forecast`. Regressors of later rows are known.
            n_windows: number of cutoffs. The last one is `h` before the end.
            step_size: steps between cutoffs.

        Returns:
            A table as of `forecast`, with the last time before the forecast, `cutoff`, and the reading. Its rows are
            those of `df`; rows without a reading are left out.

        Raises:
            ValueError: as `forecast`. Series that are too short for all windows get those that there are.
        """
        steps_ahead, bands = horizon(h), Quantiles.of(level, quantiles)
        n_windows, step_size = whole_number("n_windows", n_windows), whole_number("step_size", step_size)
        panel = read_panel(df, self.names)
        requests, windows, steps = [], [], self._steps(panel)
        for place, step in steps.items():
            try:
                ends = past_windows(step, panel.stamps[place], steps_ahead, n_windows, step_size)
            except ValueError as error:
                panel.refused[place] = str(error)
                continue
            if len(ends) < n_windows:
                panel.left_out[place] = f"{len(ends)} of {n_windows} windows: it is too short for the others"
            for cut, end in ends:
                stamps, values, x = panel.stamps[place], panel.values[place], panel.regressors[place]
                future = x[cut:end] if panel.names else None
                if future is not None and np.isnan(future).any():
                    row = cut + int(np.isnan(future).any(axis=1).argmax())
                    panel.refused[place] = f"a regressor is missing at {panel.kind.label(stamps[row])}"
                    continue
                requests.append(self._request(step, stamps[:cut], values[:cut], x[:cut], stamps[cut:end], future))
                windows.append((place, cut, end))
        rows, results = [], self._results(requests, bands, progress, n_windows == 1)
        for (place, cut, end), each in zip(windows, results, strict=True):
            if isinstance(each, str):
                at = panel.kind.label(panel.stamps[place][cut - 1])
                panel.left_out[place] = f"the window from {at}: {each}"
            elif place not in panel.refused:
                seen = ~np.isnan(panel.values[place][cut:end])
                stamps = panel.stamps[place][cut:end][seen]
                cuts = np.full(len(stamps), panel.stamps[place][cut - 1])
                values = panel.values[place][cut:end][seen]
                rows.append((place, stamps, cuts, values, each.mean[seen], each.quantiles[seen]))
        self._report(panel, panel.left_out | panel.refused, rows)
        places = np.repeat([row[0] for row in rows], [len(row[1]) for row in rows])
        stamps, cuts, values, mean, quantiles_ = (np.concatenate(part) for part in list(zip(*rows, strict=True))[1:])
        columns = {
            self.names.time: stamp_column(self.names.time, stamps, panel.kind, panel.ids.backend),
            "cutoff": stamp_column("cutoff", cuts, panel.kind, panel.ids.backend),
            self.names.target: values,
            "rfa": mean,
            **dict(zip(bands.columns, quantiles_.T, strict=True)),
        }
        return panel.ids.table(columns, places, self.names.id)

    def update(self, df: Any) -> Any:
        """Go on with later readings, in constant time for each. Nothing is fitted again.

        Args:
            df: a table as of `forecast`, with rows after the last ones of their series.

        Returns:
            The forecast of the series in `df`, with the horizon and the bands of the last `forecast`.

        Raises:
            ValueError: before `forecast`, with regressors, for other columns or kinds of times, or where no series can
                be done. Series that are unknown, or rows that are not later, are in `failed`.
        """
        last = self._forecasts
        require(not last.regressors, "update", f"series with regressors, {last.regressors}", "forecast() with all rows")
        panel = read_panel(df, self.names, regressors=(), unit=last.kind.unit)
        require(panel.kind.name == last.kind.name, self.names.time, panel.kind.name, f"{last.kind.name}, as before")
        problems, done = panel.left_out | panel.refused, []
        for place, key in enumerate(panel.ids.keys):
            if place in panel.refused:
                continue
            before = last.series.get(key)
            if before is None or not before.forecast.state:
                problems[place] = "no forecast to go on from: call forecast() with its readings"
                continue
            stamps = panel.stamps[place]
            if stamps[0] <= before.rows[-1][0][-1]:
                late = f"{panel.kind.label(stamps[0])} is not after {last.kind.label(before.rows[-1][0][-1])}"
                problems[place] = f"{self.names.time}: {late}, the last one before"
                continue
            try:
                done.append(self._updated(before, stamps, panel.values[place]))
            except ValueError as error:
                problems[place] = str(error)
        self._report(panel, problems, done)
        return self._table(done)

    def history(self) -> Any:
        """Each reading of the last forecast with what the filters say of it.

        Returns:
            A table: id, time, the reading, `rfa` (its smoothed value) with a 90 % band, `weight` (1 ordinary, near 0
            refused), `outlier`, and `cleaned`: the reading, or the smoothed value of outliers and of missing ones.
            Rows of `update` have what was known when they came.

        Raises:
            ValueError: before `forecast`.
        """
        every = list(self._forecasts.series.values())
        parts = [part for each in every for part in each.rows]
        stamps, values = (np.concatenate([part[k] for part in parts]) for k in range(2))
        fitted, low, high, weights, outliers = (
            np.concatenate([getattr(said, name) for *_, said in parts])
            for name in ("fitted", "low", "high", "weights", "outliers")
        )
        columns = {
            self.names.time: stamps,
            self.names.target: values,
            "rfa": fitted,
            f"rfa-lo-{_HISTORY}": low,
            f"rfa-hi-{_HISTORY}": high,
            "weight": weights,
            "outlier": outliers,
            "cleaned": np.where(outliers | np.isnan(values), fitted, values),
        }
        return self._with_ids(columns, every, [sum(len(part[0]) for part in each.rows) for each in every])

    def explain(self) -> Any:
        """The members of each forecast.

        Returns:
            A table: id, `member`, its `weight` in the forecast, the mean absolute `error` of its rolling forecasts in
            units of the readings; what was assumed of the series: its `step`, the length of its `season` in steps, 0
            for none, and `note`: what else, or what was left out.

        Raises:
            ValueError: before `forecast`.
        """
        every = list(self._forecasts.series.values())
        season = self.season_length
        rows = [
            (name, *pair, each.steps.words, each.steps.period if season is None else season, each.forecast.note)
            for each in every
            for name, pair in each.forecast.members.items()
        ]
        names = ("member", "weight", "error", "step", "season", "note")
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        return self._with_ids(columns, every, [len(each.forecast.members) for each in every])

    def save(self, path: str | Path) -> None:
        """Write the last forecast to a file, whole: `load` goes on from it.

        Raises:
            ValueError: before `forecast`, or for ids that are neither text, numbers nor flags.
            OSError: if the file cannot be written.
        """
        content = packed((vars(self) | {"failed": [], "_last": self._forecasts}), _SAVED)
        write_whole(Path(path), lambda temporary: temporary.write_bytes(content))

    @classmethod
    def load(cls, path: str | Path) -> "Forecaster":
        """Read what `save` has written. Nothing in the file is run: it has numbers and JSON.

        Raises:
            ValueError: for another file.
            OSError: if it cannot be read.
        """
        found = cls()
        try:
            state = unpacked(Path(path).read_bytes(), _SAVED)
            good = isinstance(state, dict) and state.keys() == vars(found).keys()
            good = good and isinstance(state["_last"], _Forecasts) and state["_last"].ids.backend in LIBRARIES
            require(good, "file", "another state", "that of a forecaster")
        except ValueError as error:
            raise ValueError(f"path: got {path}, expected a file of Forecaster.save ({error})") from None
        vars(found).update(state)
        return found

    @property
    def _forecasts(self) -> _Forecasts:
        require(self._last is not None and len(self._last.series) > 0, "forecaster", "no forecast", "forecast() before")
        return self._last  # type: ignore[return-value]

    def _steps(self, panel: Panel) -> dict[int, Steps]:
        """The step of each series that has one; short series have that of most others."""
        places = [place for place in range(len(panel.ids.keys)) if place not in panel.refused]
        steps, _ = steps_of_series([panel.stamps[place] for place in places], panel.kind, self._usual)
        for place, step in zip(places, steps, strict=True):
            if step is None:
                at = panel.kind.label(panel.stamps[place][0])
                panel.refused[place] = f"one reading, at {at}: it does not tell the length of a step"
        return {place: step for place, step in zip(places, steps, strict=True) if step is not None}

    def _ahead(self, panel: Panel, h: int | Length) -> tuple[dict[int, Steps], dict[int, np.ndarray]]:
        """The steps of each series, and the stamps to forecast."""
        steps, ahead, known = self._steps(panel), {}, {}
        for place, step in steps.items():
            last = panel.stamps[place][-1]
            if (id(step), last) not in known:
                try:
                    known[id(step), last] = step.later(last, step.count(last, h))
                except ValueError as error:
                    panel.refused[place] = str(error)
                    continue
            ahead[place] = known[id(step), last]
        return steps, ahead

    def _request(
        self,
        steps: Steps,
        stamps: np.ndarray,
        values: np.ndarray,
        regressors: np.ndarray,
        ahead: np.ndarray,
        future: np.ndarray | None,
    ) -> engine.Series:
        """A series as the engine takes it. A reading whose regressors are not known is left out."""
        positions = steps.positions(np.concatenate([stamps, ahead]))
        times, later = np.split(positions - positions[0], [len(stamps)])
        own = self.season_length
        period, further = steps.seasons(times[-1]) if own is None else (float(own), 0.0)
        if future is None:
            return engine.Series(times, values, period, None, later, None, further)
        values = np.where(np.isnan(regressors).any(axis=1), np.nan, values)
        known = np.where(np.isnan(regressors), 0.0, regressors)
        return engine.Series(times, values, period, known, later, future, further)

    def _results(
        self, requests: list[engine.Series], bands: Quantiles, progress: Progress | None, pooled: bool = True
    ) -> Iterator[engine.SeriesForecast | str]:
        """The engine's answers, a block of series at a time. `pooled`: no series knows what comes later in another."""
        shared: dict[str, Any] = {"robust": self.robust, "workers": self.workers}
        shared["widths"] = engine.panel_widths(requests, **shared) if pooled else None
        for start in range(0, len(requests), _BLOCK):
            report = None if progress is None else lambda done, start=start: progress(start + done, len(requests))
            part = requests[start : start + _BLOCK]
            yield from engine.forecast_panel(part, bands.probabilities, progress=report, **shared)

    def _updated(self, before: _Fitted, stamps: np.ndarray, values: np.ndarray) -> _Fitted:
        steps, last = before.steps, self._forecasts
        ahead = steps.later(stamps[-1], steps.count(stamps[-1], last.h))
        positions = steps.positions(np.concatenate([stamps, ahead])) - before.first
        times, later = np.split(positions, [len(stamps)])
        old = before.forecast
        new = engine.updated(old.state, times, values, later, last.bands.probabilities)
        new = new._replace(members=new.members or old.members, note=new.note or old.note)
        before.rows[-1] = (*before.rows[-1][:2], old._replace(state=b"", members={}))
        before.rows.append((stamps, values, new))
        before.ahead = ahead
        return before

    def _report(self, panel: Panel, problems: dict[int, str], done: Sequence[Any] | dict[Any, Any] | None) -> None:
        """Say in `failed` what could not be done. Where nothing could be, raise `ValueError`."""
        self.failed = [FailedSeries(panel.ids.value(place), problems[place]) for place in sorted(problems)]
        if done is not None and not done:
            first, more = self.failed[0], len(self.failed) - 1
            who = f"{self.names.id} {first.id!r}: " if panel.ids.named else ""
            raise ValueError(f"{who}{first.reason}" + (f"; and {more} more series, see `failed`" if more else ""))

    def _table(self, every: list[_Fitted]) -> Any:
        bands = np.concatenate([each.forecast.quantiles for each in every])
        columns = {
            self.names.time: np.concatenate([each.ahead for each in every]),
            "rfa": np.concatenate([each.forecast.mean for each in every]),
            **dict(zip(self._forecasts.bands.columns, bands.T, strict=True)),
        }
        return self._with_ids(columns, every, [len(each.ahead) for each in every])

    def _with_ids(self, columns: dict[str, Any], every: list[_Fitted], counts: list[int]) -> Any:
        places, last = np.repeat([each.place for each in every], counts), self._forecasts
        if (name := self.names.time) in columns:
            columns[name] = stamp_column(name, columns[name], last.kind, last.ids.backend)
        return last.ids.table(columns, places, self.names.id)


def _simplest(values: np.ndarray, h: int, bands: int, reason: str) -> engine.SeriesForecast | None:
    """The median of the last readings, without bands. None where there is none."""
    seen = values[~np.isnan(values)]
    if not len(seen):
        return None
    level, missing = float(np.median(seen[-_FEW:])), np.full(len(values), np.nan)
    return engine.SeriesForecast(
        mean=np.full(h, level),
        quantiles=np.full((h, bands), np.nan),
        **dict.fromkeys(("fitted", "low", "high", "weights", "one_step"), missing),
        outliers=np.zeros(len(values), dtype=bool),
        members={"median of the last readings": (1.0, float("nan"))},
        note=f"{reason}; forecast by the median of its last readings, without bands",
        state=b"",
    )


_SAVED = (Names, Quantiles, StampKind, Steps, Length, Ids, FailedSeries, _Fitted, _Forecasts, engine.SeriesForecast)
