"""Compare filters on real sets, none of them tuned: `python benchmarks/filtering_sets.py --data DIR`.

DIR has a file NAME.csv for each name in SETS: the columns time and value, or time, x and y of a track. Sets without a
file are left out. The command writes benchmarks/results/filtering_sets.json and prints the tables of
docs/record/filters.md, which names the sources. `--only` measures some sets; the others in the JSON stay unchanged.

All filters have the model in SETS, one start, and one routine that fits the parameters (`SetFit`). A draw holds out a
fifth of the rows and adds errors to a share of the others. Each filter predicts the rows held out from earlier ones.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch
from filters import Weight, huber, variational, wolf

from rfa.environment import environment
from rfa.estimation import Component, Level, Season, StructuralModel, Trend
from rfa.estimation.parameter_search import ParameterSearch, series_scale
from rfa.estimation.problem import Transitions
from rfa.estimation.readings_problem import ReadingsProblem, ReadingsTable
from rfa.estimation.recursive_filter import Recursion
from rfa.estimation.row_filters import filter_rows
from rfa.estimation.series import Readings, read_series
from rfa.estimation.structural_model import ComponentMatrices, ParameterKind, ParameterValues, SeriesScale
from rfa.estimation.time_axis import TimeAxis
from rfa.files import write_text_whole

RESULTS = Path(__file__).parent / "results" / "filtering_sets.json"
DRAWS = 5
HELD_OUT = 0.2
SHARES = (0.0, 0.05, 0.2)  # of the rows that are not held out, to which errors are added
SIZE = 10.0  # their standard deviation, in robust standard deviations of the change from reading to reading
QUIET = 20  # rows at the start that are neither held out nor changed
BEST = 1.05  # aim: at most this times the error of the best filter, in each set and for each share
TAIL, WIDE = 0.05, 100.0  # of the density that scores: 0.05 N(m, 100 S) beside 0.95 N(m, S)
_FAR = 4.0  # standard deviations, of the fit
_UNKNOWN = 1e4  # variance of a prediction, in those of the series, above which there is none


@dataclass(frozen=True)
class Track(Component):
    """A correlated random walk in the plane: `dx = v dt, dv = -mu v dt + dW`, x and y with the same mu and Var dW.

    Velocities start stationary. With a diffuse start the likelihood would grow with mu without an end.

    Source: Johnson and others, Continuous-time correlated random walk model for animal telemetry data (2008).
    """

    name: str = "track"
    stationary = (1, 3)

    @property
    def states(self) -> dict[str, float]:
        """Position and velocity. What a reading of x or y shows is said by `observation`."""
        return {"x": 1.0, "x.velocity": 0.0, "y": 0.0, "y.velocity": 0.0}

    @property
    def parameters(self) -> dict[str, ParameterKind]:
        """The variance of the velocity's change, and what is left of a velocity after a unit of time."""
        return {"sigma2.velocity": "variance", "damping.velocity": "factor"}

    def start(self, scale: SeriesScale) -> dict[str, float]:
        """A tenth of the change from reading to reading; a velocity that fades within ten readings."""
        return {"sigma2.velocity": 0.1 * scale.step_variance / scale.gap**3, "damping.velocity": 0.1 / scale.gap}

    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A and Q: those of a damped slope, twice."""
        noise, decay = parameters["sigma2.velocity"], parameters["damping.velocity"]
        diffusion = torch.diag_embed(torch.stack([0 * noise, noise] * 2, dim=-1))
        dynamics = -torch.diag_embed(torch.stack([0 * decay, decay] * 2, dim=-1))
        moves = torch.diag(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), 1)
        return dynamics + moves, diffusion

    def units(self, gap: float) -> tuple[float, ...]:
        """A velocity of 1 in the median gap."""
        return 1.0, 1.0 / gap, 1.0, 1.0 / gap


_DAY = Season(24.0, harmonics=2, name="day")
SETS: dict[str, Component | StructuralModel] = {
    "harbor_seal": Track(),
    "fur_seal": Track(),
    "bearded_seal": Track(),
    "elephant_seal": Track(),
    "weddell_seal": Track(),
    "latency": Level(),
    "machine": Level(),
    "travel_time": Level(),
    "processor": Level(),
    "ad_price": Level() + _DAY,
    "nile": Level(),
    "co2": Trend() + Season(365.25, harmonics=2, name="year"),
    "tide": Level() + Season(12.4206, name="lunar") + Season(23.9345, name="sidereal"),
    "light_curve": Level(),
}
KALMAN, RFA = "Kalman", "rfa"
FILTERS: dict[str, Weight | None] = {
    KALMAN: lambda innovation, variances: 1.0,
    "Huber": huber(),
    "WoLF": wolf(16.0),  # c = 4, of the tracking figure in the paper's code
    "Student-t": variational(4.0),
    RFA: None,
}


class Predicted(NamedTuple):
    """What is predicted of T rows of m readings from earlier rows, with the noise of the readings."""

    mean: np.ndarray  # `(T, m)`
    variance: np.ndarray  # `(T, m, m)`

    def distance(self, values: np.ndarray) -> np.ndarray:
        """The squared Mahalanobis distance of values `(T, m)`, `(T,)`."""
        error = values - self.mean
        return np.einsum("ti,ti->t", error, np.linalg.solve(self.variance, error[..., None])[..., 0])


def predict(problem: ReadingsProblem, scale: SeriesScale, weight: Weight | None, size: int) -> Predicted:
    """The filter with this weight, over rows of `size` readings of one time each. None: the filter of the library."""
    table = problem.table
    noise = problem.noise[0].numpy().reshape(-1, size)
    rows = table.rows.numpy().reshape(len(noise), size, -1)
    first, index = problem.first(scale), table.lag_index[size - 1 :: size]
    if weight is None:
        grid, order = problem.grid(), torch.arange(len(noise))[None]
        seen = grid.observed_components.reshape(1, -1, size).sum(-1)
        shaped = grid.rows.reshape(1, *rows.shape), grid.values.reshape(1, -1, size)
        grid = replace(grid, times=grid.times[:, ::size], rows=shaped[0], values=shaped[1])
        grid = replace(grid, observation_index=order, query_index=order, observed_components=seen)
        steps = Transitions(problem.transition[0], problem.variance[0], index[None])
        options = {"compiled": True, "robust": True, "predict": True}
        states = filter_rows(grid.bounded(), steps, Recursion.first(first), **options).predicted
        assert states is not None
        mean, covariance = states.mean[0].numpy(), states.covariance[0].numpy()
    else:
        values = table.values.numpy().reshape(-1, size)
        matrices = (x[0].numpy() for x in (problem.transition, problem.variance, first.mean, first.covariance))
        mean, covariance = _weighted(rows, values, noise, index.numpy(), *matrices, weight)
    of_rows = rows @ covariance @ rows.swapaxes(1, 2)
    return Predicted(np.einsum("tij,tj->ti", rows, mean), of_rows + noise[:, None] * np.eye(size))


def _weighted(
    rows: np.ndarray,
    values: np.ndarray,
    noise: np.ndarray,
    index: np.ndarray,
    transition: np.ndarray,
    variance: np.ndarray,
    mean: np.ndarray,
    covariance: np.ndarray,
    weight: Weight,
) -> tuple[np.ndarray, np.ndarray]:
    """The states before each row, by the recursion of the Kalman filter with the noise R / w of each row."""
    means, covariances = np.empty((len(rows), len(mean))), np.empty((len(rows), *covariance.shape))
    scale, present, identity = np.sqrt(noise), ~np.isnan(values).any(-1), np.eye(len(mean))
    rows, values = rows / scale[..., None], values / scale
    for k, row in enumerate(rows):
        if k:
            step = transition[index[k - 1]]
            mean, covariance = step @ mean, step @ covariance @ step.T + variance[index[k - 1]]
        means[k], covariances[k] = mean, covariance
        if present[k]:
            across = covariance @ row.T
            variances, basis = np.linalg.eigh(row @ across)
            innovation, across = basis.T @ (values[k] - row @ mean), across @ basis
            noise_now = 1 / weight(innovation, variances)
            gain = across / (variances + noise_now)
            mean = mean + gain @ innovation
            left = identity - gain @ (basis.T @ row)
            covariance = left @ covariance @ left.T + noise_now * gain @ gain.T  # Joseph's form, for a wide start
    return means, covariances


@dataclass(frozen=True)
class SetFit(ParameterSearch):
    """The fit of `RobustFilter`, with any filter in the place of its own.

    A robust filter's fit maximises the exact Gaussian log-likelihood of the rows that this filter's own predictions
    miss by at most four standard deviations: it fits and chooses rows in turns, up to four times. The Kalman filter's
    fit maximises that of all rows. Starts, search and likelihood are the same.
    """

    filter_name: str
    size: int  # readings in a row

    def fitted(self) -> tuple[dict[str, float], Readings]:
        """The parameters, and the readings; of `rfa` without wrong ones at the start."""
        if self.filter_name == KALMAN:
            return self.maximum(self.readings, self.start).values, self.readings
        found, readings, _ = self.robust_fit()
        return found.values, readings

    def predictions(self, values: Any, readings: Readings) -> Predicted:
        """Of each row."""
        problem = ReadingsTable.of(self.model, readings).problem(values)
        return predict(problem, self.scale, FILTERS[self.filter_name], self.size)

    def _innovations(self, values: Any, readings: Readings) -> np.ndarray:
        """The distance of each row, given to each reading, so that 4 is as rare as for one reading."""
        found = self.predictions(values, readings)
        rare = scipy.stats.chi2.isf(2 * scipy.stats.norm.sf(_FAR), self.size)
        distance = np.sqrt(found.distance((readings.used - readings.offset).reshape(-1, self.size)) / rare) * _FAR
        wide = found.variance.diagonal(axis1=1, axis2=2).max(-1)
        return np.repeat(np.where(wide > _UNKNOWN * self.scale.widest, np.nan, distance), self.size)

    def _wrong_start(self, values: Any) -> np.ndarray:
        """Only `RobustFilter` refuses readings at the start."""
        if self.filter_name == RFA:
            return super()._wrong_start(values)
        return np.zeros(len(self.readings), dtype=bool)


@dataclass(frozen=True)
class Draw:
    """A set of which rows are held out, with added errors in others."""

    times: np.ndarray  # `(T,)`
    values: np.ndarray  # `(T, m)`
    given: np.ndarray  # `(T, m)`: what filters see, NaN where held out
    held: np.ndarray  # `(T,)`

    @classmethod
    def of(cls, times: np.ndarray, values: np.ndarray, share: float, seed: int) -> "Draw":
        """The same rows are held out for each share, and errors of a smaller share are among those of a larger one."""
        random = np.random.default_rng(seed)
        late = np.arange(len(times)) >= QUIET
        held = (random.random(len(times)) < HELD_OUT) & late
        hit = (random.random(len(times)) < share) & late & ~held
        errors = (
            SIZE * 1.4826 * np.median(np.abs(np.diff(values, axis=0)), axis=0) * random.standard_normal(values.shape)
        )
        given = np.where(held[:, None], np.nan, values + hit[:, None] * errors)
        return cls(times, values, given, held)

    def readings(self, model: StructuralModel) -> Readings:
        """Of one sensor, or of x and y in turns."""
        size, observation, sensor = self.values.shape[1], None, None
        if size == 2:
            observation = np.tile(np.eye(4)[[0, 2]], (len(self.times), 1))
            sensor = ["x", "y"] * len(self.times)
        times = np.repeat(self.times, size)
        known = {"exog": None, "offset": None, "noise": None, "observation": observation}
        axis = TimeAxis.of(times, "day")
        return read_series(axis, times, self.given.reshape(-1), sensor, list(model.states), **known)[0]


def score(draw: Draw, found: Predicted) -> dict[str, float]:
    """Of the rows held out: mean distance, log density by N and with tails, and the share within the 90 % region."""
    held, m = draw.held, draw.values.shape[1]
    distance = found.distance(draw.values)[held]
    logarithm = np.linalg.slogdet(found.variance[held])[1]

    def density(factor: float) -> np.ndarray:
        return -0.5 * (distance / factor + logarithm + m * math.log(2 * math.pi * factor))

    tails = np.logaddexp(math.log(1 - TAIL) + density(1.0), math.log(TAIL) + density(WIDE))
    return {
        "error": float(np.linalg.norm((draw.values - found.mean)[held], axis=-1).mean()),
        "tails": float(tails.mean()),
        "gaussian": float(density(1.0).mean()),
        "coverage": float((distance <= scipy.stats.chi2.ppf(0.9, m)).mean()),
    }


def measured(name: str, times: np.ndarray, values: np.ndarray) -> list[dict]:
    """A line for each share and filter of a set, with the scores of each draw."""
    model, lines = StructuralModel.of(SETS[name]), []
    for share in SHARES:
        draws = [Draw.of(times, values, share, seed) for seed in range(DRAWS)]
        for filter_name in FILTERS:
            scores, begun = [], time.process_time()
            for draw in draws:
                readings = draw.readings(model)
                scale = series_scale(readings, robust=filter_name != KALMAN)
                fit = SetFit(model, readings, scale, {}, 200, filter_name, values.shape[1])
                scores.append(score(draw, fit.predictions(*fit.fitted())))
            line = {"set": name, "share": share, "filter": filter_name, "rows": len(times)}
            line |= {key: [one[key] for one in scores] for key in scores[0]}
            lines.append({**line, "seconds": time.process_time() - begun})
    return lines


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The times `(T,)` and the values `(T, m)` of a file."""
    table = np.loadtxt(path, delimiter=",", skiprows=1)
    return table[:, 0], table[:, 1:]


