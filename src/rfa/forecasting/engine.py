"""Forecasts of many series by compiled code: arrays of series in, forecasts with bands out.

Each series is forecast by up to 28 members: a level, a drift, a damped trend, an autoregression and a cycle
about a drift, on the linear and on the logarithmic scale. Each of them is a robust Kalman filter in continuous time.
Its parameters maximise a penalised likelihood. On whole steps autoregressions of several lags join, of values and of
their changes; for long seasons, members whose season is free: a value for each phase of one or two periods. Weights
come from the members' errors at earlier origins, and so does the width of the bands, together with the errors of other
series of a panel at rows that are held back (`panel_widths`). `kernels/` has the code; `kernels/constants.h` the
numbers that were chosen.

NumPy and ctypes only: a forecast needs neither PyTorch nor pandas.
"""

import ctypes
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rfa.ops.cpu.build import load_library

SOURCES = Path(__file__).parent / "kernels"
_FAMILIES = ("level", "drift", "damped trend", "autoregression", "cycle", "several lags", "lags of changes")
_SCALES = ("", ", log")
MEMBERS = tuple(  # in the order of the kernels
    name + scale + season for season in ("", ", free season") for name in _FAMILIES for scale in _SCALES
)
OUTLIER = 0.1  # a reading of smaller weight is one (REFUSED in kernels/constants.h)
COUNTS = 0.3  # share of zeros from which readings are counts (kernels/constants.h)
FEW_READINGS = 4  # fewer have a level only (kernels/constants.h)
SEASON_SPAN = 1.6  # periods that a season needs (kernels/constants.h)
_BLOCK = 64  # series that are handed over at once: so much memory is used beside input and output
_BANDS = (0.05, 0.1, 0.9, 0.95)
_MOST_COEFFICIENTS = 37  # of season and regressors (MOST_STATES in kernels/constants.h)
_WAVES = 6
_VERSION = 2.0  # of `SeriesForecast.state`
_HEADER = 2  # version, unit
# Bands of a panel (M1, tourism): fewest and most series of a kind, readings that each keeps, series of factor 1
_FEWEST, _SAMPLE, _KEPT, _PRIOR_SERIES = 20, 100, 8, 25
Vector = NDArray[np.float64]


class Series(NamedTuple):
    """One series. A reading that is missing is NaN; times may be irregular."""

    times: Vector  # (n,), increasing, in units of the series' usual step
    values: Vector  # (n,)
    period: float = 0.0  # length of the season in steps, 0 for none; whether it is used, the readings decide
    regressors: Vector | None = None  # (n, k)
    ahead: Vector = np.zeros(0)  # (h,), times to forecast, increasing, after the last reading
    ahead_regressors: Vector | None = None  # (h, k)
    second_period: float = 0.0  # of a further season, such as the week of hours; 0 for none

    @property
    def kind(self) -> tuple[float, ...]:
        """What series have in common whose bands are too narrow alike: periods, horizon, doublings of the length."""
        return self.period, self.second_period, len(self.ahead), np.frexp(len(self.times))[1]


class SeriesForecast(NamedTuple):
    """The forecast of one series, and what was found out about its readings."""

    mean: Vector  # (h,), the combined forecast
    quantiles: Vector  # (h, q), for the probabilities asked, monotone
    fitted: Vector  # (n,), smoothed value of each time
    low: Vector  # (n,), 90 % band of a reading at each time
    high: Vector  # (n,)
    weights: Vector  # (n,), of the readings: 1 ordinary, near 0 refused, NaN where nothing was read
    outliers: NDArray[np.bool_]  # (n,)
    one_step: Vector  # (n,), forecast of each reading from those before; NaN at the start
    members: dict[str, tuple[float, float]]  # weight and mean absolute error of rolling forecasts
    note: str  # what was assumed or left out
    state: bytes  # what `updated` goes on from


