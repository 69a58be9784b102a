"""Compare default forecasts with statsmodels' on real series: `python benchmarks/forecasts.py --data DIR --out FILE`.

DIR has a file `NAME.csv` with the columns time and value for each name in SERIES; series without a file are left out.
Rows lie on a regular grid, and an empty value is a missing reading. statsmodels' methods see it interpolated.

FILE keeps what was measured. A series and a method that it has are not measured again, unless `--again` is given.
`rfa` is `rfa forecast` without options; nobody tells it the period, which its peers know.

- MASE: absolute errors over the horizon, over those of the seasonal naive forecast within the training part
  (Hyndman and Koehler 2006); the mean of a series is over its origins.
- Origins are spread over the last quarter. `--fresh` takes as many others, for a check of what was tuned on these.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from statsmodels.tsa.exponential_smoothing.ets import ETSModel
from statsmodels.tsa.forecasting.theta import ThetaModel
from statsmodels.tsa.statespace.structural import UnobservedComponents

from rfa.environment import environment
from rfa.files import write_text_whole
from rfa.forecasting.filter import forecast_channels
from rfa.forecasting.request import ForecastRequest, read_request

ORIGINS = 6
KEYS = ("mase", "coverage", "seconds")
LEVEL, NORMAL = 0.9, 1.6448536  # of the bands
LONG = 24  # rows of a season that multiplicative models leave out when it is longer
AIMS = "aims: MASE 0.92 of Theta's and 0.95 of the best single peer's; coverage 0.87 to 0.93, nowhere below 0.75"


class Series(NamedTuple):
    """Where a series lies in time: a row each `step` of `unit`, "" for numbers. Period and horizon are in rows."""

    period: int
    horizon: int
    step: float
    unit: str = ""


Forecast = tuple[np.ndarray, np.ndarray, np.ndarray]  # mean, lower and upper ends of the band
Peer = Callable[[np.ndarray, Series], Forecast]
_QUARTER, _MONTH, _WEEK = Series(4, 8, 3, "M"), Series(12, 12, 1, "M"), Series(52, 26, 7, "D")
_HOUR, _MINUTES = Series(24, 48, 1, "h"), Series(288, 72, 5, "min")
SERIES: dict[str, dict[str, Series]] = {
    "development": {
        "sunspots": Series(11, 11, 1),
        "etth2_ot": _HOUR,
        "taxi": Series(336, 96, 30, "min"),
        "room": _HOUR,
        "cpu_bimodal": _MINUTES,
        "cpu_levels": _MINUTES,
        "cpu_starts": _MINUTES,
        "prices": _HOUR,
        "co2": _WEEK,
        "nile": Series(1, 10, 1),
        "air": _MONTH,
        "ausbeer": _QUARTER,
        "milk": _MONTH,
        "wineind": _MONTH,
        "woolyrnq": _QUARTER,
        "gasoline": _WEEK,
        "temps": Series(365, 28, 1, "D"),
        "ilinet": _WEEK,
        "taylor": Series(336, 96, 30, "min"),
        "lynx": Series(10, 10, 1),
        "shampoo": _MONTH._replace(horizon=6),
        "seatbelts": _MONTH,
    },
    "check": {
        "elnino": _MONTH,
        "realgdp": _QUARTER,
        "infl": _QUARTER,
        "unemp": _QUARTER,
        "tbilrate": _QUARTER,
        "etth1_ot": _HOUR,
        "etth1_hufl": _HOUR,
        "cpu_asg": _MINUTES,
        "cpu_cc0c53": _MINUTES,
        "sunspots_monthly": Series(132, 24, 1, "M"),
        "ice_cream": _MONTH,
        "heater": _MONTH,
        "exchange": Series(1, 20, 1),
        "gas_furnace": Series(1, 12, 1),
        "heart_rate": Series(1, 20, 0.5),
        "tourism": _QUARTER._replace(horizon=4),
        "pbs": _MONTH,
        "us_savings": _QUARTER,
        "solar": Series(48, 24, 30, "min"),
        "machine": _MINUTES,
        "speed": _MINUTES,
        "tweets": _MINUTES,
        "cpm": _HOUR,
        "elb_requests": _MINUTES,
        "cpu_24ae8d": _MINUTES,
        "latency": _MINUTES,
        "occupancy": _MINUTES,
    },
}


def theta(values: np.ndarray, series: Series) -> Forecast:
    """The Theta method; a season that its test finds is taken away before."""
    model = ThetaModel(pd.Series(values), period=max(series.period, 2), deseasonalize=series.period > 1)
    fitted = model.fit()
    ends = fitted.prediction_intervals(series.horizon, alpha=1 - LEVEL).to_numpy()
    return fitted.forecast(series.horizon).to_numpy(), *ends.T


def _ets(values: np.ndarray, series: Series, **model: Any) -> tuple[float, Callable[[], Forecast]]:
    """The criterion of an exponential smoothing, and its forecast. Bands of multiplicative ones are simulated."""
    model |= {"seasonal_periods": series.period, "initialization_method": "heuristic"}
    fitted = ETSModel(pd.Series(values), **model).fit(disp=False)

    def forecast() -> Forecast:
        ahead: dict[str, Any] = {"start": len(values), "end": len(values) + series.horizon - 1}
        if model["error"] == "mul":
            ahead |= {"method": "simulated", "simulate_repetitions": 1000, "rng": 0}
        found = fitted.get_prediction(**ahead).summary_frame(alpha=1 - LEVEL)
        return tuple(found[name].to_numpy() for name in ("mean", "pi_lower", "pi_upper"))

    return fitted.aic, forecast


def holt_winters(values: np.ndarray, series: Series) -> Forecast:
    """Additive, with a damped trend."""
    season = "add" if series.period > 1 else None
    return _ets(values, series, error="add", trend="add", damped_trend=True, seasonal=season)[1]()


def auto_ets(values: np.ndarray, series: Series) -> Forecast:
    """The least AIC of four additive models and, for positive series of short seasons, two multiplicative ones."""
    damped: dict[str, Any] = {"trend": "add", "damped_trend": True}
    models = [{"error": "add", **trend} for trend in ({}, damped)]
    if series.period > 1:
        models += [{**model, "seasonal": "add"} for model in models]
        if series.period <= LONG and values.min() > 0:
            models += [{"error": "mul", "seasonal": "mul", **trend} for trend in ({}, damped)]
    return min((_ets(values, series, **model) for model in models), key=lambda found: found[0])[1]()


def components(values: np.ndarray, series: Series) -> Forecast:
    """Level, constant slope (free ones explode in half hours), six waves of a season, and of a day in a week."""
    middle, deviation = values.mean(), values.std()
    periods = [series.period, *([series.period // 7] if series.period % 7 == 0 else [])]
    waves = [{"period": period, "harmonics": min(period // 2, 6)} for period in periods if period > 1]
    model = UnobservedComponents((values - middle) / deviation, "lldtrend", freq_seasonal=waves or None)
    found = model.fit(disp=False, maxiter=100).get_forecast(series.horizon)
    return tuple(middle + deviation * x for x in (found.predicted_mean, *found.conf_int(alpha=1 - LEVEL).T))


def seasonal_naive(values: np.ndarray, series: Series) -> Forecast:
    """The season before again; the variance grows with each further one."""
    rows = np.arange(series.horizon)
    mean = values[len(values) - series.period + rows % series.period]
    deviation = np.sqrt(np.mean(np.square(values[series.period :] - values[: -series.period])))
    half = NORMAL * deviation * np.sqrt(rows // series.period + 1)
    return mean, mean - half, mean + half


def by_rfa(file: Path, series: Series) -> tuple[Forecast, dict[str, Any]]:
    """What `rfa forecast FILE --time time --horizon H --step S` says, and its components."""
    horizon, step = (f"{rows * series.step:g}{series.unit}" for rows in (series.horizon, 1))
    request = ForecastRequest(file=file, time="time", horizon=horizon, step=step)
    table, query_times = read_request(request)
    assert len(query_times) == series.horizon, (len(query_times), series)
    found = forecast_channels(request, table, query_times)[0]
    share = int(found.past["outlier"].sum()) / int((~np.isnan(table.values)).sum())
    return (found.mean, *found.intervals[LEVEL]), {"components": found.details["components"], "outliers": share}


PEERS: dict[str, Peer] = {
    "theta": theta,
    "holt-winters": holt_winters,
    "components": components,
    "ets": auto_ets,
    "naive": seasonal_naive,
}
OURS = "rfa"


def origins(values: np.ndarray, series: Series, fresh: bool) -> list[int]:
    """The lengths of the training parts, each of which ends with a reading; one is within the horizon."""
    first = max(2 * series.period + 1, len(values) * 3 // 4)
    spread = np.linspace(first, len(values) - series.horizon, 2 * ORIGINS).astype(int)
    wanted = spread[::2] if fresh else spread[1::2]
    seen = np.flatnonzero(~np.isnan(values)) + 1
    found = sorted({int(seen[seen <= length].max()) for length in wanted})
    return [length for length in found if not np.isnan(values[length : length + series.horizon]).all()]


def measured(rows: pd.DataFrame, series: Series, method: str, fresh: bool) -> dict[str, Any]:
    """The scores of a method at each origin."""
    values = rows["value"].to_numpy(np.float64)
    whole = pd.Series(values).interpolate().to_numpy()
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for length in origins(values, series, fresh):
            file = Path(folder) / "past.csv"
            rows[:length].to_csv(file, index=False)
            details: dict[str, Any] = {}
            began = time.perf_counter()
            if method == OURS:
                forecast, details = by_rfa(file, series)
            else:
                forecast = PEERS[method](whole[:length], series)
            seconds = time.perf_counter() - began
            mean, lower, upper = (np.asarray(part, np.float64) for part in forecast)
            truth = values[length : length + series.horizon]
            scale = np.nanmean(np.abs(values[series.period : length] - values[: length - series.period]))
            assert np.isfinite(mean).all(), f"{method}: a mean that is not finite at {length}"
            lines.append({
                "origin": length,
                "mase": float(np.abs(mean - truth)[~np.isnan(truth)].mean() / scale),
                "coverage": float(((lower <= truth) & (truth <= upper))[~np.isnan(truth)].mean()),
                "seconds": seconds, **details,
            })  # fmt: skip
    return {"origins": lines} | {key: statistics.mean(line[key] for line in lines) for key in KEYS}


def _ratios(results: dict[str, Any], names: list[str], method: str, others: list[str]) -> list[tuple[float, str]]:
    """MASE over the least of the others', with the name of each series."""
    scores = {name: {each: results[name][each]["mase"] for each in (method, *others)} for name in names}
    return [(one[method] / min(one[other] for other in others or [method]), name) for name, one in scores.items()]


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """Tables of one set: scores of each series, and what the aims ask for."""
    methods = [name for name in (OURS, *PEERS) if any(name in line for line in results.values())]
    names = [name for name in results if all("mase" in results[name].get(method, {}) for method in methods)]
    failed = [f"{name}/{method}" for name in results for method in results[name] if "error" in results[name][method]]
    head = f"| MASE / coverage | {' | '.join(methods)} | longest | refused | components |"
    rows = [head, "| --- " * (len(methods) + 4) + "|"]
    for name in names:
        cells = [f"{results[name][method]['mase']:.2f} / {results[name][method]['coverage']:.2f}" for method in methods]
        ours = results[name].get(OURS, {"origins": [{"seconds": 0.0, "components": "", "outliers": 0.0}]})["origins"]
        longest = max(line["seconds"] for line in ours)
        rows.append(
            f"| {name} | {' | '.join(cells)} | {longest:.1f} | {ours[-1]['outliers']:.0%} | {ours[-1]['components']} |"
        )
    rows += ["", f"| {len(names)} series | MASE of Theta's | coverage | lowest | worst of the best peer's | seconds |"]
    rows.append("| --- " * 6 + "|")
    for method in methods if names else ():
        coverage, seconds = ([results[name][method][key] for name in names] for key in KEYS[1:])
        to_theta = _ratios(results, names, method, ["theta"] if "theta" in methods else [method])
        to_best = _ratios(results, names, method, [other for other in methods if other not in (OURS, method)])
        worst = ", ".join(f"{name} {ratio:.2f}" for ratio, name in sorted(to_best, reverse=True)[:5])
        covered = f"{statistics.mean(coverage):.3f} | {min(coverage):.2f}"
        relative = statistics.geometric_mean(ratio for ratio, _ in to_theta)
        rows.append(f"| {method} | {relative:.3f} | {covered} | {worst} | {statistics.mean(seconds):.2f} |")
    return "\n".join([*rows, "", AIMS, *([f"failed, left out: {', '.join(failed)}"] if failed else [])])


