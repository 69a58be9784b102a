"""Compare forecasts of the M1, M3 and tourism competitions: `python benchmarks/forecasts.py --data DIR --out FILE`.

DIR has `m1.csv.gz`, `m3.csv.gz` and `tourism.csv.gz`, or some of them: columns unique_id, period, ds, y, part (train or
test). It may have `published.csv` (method, task, MASE, WQL: the nine tasks of autogluon/fev's chronos_zeroshot).
`--mcomp M3.rda` makes `m3.csv.gz` of a file of the repository robjhyndman/Mcomp (`pip install rdata`).

A method of your own is a function as `seasonal_naive` below and a line in METHODS. Peers are of statsforecast 2.1.1,
which needs pandas below 3: `pip install . statsforecast` in an environment of its own.

A line of FILE is a method on a task under a condition. What FILE has is not measured again, so a run can be stopped.

- MASE: the mean absolute error over that of the seasonal naive forecast within the training part; mean over series.
- sMAPE: 0 to 200, mean over series.
- WQL: the loss at the quantiles 0.1 to 0.9, summed over series, over the sum of the absolute readings.
- Conditions: `spoilt-3` and `spoilt-10` multiply 3 and 10 % of the training readings by 10 or 0.1, by chance with a
  seed a series; `gaps-20` loses 20 % of them. Peers see gaps interpolated, and spoilt readings as they are and after
  Hampel's filter (`... + hampel`: 7 readings, 3 scaled absolute deviations from the median).
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rfa.files import write_text_whole
from rfa.forecasting import Forecaster

SEASONS = {"yearly": 1, "quarterly": 4, "monthly": 12, "other": 1}
COMPETITIONS = ("m1", "m3", "tourism")
LEVELS = (80, 90)
PROBABILITIES = np.array([0.05, *np.arange(1, 10) / 10, 0.95])  # the first and last two are the bands
CONDITIONS = ("clean", "spoilt-3", "spoilt-10", "gaps-20")
HAMPEL = " + hampel"
AIMS = {
    "sMAPE, M3": 12.9,
    "MASE, M3": 1.35,
    "MASE over seasonal naive, nine tasks": 0.82,
    "WQL over seasonal naive, nine tasks": 0.66,
    "a condition's MASE over the clean one": 1.05,
    "MASE over the best cleaned peer's": 0.95,
    "processor time over AutoETS's": 1.0,
}

Paths = list[np.ndarray]
# Readings of the training parts, numbers of steps to forecast, season -> mean and quantiles of each series.
Method = Callable[[Paths, list[int], int], Iterator[tuple[np.ndarray, np.ndarray]]]


def rfa(readings: Paths, horizons: list[int], season: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`Forecaster().forecast` on the panel, with nothing tuned."""
    tables = [pd.DataFrame({"unique_id": k, "ds": np.arange(len(y)), "y": y}) for k, y in enumerate(readings)]
    found = Forecaster(season_length=season if season > 1 else 0).forecast(
        pd.concat(tables), max(horizons), level=None, quantiles=PROBABILITIES.tolist()
    )
    columns = [name for name in found.columns if name.startswith("rfa-q-")]
    for k, horizon in enumerate(horizons):
        rows = found[found["unique_id"] == k].iloc[:horizon]
        yield rows["rfa"].to_numpy(), rows[columns].to_numpy()


