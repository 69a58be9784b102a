"""Weekly CO2 on Mauna Loa: bridge missing weeks, find bad readings, look half a year ahead.

    python examples/filter_co2.py [--data co2.csv]

`co2.csv` has a line `date,co2` and rows `19580329,316.1`, the value empty where a week is missing. The one beside this
script is the record of C. D. Keeling and T. P. Whorf (Scripps), 1958 to 2001, public domain, as statsmodels has it.
It takes under a minute and draws docs/filtering-co2.png.
"""

import argparse
import csv
import math
from datetime import date
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from rfa.estimation import Estimate, LinearSDE, robust_estimate
from rfa.report.figures import COLOURS, save

DATA = Path(__file__).with_name("co2.csv")
FIGURE = Path(__file__).parents[1] / "docs" / "filtering-co2.png"
WEEKS, AHEAD = 480, 26  # filtered, from the first week on: missing weeks are frequent there; and forecast
OUTLIERS = 12
INSIDE = 1.6448536  # standard deviations on either side of 90 % of a normal distribution


def load(path: Path = DATA) -> tuple[Tensor, Tensor]:
    """Times in years and CO2 in ppm, NaN where a week is missing, `(weeks,)` both."""
    with path.open(encoding="utf-8", newline="") as file:
        given = [(row["date"], row["co2"]) for row in csv.DictReader(file)]
    days = [date(int(day[:4]), int(day[4:6]), int(day[6:])) for day, _ in given]
    rows = [(day, float(value or "nan")) for day, (_, value) in zip(days, given, strict=True)]
    times = [1 + day.toordinal() / 365.2425 for day, _ in rows]
    return torch.tensor(times, dtype=torch.float64), torch.tensor([value for _, value in rows], dtype=torch.float64)


def seasonal() -> LinearSDE:
    """CO2 in ppm over years: a level, its slope, and two oscillations, once and twice a year, all of them seen as one.

    The level wanders by 0.7 ppm in a year (`sqrt 0.5`), a reading errs by 0.3 ppm (`sqrt 0.1`).
    """
    dynamics = torch.zeros(6, 6, dtype=torch.float64)
    dynamics[0, 1] = 1.0  # the level moves by the slope
    for place, turns in ((2, 1), (4, 2)):
        dynamics[place, place + 1], dynamics[place + 1, place] = -2 * math.pi * turns, 2 * math.pi * turns
    noise = torch.diag(torch.tensor([0.5, 0.02, 0.02, 0.02, 0.01, 0.01], dtype=torch.float64))
    return LinearSDE(dynamics, noise, torch.tensor([[1.0, 0, 1, 0, 1, 0]]), torch.tensor([[0.1]]))