def main() -> None:
    """Measure what FILE lacks, and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--set", choices=SERIES, default="development", help="the check set is for no tuning")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the series")
    parser.add_argument("--methods", nargs="+", choices=[OURS, *PEERS], default=[OURS, *PEERS])
    parser.add_argument("--fresh", action="store_true", help="other origins; for another FILE")
    parser.add_argument("--again", action="store_true", help="measure what FILE has already")
    given = parser.parse_args()
    about = {"set": given.set, "fresh": given.fresh}
    stored = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {**about, "results": {}}
    assert {name: stored[name] for name in about} == about, f"{given.out} is of another set or other origins"
    warnings.simplefilter("ignore")
    for name, series in SERIES[given.set].items():
        file = given.data / f"{name}.csv"
        if not file.exists() or (given.only and name not in given.only):
            continue
        found = stored["results"].setdefault(name, {})
        for method in given.methods:
            if method in found and not given.again:
                continue
            try:
                found[method] = measured(pd.read_csv(file), series, method, given.fresh)
            except Exception as error:
                found[method] = {"error": f"{type(error).__name__}: {error}"[:300]}
            found[method]["commit"] = environment()["commit"]
            print(name, method, {**found[method], "origins": ...}, flush=True)
            stored["environment"] = {**environment(), "statsmodels": version("statsmodels")}
            write_text_whole(given.out, json.dumps(stored, indent=1) + "\n")
    print(markdown(stored["results"]))


if __name__ == "__main__":
    main()
