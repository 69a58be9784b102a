"""Compare robust filters on real sets: `python benchmarks/filtering.py --data DIR`, or `--data examples --only nile`.

DIR has a file NAME.csv for each name in SETS: the columns time and value, or time, x and y of a track. Sets without a
file are left out. All filters have the model in SETS, one start, and one routine that fits the parameters (`SetFit`);
none is tuned. A draw holds out a fifth of the rows and adds errors to a share of the others. Each filter predicts the
rows held out from earlier ones. Results are kept in benchmarks/results/filtering_sets.json; without `--data` their
tables are printed. `--only` measures some sets, and the others stay. docs/record/filters.md names the sources.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats
import torch

from rfa.environment import environment
from rfa.estimation import Component, Level, LinearSDE, Season, StructuralModel, Trend
from rfa.estimation.components import ComponentMatrices, ParameterKind, ParameterValues, SeriesScale
from rfa.estimation.linear_model import LinearKernel, Rows
from rfa.estimation.parameter_search import ParameterSearch, series_scale
from rfa.estimation.readings_problem import ReadingsProblem, ReadingsTable, readings_kernel
from rfa.estimation.series import ReadingInfo, Readings, read_series
from rfa.estimation.time_axis import TimeAxis
from rfa.files import write_text_whole

RESULTS = Path(__file__).parent / "results" / "filtering_sets.json"
DRAWS = 5
HELD_OUT = 0.2
SHARES = (0.0, 0.05, 0.2)  # of the rows that are not held out, to which errors are added
SIZE = 10.0  # their standard deviation, in robust standard deviations of the change from reading to reading
QUIET = 20  # rows at the start that are neither held out nor changed
TAIL, WIDE = 0.05, 100.0  # of the density that scores: 0.05 N(m, 100 S) beside 0.95 N(m, S)
_FAR = 4.0  # standard deviations, of the fit
_UNKNOWN = 1e4  # variance of a prediction, in those of the series, above which there is none


Weight = Callable[[np.ndarray, np.ndarray], Any]  # of the innovation e (m,) and the variances h (m,): w
# A robust filter computes a weight w for each row from its innovation and the covariance C P C^T of the prediction. The
# row then has the noise R / w. A weight gets both in units of the noise, in the basis in which the covariance is
# diagonal: there R is the identity.


def wolf(soft: float) -> Weight:
    """Weighted observation likelihood filter with the inverse multi-quadratic weight (Duran-Martin and others, 2024).

    `soft` is c^2. The noise R becomes `R (1 + e^T R^-1 e / c^2)`.
    """
    return lambda innovation, variances: 1 / (1 + (innovation**2).sum(-1) / soft)


def huber(bound: float = 1.345) -> Weight:
    """`min(1, bound / d)` with the Mahalanobis distance d of the innovation."""
    return lambda innovation, variances: 1 / ((innovation**2 / (variances + 1)).sum(-1) / bound**2).clip(1.0) ** 0.5


def variational(nu: float, steps: int = 8) -> Weight:
    """Student-t errors with variational Bayes: the scale of a row and the state are fitted in turns.

    `w = (nu + m) / (nu + tr R^-1 (r r^T + C P C^T))`. The residual r and the variance P are those after the row, with
    the w of the step before.
    """

    def weight(innovation: np.ndarray, variances: np.ndarray) -> Any:
        left = 1 / (1 + variances)  # I - C K
        for _ in range(steps):
            found = (nu + innovation.shape[-1]) / (nu + ((left * innovation) ** 2 + left * variances).sum(-1))
            left = 1 / (1 + found[..., None] * variances)
        return found

    return weight


def weighted(
    rows: np.ndarray,
    values: np.ndarray,
    noise: np.ndarray,
    steps: np.ndarray,
    forced: np.ndarray,
    mean: np.ndarray,
    covariance: np.ndarray,
    weight: Weight,
) -> tuple[np.ndarray, ...]:
    """Means and covariances before each row, then after it: the Kalman filter with the noise R / w of each row.

    Args:
        rows, values, noise: of what is read, `(T, m, n)`, `(T, m)` with NaN where a row is missing, and `(T, m)`.
        steps, forced: transition matrices and covariances to the next row, `(T - 1, n, n)`.
        mean, covariance: of the first state.
        weight: of a row.
    """
    length, n = len(rows), len(mean)
    found = np.empty((length, n)), np.empty((length, n, n)), np.empty((length, n)), np.empty((length, n, n))
    scale, present, identity = np.sqrt(noise), ~np.isnan(values).any(-1), np.eye(n)
    rows, values = rows / scale[..., None], values / scale
    for k, row in enumerate(rows):
        if k:
            mean, covariance = steps[k - 1] @ mean, steps[k - 1] @ covariance @ steps[k - 1].T + forced[k - 1]
        found[0][k], found[1][k] = mean, covariance
        if present[k]:
            across = covariance @ row.T
            variances, basis = np.linalg.eigh(row @ across)
            innovation, across = basis.T @ (values[k] - row @ mean), across @ basis
            noise_now = 1 / weight(innovation, variances)
            gain = across / (variances + noise_now)
            mean = mean + gain @ innovation
            left = identity - gain @ (basis.T @ row)
            covariance = left @ covariance @ left.T + noise_now * gain @ gain.T  # Joseph's form, for a wide start
        found[2][k], found[3][k] = mean, covariance
    return found


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
    between = table.lags[1][size - 1 :: size].numpy()
    n, values = rows.shape[2], table.values.numpy().reshape(-1, size)
    start = problem.first(readings_kernel(problem.sde, problem.names, True), scale)[0]
    first = start[:n], start[n : n + n * n].reshape(n, n)
    transition, variance = (x[0].numpy()[between] for x in problem.steps)
    if weight is None:
        model = LinearSDE(problem.sde.dynamics[0], problem.sde.diffusion[0], torch.from_numpy(rows[0]), torch.eye(size))
        kernel = LinearKernel(model, problem.names, robust=True, by_component=False)
        errors = noise[..., None] * np.eye(size)
        given = table.readings.times[None, ::size].copy(), values[None], None, None, rows[None], errors[None]
        state = kernel.start(*(x[None] for x in first), np.full(1, np.nan))
        found, _ = kernel.run(Rows(*given), state)
        root = np.sqrt(np.maximum(found.variance[0] - noise, 0.0))  # all readings of a row are of one quantity
        return Predicted(found.predicted[0], root[:, :, None] * root[:, None] + errors)
    mean, covariance, *_ = weighted(rows, values, noise, transition, variance, *first, weight)
    of_rows = rows @ covariance @ rows.swapaxes(1, 2)
    return Predicted(np.einsum("tij,tj->ti", rows, mean), of_rows + noise[:, None] * np.eye(size))


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
        """The mean and the covariance of each row."""
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
        """The readings of one sensor, or of x and y in turns."""
        size, info = self.values.shape[1], ReadingInfo()
        if size == 2:
            observation = np.tile(np.eye(4)[[0, 2]], (len(self.times), 1))
            info = ReadingInfo(sensor=["x", "y"] * len(self.times), observation=observation)
        times = np.repeat(self.times, size)
        axis = TimeAxis.of(times, "day")
        return read_series(axis, times, self.given.reshape(-1), info, list(model.states))[0]


def score(draw: Draw, found: Predicted) -> dict[str, float]:
    """Scores of rows held out: mean distance, log density by N and with tails, and the share in the 90 % region."""
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
            scores = []
            for draw in draws:
                readings = draw.readings(model)
                scale = series_scale(readings, robust=filter_name != KALMAN)
                fit = SetFit(model, readings, scale, {}, 200, filter_name, values.shape[1])
                scores.append(score(draw, fit.predictions(*fit.fitted())))
            line = {"set": name, "share": share, "filter": filter_name, "rows": len(times)}
            lines.append(line | {key: [one[key] for one in scores] for key in scores[0]})
    return lines


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The times `(T,)` and the values `(T, m)` of a file."""
    table = np.loadtxt(path, delimiter=",", skiprows=1)
    return table[:, 0], table[:, 1:]