class Means(NamedTuple):
    """The means over draws of all conditions, a set with a share each: `(sets, shares, filters)`."""

    sets: list[str]
    filters: list[str]
    values: dict[str, np.ndarray]  # by the name of a score

    @classmethod
    def of(cls, lines: list[dict]) -> "Means":
        """Of the lines of all sets."""
        sets, filters = (list(dict.fromkeys(line[key] for line in lines)) for key in ("set", "filter"))
        keys, shape = ("error", "tails", "gaussian", "coverage"), (len(sets), len(SHARES), len(filters))
        return cls(sets, filters, {key: np.array([np.mean(x[key]) for x in lines]).reshape(shape) for key in keys})

    @property
    def to_best(self) -> np.ndarray:
        """The error of each filter over that of the best other filter."""
        error = self.values["error"]
        others = [np.delete(error, k, axis=-1).min(-1) for k in range(error.shape[-1])]
        return error / np.stack(others, axis=-1)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def summary(means: Means) -> str:
    """For each filter: how far it is from the best other one, mean ranks, log likelihoods and coverage."""
    ratio, rows = means.to_best, []
    ranks = {
        key: scipy.stats.rankdata(sign * means.values[key], axis=-1) for key, sign in (("error", 1), ("tails", -1))
    }
    for k, name in enumerate(means.filters):
        own, coverage = ratio[..., k], means.values["coverage"][..., k]
        near = int((own <= BEST).sum())
        cells = [name, f"{own.max():.3f}", f"{np.median(own):.3f}", f"{near} of {own.size}"]
        cells += [f"{ranks[key][..., k].mean():.2f}" for key in ranks]
        cells += [f"{means.values[key][..., k].mean():.2f}" for key in ("tails", "gaussian")]
        rows.append([*cells, f"{coverage.mean():.1%}, {coverage.min():.1%} to {coverage.max():.1%}"])
    head = ["filter", "error over the best other's, worst", "median", f"within {BEST - 1:.0%}", "rank by error"]
    return _table([*head, "rank by log likelihood", "log likelihood", "Gaussian", "coverage"], rows)