class _Panel(ctypes.Structure):
    """See kernels/engine.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("series", "probabilities", "robust")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *(
                    "rows",
                    "ahead",
                    "regressors",
                    "period",
                    "second_period",
                    "width",
                    "times",
                    "values",
                    "x",
                    "ahead_times",
                    "ahead_x",
                    "normal",
                ),
                *("mean", "quantiles", "fitted", "low", "high", "weights", "one_step", "members"),
                *("state", "state_start", "state_size", "status"),
            )
        ),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = load_library(SOURCES)
    library.rfa_state_room.restype = library.rfa_updated.restype = ctypes.c_int64
    library.rfa_state_room.argtypes = (ctypes.c_double, ctypes.c_double, ctypes.c_int64)
    library.rfa_updated.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return library


def forecast_panel(
    series: Sequence[Series],
    probabilities: Sequence[float],
    *,
    robust: bool = True,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
    widths: Mapping[tuple[float, ...], float] | None = None,
) -> list[SeriesForecast | str]:
    """Forecast each series by itself; `widths` alone comes from the others.

    Args:
        series: any number; they are handed over in blocks, so that memory beside input and output stays constant.
        probabilities: of the quantiles, between 0 and 1.
        robust: whether readings get weights; else all count alike.
        workers: threads.
        progress: called with the number of series that are done, after each block.
        widths: factors of the bands of each kind, from `panel_widths`. None: 1.

    Returns:
        For each series its forecast, or in words why there is none. The numbers do not depend on `workers`.

    Raises:
        ValueError: for probabilities that are none, or `workers` below 1.
        BuildError: if the kernels cannot be compiled here.
    """
    normal = _normal_quantiles(probabilities)
    if workers < 1:
        raise ValueError(f"workers: got {workers}, expected at least 1")
    _library()
    blocks = [series[start : start + _BLOCK] for start in range(0, len(series), _BLOCK)]
    found: list[SeriesForecast | str] = []
    for results in _results_of_blocks(
        lambda block: _forecast_block(block, normal, robust, widths or {}), blocks, workers
    ):
        found += results
        if progress:
            progress(len(found))
    return found


def panel_widths(series: Sequence[Series], *, robust: bool = True, workers: int = 1) -> dict[tuple[float, ...], float]:
    """How much wider the bands of each kind of series must be, from the other series of that kind.

    Some series of a kind are forecast with as many rows held back as are asked for. The factor makes bands of 80 and
    90 % hold as many of these readings, shrunk towards 1. Refused readings do not count.

    Args:
        series, robust, workers: as of `forecast_panel`. The order of the series does not matter.

    Returns:
        Factors by `Series.kind`, of kinds with 20 series at least.
    """
    kinds: dict[tuple[float, ...], list[tuple[int, int]]] = {}
    for at, one in enumerate(series):
        values = np.asarray(one.values, dtype=np.float64)
        if one.regressors is None and np.isfinite(values[: len(values) - len(one.ahead)]).sum() >= _KEPT:
            kinds.setdefault(one.kind, []).append((zlib.crc32(values.tobytes()), at))
    found = {}
    for kind, members in ((kind, members) for kind, members in kinds.items() if len(members) >= _FEWEST):
        chosen, h = [series[at] for _, at in sorted(members)[:_SAMPLE]], int(kind[2])
        past = [one._replace(times=one.times[:-h], values=one.values[:-h], ahead=one.times[-h:]) for one in chosen]
        halves, errors = [], []
        runs = (forecast_panel(part, _BANDS, robust=robust, workers=workers) for part in (past, chosen))
        for one, then, now in zip(chosen, *runs, strict=True):
            if isinstance(then, str) or isinstance(now, str):
                continue
            error = np.asarray(one.values[-h:], dtype=np.float64) - then.mean
            ends = np.where(error[:, None] > 0, then.quantiles[:, [2, 3]], then.quantiles[:, [1, 0]])
            half = np.abs(ends - then.mean[:, None])
            usable = (now.weights[-h:] >= OUTLIER) & (half > 0).all(axis=1)
            halves.append(half[usable])
            errors.append(np.abs(error)[usable])
        if sum(map(len, errors)):
            ratio = np.concatenate(errors)[:, None] / np.concatenate(halves)
            needed = np.log([np.quantile(ratio[:, 0], 0.8), np.quantile(ratio[:, 1], 0.9)]).mean()
            found[kind] = float(np.exp(np.clip(needed, -1, 1) * len(errors) / (len(errors) + _PRIOR_SERIES)))
    return found


def updated(
    state: bytes, times: Vector, values: Vector, ahead: Vector, probabilities: Sequence[float]
) -> SeriesForecast:
    """Go on from a forecast with further readings, in constant time for each. Nothing is fitted.

    Args:
        state: of the forecast before, which had no regressors.
        times: `(n,)`, increasing, after the last reading; n may be 0.
        values: `(n,)`, NaN where nothing was read.
        ahead: `(h,)`, times to forecast, increasing, after the last of `times`.
        probabilities: of the quantiles.

    Returns:
        The forecast; `fitted`, `weights` and `one_step` are of the new rows, each from the readings until then.

    Raises:
        ValueError: for a state of another version or with regressors, or rows that `forecast_panel` would refuse.
    """
    normal = _normal_quantiles(probabilities)
    numbers = np.frombuffer(state, dtype=np.float64)
    if len(numbers) < _HEADER + 9 or numbers[0] != _VERSION:
        raise ValueError("state: got bytes of something else, expected `SeriesForecast.state` of this version")
    (unit, period, last), second = numbers[1 : _HEADER + 2], numbers[_HEADER + 8]
    if not (np.isfinite(unit) and unit > 0 and 0 <= period < 1e9 and np.isfinite(last)):
        raise ValueError(f"state: got {[unit, period, last]}, expected a unit, a period and a time")
    if numbers[_HEADER + 5]:
        raise ValueError("state: got a series with regressors, expected one without")
    times, values, ahead = (np.asarray(x, dtype=np.float64) for x in (times, values, ahead))
    given = Series(times, values, ahead=ahead)
    if reason := _row_problem(given, after=last):
        raise ValueError(reason)
    room = np.zeros(max(_library().rfa_state_room(period, max(second, 0.0), 0), len(numbers) - _HEADER))
    room[: len(numbers) - _HEADER] = numbers[_HEADER:]
    block = _Block([given._replace(values=given.values / unit)], normal, robust=True, rooms=False)
    size = _library().rfa_updated(room.ctypes.data, len(numbers) - _HEADER, ctypes.addressof(block.panel))
    if size == -1:
        raise MemoryError("rfa: no memory for an update")
    if size < 0:
        raise ValueError("state: got numbers that do not fit together, expected `SeriesForecast.state`")
    found = block.result(0, unit, "", np.concatenate([[_VERSION, unit], room[:size]]).tobytes())
    if not (np.isfinite(found.mean).all() and np.isfinite(found.quantiles).all()):
        raise ValueError(f"values: got {values.tolist()}, expected readings that do not overflow the forecast")
    return found


def _normal_quantiles(probabilities: Sequence[float]) -> Vector:
    for p in probabilities:
        if not 0 < p < 1:
            raise ValueError(f"probabilities: got {p}, expected numbers between 0 and 1")
    return np.array([NormalDist().inv_cdf(p) for p in probabilities])


def _results_of_blocks(call: Callable, blocks: list, workers: int) -> Iterator:
    if workers == 1 or len(blocks) < 2:
        yield from map(call, blocks)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(call, blocks)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _forecast_block(
    block: Sequence[Series], normal: Vector, robust: bool, widths: Mapping[tuple[float, ...], float]
) -> list[SeriesForecast | str]:
    results: list[SeriesForecast | str] = []
    usable, units = [], []
    for one in block:
        try:
            given = _as_arrays(one)
        except (TypeError, ValueError) as error:
            results.append(f"not numbers: {error}")
            continue
        results.append(_row_problem(given) or _series_problem(given))
        if not results[-1]:
            units.append(_unit(given.values))
            usable.append(given._replace(values=given.values / units[-1]))
    if not usable:
        return results
    handed = _Block(usable, normal, robust)
    handed.arrays["width"][:] = [widths.get(one.kind, 1.0) for one in usable]
    _library().rfa_forecast_panel(ctypes.byref(handed.panel))
    where = [i for i, reason in enumerate(results) if not reason]
    for k, (i, unit) in enumerate(zip(where, units, strict=True)):
        if handed.arrays["status"][k] or not np.isfinite(handed.part("mean", handed.ahead, k)).all():
            results[i] = "the forecast is not finite"
            continue
        state = np.concatenate([[_VERSION, unit], handed.state(k)]).tobytes()
        results[i] = handed.result(k, unit, _note(usable[k]), state)
    return results


def _as_arrays(one: Series) -> Series:
    times, values, ahead = (np.ascontiguousarray(x, dtype=np.float64) for x in (one.times, one.values, one.ahead))
    x, ahead_x = (
        None if table is None else np.ascontiguousarray(table, dtype=np.float64)
        for table in (one.regressors, one.ahead_regressors)
    )
    return Series(times, values, float(one.period), x, ahead, ahead_x, float(one.second_period))


def _row_problem(given: Series, after: float = -np.inf) -> str:
    """Why times, values or times ahead cannot be used, with the first row at fault; "" where they can."""
    times, values, ahead = given.times, given.values, given.ahead
    if times.ndim != 1 or values.shape != times.shape or ahead.ndim != 1:
        return f"times, values: got shapes {times.shape} and {values.shape}, expected one time for each value"
    if len(bad := np.flatnonzero(~np.isfinite(times))):
        return f"times: got {times[bad[0]]} in row {bad[0]}, expected a finite number"
    if len(bad := np.flatnonzero(np.isinf(values))):
        return f"values: got {values[bad[0]]} in row {bad[0]}, expected a finite number or NaN"
    if len(bad := np.flatnonzero(np.diff(times, prepend=after) <= 0)):
        return f"times: got {times[bad[0]]} in row {bad[0]}, expected a time after the one before"
    last = times[-1] if len(times) else after
    if not np.isfinite(ahead).all() or (np.diff(ahead, prepend=last) <= 0).any():
        return f"ahead: got {ahead.tolist()[:3]}, expected increasing times after {last}"
    return ""


def _series_problem(given: Series) -> str:
    if np.isnan(given.values).all():
        return "no reading: all values are missing"
    if not len(given.ahead):
        return "ahead: got no time, expected at least one"
    for period in (given.period, given.second_period):
        if not (np.isfinite(period) and period >= 0):
            return f"period: got {period}, expected a number of steps, or 0"
    x, ahead = given.regressors, given.ahead_regressors
    if (x is None) != (ahead is None):
        return "regressors: got them of the rows or of the times ahead only, expected both"
    if x is None or ahead is None:
        return ""
    k = x.shape[-1]
    if x.shape != (len(given.times), k) or ahead.shape != (len(given.ahead), k):
        return f"regressors: got shapes {x.shape} and {ahead.shape}, expected a row for each time"
    if not (np.isfinite(x).all() and np.isfinite(ahead).all()):
        return "regressors: got a missing or infinite value, expected finite numbers"
    if k > _MOST_COEFFICIENTS - 2 * _WAVES:
        return f"regressors: got {k}, expected at most {_MOST_COEFFICIENTS - 2 * _WAVES}"
    return ""


def _unit(values: Vector) -> float:
    """A power of 2 near the largest value: no square overflows, and no digit is lost."""
    largest = np.nanmax(np.abs(values))
    return float(2.0 ** np.clip(np.floor(np.log2(largest)), -1000, 1000)) if largest > 0 else 1.0


def _note(given: Series) -> str:
    read = ~np.isnan(given.values)
    values, times = given.values[read], given.times[read]
    notes = []
    if len(values) < FEW_READINGS:
        notes.append(f"{len(values)} readings: their level, with a wide band")
    elif (values == values[0]).all():
        notes.append("all readings are equal")
    elif (values == 0).mean() >= COUNTS:
        notes.append("many zeros: taken for counts, of which none is wrong")
    if given.period >= 2 and times[-1] - times[0] < SEASON_SPAN * given.period:
        notes.append("no season: the readings span less than 1.6 periods")
    return "; ".join(notes)


class _Block:
    """Some series in arrays one after the other, and room for what is said of them."""

    def __init__(self, series: Sequence[Series], normal: Vector, robust: bool, rooms: bool = True):
        empty, count = np.zeros(0), len(series)
        self.rows = np.cumsum([0, *(len(one.times) for one in series)])
        self.ahead = np.cumsum([0, *(len(one.ahead) for one in series)])
        regressors = [0 if one.regressors is None else one.regressors.shape[1] for one in series]
        n, h = self.rows[-1], self.ahead[-1]
        room = [
            _library().rfa_state_room(one.period, one.second_period, k) * rooms
            for one, k in zip(series, regressors, strict=True)
        ]
        arrays = {
            "rows": np.diff(self.rows),
            "ahead": np.diff(self.ahead),
            "regressors": np.array(regressors),
            "period": np.array([one.period for one in series]),
            "second_period": np.array([one.second_period for one in series]),
            "width": np.ones(count),
            "times": np.concatenate([one.times for one in series]),
            "values": np.concatenate([one.values for one in series]),
            "x": np.concatenate([empty if one.regressors is None else one.regressors.ravel() for one in series]),
            "ahead_times": np.concatenate([one.ahead for one in series]),
            "ahead_x": np.concatenate(
                [empty if one.ahead_regressors is None else one.ahead_regressors.ravel() for one in series]
            ),
            "normal": normal,
            "mean": np.full(h, np.nan),
            "quantiles": np.full((h, len(normal)), np.nan),
            **{name: np.full(n, np.nan) for name in ("fitted", "low", "high", "weights", "one_step")},
            "members": np.full((count, len(MEMBERS), 2), np.nan),
            "state": np.zeros(sum(room)),
            "state_start": np.cumsum([0, *room[:-1]]),
            "state_size": np.zeros(count),
            "status": np.zeros(count),
        }
        integers = ("rows", "ahead", "regressors", "state_start", "state_size", "status")
        self.arrays: dict[str, Any] = {
            k: np.ascontiguousarray(x, np.int64 if k in integers else np.float64) for k, x in arrays.items()
        }
        self.panel = _Panel(count, len(normal), robust, *(x.ctypes.data for x in self.arrays.values()))

    def part(self, name: str, ends: NDArray[np.int64], k: int) -> Vector:
        found: Vector = self.arrays[name][ends[k] : ends[k + 1]].copy()
        return found

    def state(self, k: int) -> Vector:
        start = self.arrays["state_start"][k]
        found: Vector = self.arrays["state"][start : start + self.arrays["state_size"][k]]
        return found

    def result(self, k: int, unit: float, note: str, state: bytes) -> SeriesForecast:
        rows = {name: self.part(name, self.rows, k) for name in ("fitted", "low", "high", "weights", "one_step")}
        scaled = {name: x if name == "weights" else x * unit for name, x in rows.items()}
        return SeriesForecast(
            mean=self.part("mean", self.ahead, k) * unit,
            quantiles=self.part("quantiles", self.ahead, k) * unit,
            **scaled,
            outliers=rows["weights"] < OUTLIER,
            members={
                name: (float(weight), float(error) * unit)
                for name, (weight, error) in zip(MEMBERS, self.arrays["members"][k], strict=True)
                if weight > 0
            },
            note=note,
            state=state,
        )
