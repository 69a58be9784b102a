"""Weekly CO2 on Mauna Loa: bridge missing weeks, find bad readings, look half a year ahead.

    python examples/filter_co2.py [--data co2.csv]

`co2.csv` has a line `date,co2` and rows `19580329,316.1`, the value empty where a week is missing. The one beside this
script is the record of C. D. Keeling and T. P. Whorf (Scripps), 1958 to 2001, public domain, as statsmodels has it.
It takes about a minute and draws docs/filtering-co2.png.
"""

import argparse
import csv
from datetime import date
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from rfa.estimation import RobustFilter, Season, SeriesEstimate, Trend
from rfa.forecasting.style import COLOURS, save

DATA = Path(__file__).with_name("co2.csv")
FIGURE = Path(__file__).parents[1] / "docs" / "filtering-co2.png"
WEEKS, AHEAD = 480, 26  # filtered, from the first week on: missing weeks are frequent there; and forecast
OUTLIERS = 12


def load(path: Path = DATA) -> tuple[Tensor, Tensor]:
    """Times in years and CO2 in ppm, NaN where a week is missing, `(weeks,)` both."""
    with path.open(encoding="utf-8", newline="") as file:
        given = [(row["date"], row["co2"]) for row in csv.DictReader(file)]
    days = [date(int(day[:4]), int(day[4:6]), int(day[6:])) for day, _ in given]
    rows = [(day, float(value or "nan")) for day, (_, value) in zip(days, given, strict=True)]
    times = [1 + day.toordinal() / 365.2425 for day, _ in rows]
    return torch.tensor(times, dtype=torch.float64), torch.tensor([value for _, value in rows], dtype=torch.float64)


def spoil(values: Tensor, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Readings with `count` of them 2 to 5 ppm off, up or down; and which, as a mask."""
    generator = torch.Generator().manual_seed(seed)
    there = (~values.isnan()).nonzero()[:, 0]
    hit = torch.zeros(len(values), dtype=torch.bool)
    hit[there[torch.randperm(len(there), generator=generator)[:count]]] = True
    size = 2 + 3 * torch.rand(values.shape, generator=generator, dtype=torch.float64)
    sign = torch.randint(2, values.shape, generator=generator) * 2 - 1
    return values + size * sign * hit, hit


def fitted(times: Tensor, values: Tensor, robust: bool = True) -> RobustFilter:
    """A level that moves by a slope, and a season of two harmonics a year, with noises by maximum likelihood."""
    return RobustFilter(Trend() + Season(period=1.0, harmonics=2), robust).fit(times, values)


def draw(smoothed: SeriesEstimate, ahead: SeriesEstimate, hit: Tensor, came: Tensor) -> Figure:
    """Estimate and band over the readings; below, the weight of each reading."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 5.2), layout="constrained", sharex=True, height_ratios=[3, 1]
    )
    times, seen = smoothed.times, smoothed.values
    smoothed.plot(above)
    ahead.plot(above, label="forecast")
    above.plot(times[hit], seen[hit], "^", color=COLOURS[3], markersize=5, label="reading, made wrong")
    above.plot(ahead.times, came, ".", color=COLOURS[2], markersize=3.5, label="reading, not yet seen")
    below.plot(times[~hit], smoothed.weights[~hit], ".", color="0.35", markersize=2.5)
    below.plot(times[hit], smoothed.weights[hit], "^", color=COLOURS[3], markersize=5)
    for axes in (above, below):
        axes.axvline(times[-1], color="0.6", linestyle=":", linewidth=1)
        for k in seen.isnan().nonzero()[:, 0].tolist():
            axes.axvspan(times[k] - 1 / 104, times[k] + 1 / 104, color=COLOURS[1], alpha=0.35, linewidth=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.5)
    above.set(ylabel="CO2 (ppm)")
    above.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    below.set(xlabel="year (orange: missing weeks; dotted: now)", ylabel="weight", ylim=(-0.05, 1.05))
    return figure


def main(data: Path, figure: Path, weeks: int = WEEKS) -> None:
    """Load, spoil, fit, smooth, forecast, print, draw."""
    times, recorded = load(data)
    now, then = slice(weeks), slice(weeks, weeks + AHEAD)
    seen, hit = spoil(recorded[now], OUTLIERS)
    good = ~seen.isnan() & ~hit
    print(f"{weeks} weeks, {int(seen.isnan().sum())} of them missing, {OUTLIERS} made wrong")
    for name, robust in (("Kalman", False), ("robust", True)):
        filter_ = fitted(times[now], seen, robust)
        smoothed, ahead = filter_.smooth(), filter_.forecast(times[then])
        away = (smoothed.mean - recorded[now])[hit].square().mean().sqrt()
        miss = (ahead.mean - recorded[then]).square().nanmean().sqrt()
        lower, upper = smoothed.interval(0.9)
        inside = ((lower < seen) & (seen < upper))[good].double().mean()
        print(f"{name}: from the record where it was made wrong {away:.2f} ppm, forecast {miss:.2f} ppm", end=", ")
        print(f"others in their 90 % band {inside:.1%}, half a band {(upper - lower)[good].median() / 2:.2f} ppm")
        print("   ", ", ".join(f"{parameter} {value:.3g}" for parameter, value in filter_.parameters.items()))
    weight = smoothed.weights
    print(f"weights: made wrong {weight[hit].min():.3f} to {weight[hit].max():.3f}, others' median", end=" ")
    print(f"{weight[good].median():.2f}; outliers: {int(smoothed.outliers.sum())}")
    save(draw(smoothed, ahead, hit, recorded[then]), figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    given = parser.parse_args()
    main(given.data, given.figure)