def tests(means: Means) -> str:
    """Wilcoxon's signed-rank test over sets, of `rfa` with each other filter, for each share."""
    mine, rows = means.filters.index(RFA), []
    for k, name in enumerate(means.filters):
        for s, share in enumerate(SHARES if k != mine else ()):
            error, tails, coverage = (means.values[key][:, s] for key in ("error", "tails", "coverage"))
            logs, gains = np.log(error[:, mine] / error[:, k]), tails[:, mine] - tails[:, k]
            misses = np.abs(coverage[:, mine] - 0.9) - np.abs(coverage[:, k] - 0.9)
            ratio, count = math.exp(np.median(logs)), len(logs)
            cells = [name, f"{share:.0%}", f"{ratio:.3f}", f"{(logs < 0).sum()} of {count}", _p(logs)]
            cells += [f"{np.median(gains):+.3f}", f"{(gains > 0).sum()} of {count}", _p(gains), _p(misses)]
            rows.append(cells)
    head = ["rfa beside", "added", "ratio of errors, median", "smaller in", "p", "gain in log likelihood, median"]
    return _table([*head, "larger in", "p", "p, coverage"], rows)


def _p(differences: np.ndarray) -> str:
    return f"{scipy.stats.wilcoxon(differences).pvalue:.2g}" if np.any(differences) else "1"