def seasonal_naive(readings: Paths, horizons: list[int], season: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The last season again, for each quantile alike: so the leaderboard has it."""
    for y, horizon in zip(readings, horizons, strict=True):
        last = min(season, len(y))
        mean = y[len(y) - last + np.arange(horizon) % last]
        yield mean, np.repeat(mean[:, None], len(PROBABILITIES), axis=1)


def _statsforecast(name: str) -> Method:
    """A model of statsforecast, one series after the other. The last reading stands where it raises an error."""

    def method(readings: Paths, horizons: list[int], season: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        from statsforecast import models  # type: ignore[import-not-found]

        model = getattr(models, name)(season_length=season)
        levels = [90, 80, 60, 40, 20]
        for y, horizon in zip(readings, horizons, strict=True):
            try:
                found = model.forecast(y=y, h=horizon, level=levels)
            except Exception:
                yield np.full(horizon, y[-1]), np.full((horizon, len(PROBABILITIES)), y[-1])
                continue
            low = [found[f"lo-{level}"] for level in levels]
            high = [found[f"hi-{level}"] for level in reversed(levels)]
            yield found["mean"], np.stack([*low, found["mean"], *high], axis=1)

    return method


METHODS: dict[str, Method] = {
    "rfa": rfa,
    "seasonal naive": seasonal_naive,
    "AutoETS": _statsforecast("AutoETS"),
    "AutoTheta": _statsforecast("AutoTheta"),
    "DynamicOptimizedTheta": _statsforecast("DynamicOptimizedTheta"),
}
PEERS = ("AutoETS", "AutoTheta", "DynamicOptimizedTheta")


def spoilt(y: np.ndarray, condition: str, seed: int) -> np.ndarray:
    """The readings under a condition. Series that are not positive keep theirs."""
    draws = np.random.default_rng(1000 + seed)
    if condition == "clean":
        return y
    hit = draws.random(len(y)) < _percent(condition) / 100
    if condition.startswith("gaps"):
        hit[-1] = False
        return np.where(hit, np.nan, y)
    factors = np.where(draws.random(len(y)) < 0.5, 10.0, 0.1)
    return np.where(hit, y * factors, y) if (y > 0).all() else y


def hampel(y: np.ndarray) -> np.ndarray:
    """The readings with each that is far from the median of its seven replaced by that median."""
    around = pd.Series(y).rolling(7, center=True, min_periods=1)
    median = around.median().to_numpy()
    distance = np.abs(y - median)
    scale = 1.4826 * pd.Series(distance).rolling(7, center=True, min_periods=1).median().to_numpy()
    return np.where(distance > 3 * np.maximum(scale, 1e-12), median, y)


def scores(train: np.ndarray, test: np.ndarray, mean: np.ndarray, quantiles: np.ndarray, season: int) -> dict[str, Any]:
    """What one series adds to the means of its task. The scale of MASE is that of `train`, which is not spoilt."""
    error = np.abs(test - mean)
    scale = np.abs(train[season:] - train[:-season]).mean() if len(train) > season else np.nan
    short = test[:, None] - quantiles[:, 1:-1]
    loss = 2 * np.maximum(PROBABILITIES[1:-1] * short, (PROBABILITIES[1:-1] - 1) * short).mean(axis=1)
    return {
        "MASE": error.mean() / scale if scale > 0 else np.nan,
        "sMAPE": (200 * error / np.maximum(np.abs(test) + np.abs(mean), 1e-12)).mean(),
        "loss": loss.sum(),
        "size": np.abs(test).sum(),
        "in 80 %": ((quantiles[:, 1] <= test) & (test <= quantiles[:, -2])).mean(),
        "in 90 %": ((quantiles[:, 0] <= test) & (test <= quantiles[:, -1])).mean(),
    }


def tasks(data: Path) -> Iterator[tuple[str, int, list[tuple[np.ndarray, np.ndarray]]]]:
    """The name, the season, and the training and test part of each series, of the files that are there."""
    for competition in COMPETITIONS:
        file = data / f"{competition}.csv.gz"
        if not file.exists():
            continue
        table = pd.read_csv(file, dtype={"unique_id": str})
        for period, rows in table.groupby("period", sort=False):
            series = []
            for _, one in rows.groupby("unique_id"):
                series.append(tuple(one.loc[one["part"] == part, "y"].to_numpy(float) for part in ("train", "test")))
            yield f"{competition}_{period}", SEASONS[str(period)], series


def measured(method: str, season: int, series: list[tuple[np.ndarray, np.ndarray]], condition: str) -> dict[str, Any]:
    """The means of a method over the series of a task."""
    readings = [spoilt(train, condition, k) for k, (train, _) in enumerate(series)]
    name = method.removesuffix(HAMPEL)
    if name != "rfa":
        readings = [pd.Series(y).interpolate(limit_direction="both").to_numpy() for y in readings]
    began = time.process_time()
    if method.endswith(HAMPEL):
        readings = [hampel(y) for y in readings]
    forecasts = list(METHODS[name](readings, [len(test) for _, test in series], season))
    seconds = (time.process_time() - began) / len(series)
    rows = [scores(*parts, *forecast, season) for parts, forecast in zip(series, forecasts, strict=True)]
    found = pd.DataFrame(rows)
    means = found[["MASE", "sMAPE", "in 80 %", "in 90 %"]].mean().to_dict()
    return {**means, "WQL": found["loss"].sum() / found["size"].sum(), "seconds": seconds, "series": len(series)}


def time_ratios(data: Path, each: int) -> pd.DataFrame:
    """Processor time of `rfa` over AutoETS's in turns, bands included: three panels of `each` series a task."""
    rows = []
    for task, season, series in tasks(data):
        spent = dict.fromkeys(("rfa", "AutoETS"), 0.0)
        for turn in range(4):
            panel = series[turn :: max(1, len(series) // each)][:each]
            for name in spent:
                began = time.process_time()
                list(METHODS[name]([train for train, _ in panel], [len(test) for _, test in panel], season))
                spent[name] += time.process_time() - began if turn else 0.0  # compilers work in the first turn
        rows.append({"task": task, "ratio": spent["rfa"] / spent["AutoETS"]})
    return pd.DataFrame(rows)


def report(found: pd.DataFrame, published: pd.DataFrame | None) -> str:
    """Tables of FILE in Markdown: each task, the leaderboard, and conditions over clean readings."""
    keys, columns = ["condition", "method", "task"], ["MASE", "sMAPE", "WQL", "in 80 %", "in 90 %"]
    values = found.set_index(keys).sort_index()
    text = [values[["series", *columns]].round(3).reset_index().to_markdown(index=False)]
    clean = found[found["condition"] == "clean"]
    boards = [_over_naive(clean[~clean["task"].str.endswith("other")], "seasonal naive")]
    if published is not None:
        boards.append(_over_naive(published[published["task"].isin(clean["task"])], "seasonal_naive"))
    text.append(pd.concat(boards).sort_values("MASE").round(3).to_markdown())
    mase = values["MASE"].unstack("condition")
    text.append(mase.div(mase["clean"], axis=0).groupby("method").agg(geometric_mean).round(3).to_markdown())
    means = mase.groupby("method").agg(geometric_mean)
    for others in ("", HAMPEL):
        peers = [name + others for name in PEERS if name + others in means.index]
        if peers and "rfa" in means.index:
            name = f"rfa over the best peer{others}"
            text.append((means.loc["rfa"] / means.loc[peers].min()).rename(name).round(3).to_markdown())
    return "\n\n".join([*text, "aims: " + "; ".join(f"{name}: {value}" for name, value in AIMS.items())])


def _over_naive(board: pd.DataFrame, naive: str) -> pd.DataFrame:
    """Geometric means of MASE and WQL over those of the seasonal naive forecast, of methods that have each task."""
    wide = board.pivot_table(index="method", columns="task", values=["MASE", "WQL"]).dropna()
    relative = wide.div(wide.loc[naive]) if naive in wide.index else wide * np.nan
    return pd.DataFrame({name: relative[name].agg(geometric_mean, axis=1) for name in ("MASE", "WQL")})


def geometric_mean(values: pd.Series) -> float:
    """The exponential of the mean of the logarithms."""
    return float(np.exp(np.log(values).mean()))


def draw(found: pd.DataFrame, file: Path) -> None:
    """The mean MASE over the share of wrong readings, over that of `rfa` on clean ones."""
    import matplotlib.pyplot as plt

    means = found.groupby(["condition", "method"])["MASE"].agg(geometric_mean).unstack("condition")
    names = ["clean", *sorted((name for name in means if name.startswith("spoilt")), key=_percent)]
    shares = [0, *map(_percent, names[1:])]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for k, name in enumerate(("rfa", *PEERS)):
        line = means.loc[name, names] / means.loc["rfa", "clean"]
        axes.plot(shares, line, "o-", color=f"C{k}", label=name, lw=2.5 if name == "rfa" else 1.2)
        if name + HAMPEL in means.index:
            cleaned = [line.iloc[0], *(means.loc[name + HAMPEL, names[1:]] / means.loc["rfa", "clean"])]
            axes.plot(shares, cleaned, "o--", color=f"C{k}", label=name + HAMPEL, lw=1.2)
    axes.set(yscale="log", xlabel="wrong readings, %", ylabel="MASE over that of rfa on clean readings")
    axes.set_yticks([1, 1.5, 2, 3, 5, 8], labels=["1", "1.5", "2", "3", "5", "8"])
    axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(file)


def _percent(condition: str) -> int:
    return int(condition.split("-")[1])


def from_mcomp(file: Path, out: Path) -> None:
    """Write the series of an `.rda` file of Mcomp as a long table."""
    import rdata  # type: ignore[import-not-found]

    parsed = rdata.read_rda(file)
    parts = []
    for name, one in parsed[file.stem].items():
        period = str(np.asarray(one["period"]).ravel()[0]).lower()
        for part, key in (("train", "x"), ("test", "xx")):
            y = np.asarray(one[key], float).ravel()
            parts.append(pd.DataFrame({"unique_id": name, "period": period, "y": y, "part": part}))
    table = pd.concat(parts)
    table["ds"] = table.groupby("unique_id").cumcount()
    table.to_csv(out, index=False)


def main() -> None:
    """Measure what FILE lacks, and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines; default: DIR/forecasts.jsonl")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=["clean"])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th series of a task")
    parser.add_argument("--times", type=int, metavar="N", help="compare processor times in turns, N series a turn")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the error over the share of wrong readings")
    parser.add_argument("--mcomp", type=Path, metavar="M3.rda", help="make DIR/m3.csv.gz of it")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.mcomp:
        return from_mcomp(given.mcomp, given.data / "m3.csv.gz")
    if given.times:
        return print(time_ratios(given.data, given.times).round(3).to_markdown(index=False))
    out = given.out or given.data / "forecasts.jsonl"
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    for task, season, series in tasks(given.data):
        for condition in given.conditions:
            cleaned = [name + HAMPEL for name in given.methods if name in PEERS and condition.startswith("spoilt")]
            for method in [*given.methods, *cleaned]:
                key = {"task": task, "condition": condition, "method": method, "every": given.every}
                if any(key.items() <= line.items() for line in lines):
                    continue
                lines.append(key | measured(method, season, series[:: given.every], condition))
                write_text_whole(out, "".join(json.dumps(line) + "\n" for line in lines))
                print(lines[-1], flush=True)
    table = given.data / "published.csv"  # of all series
    found = pd.DataFrame([line for line in lines if line["every"] == given.every])
    print(report(found, pd.read_csv(table) if table.exists() and given.every == 1 else None))
    if given.figure:
        draw(found, given.figure)


if __name__ == "__main__":
    main()