def spoil(values: Tensor, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Readings with `count` of them 2 to 5 ppm off, up or down; and which, as a mask."""
    generator = torch.Generator().manual_seed(seed)
    there = (~values.isnan()).nonzero()[:, 0]
    hit = torch.zeros(len(values), dtype=torch.bool)
    hit[there[torch.randperm(len(there), generator=generator)[:count]]] = True
    size = 2 + 3 * torch.rand(values.shape, generator=generator, dtype=torch.float64)
    sign = torch.randint(2, values.shape, generator=generator) * 2 - 1
    return values + size * sign * hit, hit


def smooth(times: Tensor, values: Tensor, later: Tensor, robust: bool = True) -> Estimate:
    """The state at each week from the weeks on both sides of it, and at `later` times, which is a forecast."""
    options = {} if robust else {"nu": torch.inf}
    return robust_estimate(
        seasonal(),
        times,
        values[:, None],  # one component
        direction="smooth",
        query_times=torch.cat([times, later]),
        **options,
    )


def readings(estimate: Estimate) -> tuple[Tensor, Tensor]:
    """What a reading would show, in ppm: mean, and half the width of the band that holds 90 % of them."""
    sde = seasonal()
    variance = sde.observation @ estimate.covariance @ sde.observation.mT + sde.observation_noise
    return (estimate.mean @ sde.observation.mT)[:, 0], INSIDE * variance[:, 0, 0].sqrt()


def own_weights(estimate: Estimate, values: Tensor) -> Tensor:
    """How far each week's estimate believes that week's reading, 0 to 1; NaN where there is none."""
    return estimate.weights[: len(values)].diagonal().masked_fill(values.isnan(), torch.nan)


def draw(times: Tensor, seen: Tensor, hit: Tensor, later: Tensor, came: Tensor, estimate: Estimate) -> Figure:
    """Estimate and band over the readings; below, the weight of each reading."""
    mean, half = readings(estimate)
    at, weight = torch.cat([times, later]), own_weights(estimate, seen)
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 5.2), layout="constrained", sharex=True, height_ratios=[3, 1]
    )
    band = {"color": COLOURS[0], "alpha": 0.25, "linewidth": 0}
    above.fill_between(at, mean - half, mean + half, **band, label="90 % of readings")
    above.plot(at, mean, color=COLOURS[0], linewidth=1, label="estimate, forecast")
    for axes, height in ((above, seen), (below, weight)):
        axes.plot(times[~hit], height[~hit], ".", color="0.35", markersize=2.5, label="reading")
        axes.plot(times[hit], height[hit], "^", color=COLOURS[3], markersize=5, label="reading, made wrong")
        axes.axvline(times[-1], color="0.6", linestyle=":", linewidth=1)
        for k in seen.isnan().nonzero()[:, 0].tolist():
            axes.axvspan(times[k] - 1 / 104, times[k] + 1 / 104, color=COLOURS[1], alpha=0.35, linewidth=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.5)
    above.plot(later, came, ".", color=COLOURS[2], markersize=3.5, label="reading, not yet seen")
    above.set(ylabel="CO2 (ppm)")
    above.legend(frameon=False, fontsize=8, loc="upper left")
    below.set(xlabel="year (orange: missing weeks; dotted: now)", ylabel="weight", ylim=(-0.05, 1.05))
    return figure


def main(data: Path, figure: Path, weeks: int = WEEKS) -> None:
    """Load, spoil, smooth, print, draw."""
    times, recorded = load(data)
    now, then = slice(weeks), slice(weeks, weeks + AHEAD)
    seen, hit = spoil(recorded[now], OUTLIERS)
    estimate, gaussian = (smooth(times[now], seen, times[then], robust) for robust in (True, False))

    (mean, half), weight = readings(estimate), own_weights(estimate, seen)
    missing, good = seen.isnan(), ~seen.isnan() & ~hit
    print(f"{weeks} weeks, {int(missing.sum())} of them missing, {OUTLIERS} made wrong")
    print(f"weights: made wrong {weight[hit].min():.3f} to {weight[hit].max():.3f}, others' median", end=" ")
    print(f"{weight[good].median():.2f}; {int((weight[good] < 0.3).sum())} others below 0.3")
    print(f"in the band: {((recorded[now] - mean[now]).abs() < half[now])[good].double().mean():.1%} of the others")
    for name, each in (("robust", estimate), ("Gaussian", gaussian)):
        away = (readings(each)[0][: len(times)][now] - recorded[now])[hit].square().mean().sqrt()
        print(f"{name}: from the record where it was made wrong: {away:.2f} ppm", end="")
        miss = (readings(each)[0][weeks:] - recorded[then]).square().nanmean().sqrt()
        print(f"; forecast of {AHEAD} weeks: {miss:.2f} ppm")
    gap = half[now][missing].max()
    print(f"half a band: {half[now][good].median():.2f} ppm, in gaps up to {gap:.2f}, at the end {half[-1]:.2f}")
    save(draw(times[now], seen, hit, times[then], recorded[then], estimate), figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    given = parser.parse_args()
    main(given.data, given.figure)