def errors_table(means: Means) -> str:
    """The error of each filter in each condition, the best one bold, and the ratio of `rfa` to the best other one."""
    rows = []
    for s, share in enumerate(SHARES):
        for k, name in enumerate(means.sets):
            error = means.values["error"][k, s]
            cells = [f"**{x:.4g}**" if x == error.min() else f"{x:.4g}" for x in error]
            ratio, covered = means.to_best[k, s, means.filters.index(RFA)], means.values["coverage"][k, s]
            rows.append([f"{share:.0%}", name, *cells, f"{ratio:.3f}", f"{covered[means.filters.index(RFA)]:.1%}"])
    return _table(["added", "set", *means.filters, "rfa over the best other", "rfa's coverage"], rows)


def main() -> None:
    """Measure the sets, write the results and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with NAME.csv; without it the stored results are printed")
    parser.add_argument("--only", nargs="+", choices=SETS, help="by default all sets")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {"lines": []}
    for name in (given.only or SETS) if given.data else ():
        path = given.data / f"{name}.csv"
        if not path.exists():
            print(f"{name}: {given.data} has no {name}.csv, so it is left out")
            continue
        kept = [line for line in results["lines"] if line["set"] != name] + measured(name, *read(path))
        kept.sort(key=lambda line: list(SETS).index(line["set"]))
        results = {"environment": environment(), "lines": kept}
        write_text_whole(given.out, json.dumps(results, indent=1) + "\n")
    tables: list[Callable[[Means], str]] = [summary, tests, errors_table]
    if results["lines"]:
        print("\n\n".join(table(Means.of(results["lines"])) for table in tables))


if __name__ == "__main__":
    main()