def means(lines: list[dict]) -> dict[str, pd.DataFrame]:
    """By the name of a score: its means over draws, a row for each share and set, a column for each filter."""
    table = pd.DataFrame(lines)
    for key in ("error", "tails", "gaussian", "coverage"):
        table[key] = table[key].map(np.mean)
    order = list(dict.fromkeys(table["filter"]))
    return {
        key: table.pivot_table(key, ["share", "set"], "filter", sort=False)[order]
        for key in ("error", "tails", "gaussian", "coverage")
    }


def to_best(error: pd.DataFrame) -> pd.DataFrame:
    """The error of each filter over that of the best other filter."""
    return pd.DataFrame({name: error[name] / error.drop(columns=name).min(axis=1) for name in error})


def tables(lines: list[dict]) -> dict[str, pd.DataFrame]:
    """Tables of each filter, of `rfa` beside each other by Wilcoxon's signed-rank test over sets, and all errors."""
    found = means(lines)
    error, tails, coverage = found["error"], found["tails"], found["coverage"]
    ratio = to_best(error)
    summary = pd.DataFrame({
        "worst to best other": ratio.max(), "median": ratio.median(), "within 5 %": (ratio <= 1.05).sum(),
        "rank by error": error.rank(axis=1).mean(), "rank by log likelihood": (-tails).rank(axis=1).mean(),
        "log likelihood": tails.mean(), "Gaussian": found["gaussian"].mean(), "coverage": coverage.mean(),
    })  # fmt: skip
    tests = []
    for name in error.columns.drop(RFA):
        for share, rows in error.groupby(level="share"):
            logs = np.log(rows[RFA] / rows[name])
            gains = (tails[RFA] - tails[name]).loc[rows.index]
            p = [scipy.stats.wilcoxon(each).pvalue if each.any() else 1.0 for each in (logs, gains)]
            tests.append([name, share, math.exp(logs.median()), (logs < 0).sum(), p[0], gains.median(), p[1]])
    head = ["rfa beside", "added", "median ratio", "smaller in", "p", "median gain in log likelihood", "p of it"]
    return {"filters": summary, "tests": pd.DataFrame(tests, columns=head), "errors": error}


def main() -> None:
    """Measure, keep the results of sets, and print all tables."""
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
    for title, table in tables(results["lines"]).items() if results["lines"] else ():
        print(title, table.to_string(float_format="{:.4g}".format), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
