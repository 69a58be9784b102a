"""Compare robust filtering with its peers: `python benchmarks/filtering.py [--only tracker ...] [--data FOLDER]`.

The command writes benchmarks/results/filtering.json and prints the tables of docs/record/filters.md. With `--only`
it measures some of the tables; the others in the JSON stay unchanged. Measure times on a quiet machine only.

- tracker, oscillator: known models with many kinds of errors, see benchmarks/trackers.py, which also states the aims;
- simulated, real: longer series with 5 to 20 % of outliers, compared with WoLF with `c^2 = 4 m` for m components;
- limits: jumps of the state, a wrong first reading, wrong readings that agree with each other;
- wall_time: compared with filterpy's loop.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from filters import Estimator, filterpys, inside, kalman, ours, robust, wolf
from limits import agreeing, limits_table, surprised
from torch import Tensor
from trackers import oscillating, ratios, tracked

from rfa.environment import environment
from rfa.estimation import LinearSDE, robust_estimate
from rfa.files import write_text_whole

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "filtering.json"
SEEDS = 40
WILD = {"Gaussian": None, "5 % x10": (0.05, 10.0), "20 % x10": (0.2, 10.0)}
ESTIMATORS: dict[str, Estimator] = {
    "Kalman": kalman,
    "WoLF": lambda sde, *given: robust(wolf(4.0 * sde.observation_size))(sde, *given),
    "rfa": ours(),
    "rfa, the paper's": ours(prior="lyapunov", kappa=None, iterations=1, start="query"),
}


def simulated(title: str, sde: LinearSDE, times: Callable[[int], Tensor], gaps: float) -> list[dict]:
    """Mean squared error and coverage over seeds, for each estimator and each share of outliers."""
    start = torch.zeros(sde.state_size, dtype=torch.float64), sde.stationary_covariance()
    lines = []
    for wild, outliers in WILD.items():
        at = torch.stack([times(seed) for seed in range(SEEDS)])
        drawn = []
        for seed in range(SEEDS):
            generator = torch.Generator().manual_seed(seed)
            states, seen = sde.simulate(at[seed], generator, outliers)
            lost = torch.rand(seen.shape[:-1], generator=generator) < gaps
            drawn.append((states, seen.masked_fill(lost[..., None], torch.nan)))
        states, seen = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        gap = np.abs(kalman(sde, at, seen, start)[0][0].numpy() - filterpys(sde, at[0], seen[0], start)).max()
        assert gap < 1e-8, gap  # the batched filter equals filterpy's
        for name, estimator in ESTIMATORS.items():
            mean, covariance = estimator(sde, at, seen, start)
            errors, cover = (mean - states).square().sum(-1).mean(-1), inside(mean, covariance, states)
            lines.append({
                "series": title, "noise": wild, "estimator": name, "error": errors.mean().item(),
                "standard_error": (errors.std() / math.sqrt(SEEDS)).item(), "coverage": cover,
                "errors": errors.tolist(),
            })  # fmt: skip
    return lines


def rotating() -> LinearSDE:
    """The rotating process, a damped rotation in the plane, in real form: mu 0.3, omega 2, sigma^2 0.5, eta^2 0.5."""
    eye = torch.eye(2, dtype=torch.float64)
    return LinearSDE(torch.tensor([[-0.3, -2.0], [2.0, -0.3]]), 0.25 * eye, eye, 0.25 * eye)


def oscillators() -> LinearSDE:
    """Two coupled, damped oscillators. Noise drives the velocities; only the positions are observed."""
    dynamics = torch.tensor([[0.0, 1.0, 0, 0], [-4.0, -0.4, 1.0, 0], [0, 0, 0, 1.0], [1.0, 0, -9.0, -0.6]])
    driven = torch.diag(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    seen = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1.0, 0]])
    return LinearSDE(dynamics, driven, seen, 0.1 * torch.eye(2))


def irregular(seed: int) -> Tensor:
    """200 irregular times, 0.1 apart on average."""
    gaps = torch.rand(200, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
    return (0.02 + 0.16 * gaps).cumsum(0)


def seasonal() -> LinearSDE:
    """CO2 in ppm over years: a local linear trend and two harmonics of the year, as in examples/notebooks/co2.ipynb."""
    dynamics = torch.zeros(6, 6, dtype=torch.float64)
    dynamics[0, 1] = 1.0
    for index, cycles in ((2, 1), (4, 2)):
        dynamics[index, index + 1], dynamics[index + 1, index] = -2 * math.pi * cycles, 2 * math.pi * cycles
    noise = torch.diag(torch.tensor([0.5, 0.02, 0.02, 0.02, 0.01, 0.01], dtype=torch.float64))
    return LinearSDE(dynamics, noise, torch.tensor([[1.0, 0, 1, 0, 1, 0]]), torch.tensor([[0.1]]))


def real_series(folder: Path) -> list[dict]:
    """Real series. A fifth of the points is held out and predicted from earlier ones; a tenth of the rest is wrong."""
    nile = [line.split(",") for line in (folder / "nile.csv").read_text().split()[1:]]
    level = LinearSDE(*(torch.tensor([[x]], dtype=torch.float64) for x in (0.0, 1469.0, 1.0, 15099.0)))
    co2 = [line.split(",") for line in (folder / "co2.csv").read_text().split()[1:]]
    days = [np.datetime64(f"{d[:4]}-{d[4:6]}-{d[6:]}") for d, _ in co2]
    years = [float((day - days[0]) / np.timedelta64(1, "D")) / 365.2425 for day in days]
    first = torch.tensor([310.0, 1.0, 0, 0, 0, 0], dtype=torch.float64)
    series = {
        "nile": (level, [float(y) for y, _ in nile], [float(v) for _, v in nile],
                 (torch.tensor([900.0]), torch.tensor([[1e6]])), 10),
        "co2, 1990-2001": (seasonal(), years[-600:], [float(v) if v else math.nan for _, v in co2][-600:],
                (first + torch.tensor([42.0, 0, 0, 0, 0, 0]), 25.0 * torch.eye(6, dtype=torch.float64)), 3),
    }  # fmt: skip
    lines = []
    for title, (sde, times, values, start, seeds) in series.items():
        at, clean = torch.tensor(times, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
        scale = sde.observation_noise.sqrt().item()
        for wild in (0.0, 0.1):
            found: dict[str, list] = {name: [] for name in ESTIMATORS}
            for seed in range(seeds):
                generator = torch.Generator().manual_seed(seed)
                held = (torch.rand(len(at), generator=generator) < 0.2) & ~clean.isnan() & (torch.arange(len(at)) > 10)
                hit = (torch.rand(len(at), generator=generator) < wild) & ~held
                seen = clean + 10 * scale * torch.randn(len(at), generator=generator, dtype=torch.float64) * hit
                seen = seen.masked_fill(held, torch.nan)[None, :, None]
                for name, estimator in ESTIMATORS.items():
                    mean, covariance = (part[0, held] for part in estimator(sde, at, seen, start))
                    predicted = (mean @ sde.observation.mT)[:, 0]
                    spread = (sde.observation @ covariance @ sde.observation.mT + sde.observation_noise)[:, 0, 0]
                    error = clean[held] - predicted
                    likelihood = -0.5 * (error.square() / spread + spread.log() + math.log(2 * math.pi))
                    covered = (error.abs() < 1.6448536 * spread.sqrt()).double()
                    found[name].append([error.square().mean().item(), likelihood.mean().item(), covered.mean().item()])
            for name, rows in found.items():
                values_ = np.array(rows)
                lines.append({
                    "series": title, "noise": f"{wild:.0%} outliers", "estimator": name,
                    "error": math.sqrt(values_[:, 0].mean()), "log_likelihood": float(values_[:, 1].mean()),
                    "log_likelihood_error": float(values_[:, 1].std(ddof=1) / math.sqrt(seeds)),
                    "coverage": float(values_[:, 2].mean()),
                })  # fmt: skip
    return lines


def wall_times() -> list[dict]:
    """Times of 256 series in one batch over the time of filterpy's loop, for 100, 300 and 1,000 steps.

    filterpy is timed on 4 of the series, whose estimates are checked.
    """
    sde = rotating()
    start = torch.zeros(2, dtype=torch.float64), sde.stationary_covariance()
    lines = []
    for length in (100, 300, 1000):
        times = torch.arange(length, dtype=torch.float64) * 0.1
        seen = sde.simulate(times, torch.Generator().manual_seed(0), sample_shape=(256,)).observations
        batched, looped = [], []  # seconds of each round
        for _ in range(3):
            began = time.perf_counter()
            mean = robust_estimate(sde, times, seen, nu=math.inf, initial=start, return_weights=False).mean
            batched.append(time.perf_counter() - began)
            began = time.perf_counter()
            loop = [filterpys(sde, times, series, start) for series in seen[:4]]
            looped.append((time.perf_counter() - began) * 64)
            assert np.abs(mean[:4].numpy() - np.array(loop)).max() < 1e-8
        lines.append({
            "length": length, "series": 256, "threads": torch.get_num_threads(), "estimator": "Kalman filter",
            "filterpy_over_rfa": sorted(slow / quick for slow, quick in zip(looped, batched, strict=True)),
            "seconds": sorted(batched),
        })  # fmt: skip
    return lines


def table(lines: list[dict], corner: str, cells: Callable[[dict], str]) -> str:
    """A Markdown table with a row for each series and noise, and a column for each estimator."""
    names = list(dict.fromkeys(line["estimator"] for line in lines))
    rows: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        rows.setdefault((line["series"], line["noise"]), []).append(cells(line))
    head = [f"| {corner} | | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    return "\n".join(head + [f"| {series} | {noise} | {' | '.join(row)} |" for (series, noise), row in rows.items()])


def wall_time_table(lines: list[dict]) -> str:
    rows = ["| steps | estimator | filterpy's time over rfa's | median seconds |", "| --- | --- | --- | --- |"]
    for line in lines:
        times = ", ".join(f"{ratio:.1f}" for ratio in line["filterpy_over_rfa"])
        seconds = statistics.median(line["seconds"])
        rows.append(f"| {line['length']:,} | {line['estimator']} | {times} | {seconds:.2f} |")
    return "\n".join(rows)


def squared_errors(line: dict) -> str:
    return f"{line['error']:.4f} ({line['standard_error']:.4f}), {line['coverage']:.1%}"


def predictions(line: dict) -> str:
    likelihood = f"{line['log_likelihood']:.3f} ({line['log_likelihood_error']:.3f})"
    return f"{line['error']:.3g}, {likelihood}, {line['coverage']:.1%}"


def markdown(results: dict) -> str:
    """The tables of docs/record/filters.md."""
    parts = [
        table(results["tracker"], "RMSE of the position", lambda line: f"{line['error']:.3g}"),
        ratios(results["tracker"]),
        table(results["tracker"], "coverage", lambda line: f"{line['coverage']:.1%}"),
        table(results["oscillator"], "error, coverage", squared_errors),
        table(results["simulated"], "error, coverage", squared_errors),
        table(results["real"], "error, log likelihood, coverage", predictions),
        limits_table(results["limits"]),
        wall_time_table(results["wall_time"]),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Measure the chosen tables, write the results and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    series = ROOT / "examples"
    measures: dict[str, Callable[[], list[dict]]] = {
        "tracker": tracked,
        "oscillator": oscillating,
        "simulated": lambda: (
            simulated("rotating", rotating(), lambda _: torch.arange(200, dtype=torch.float64) * 0.1, 0.0)
            + simulated("oscillators, irregular, 30 % missing", oscillators(), irregular, 0.3)
        ),
        "real": lambda: real_series(given.data),
        "limits": lambda: surprised() + agreeing(),
        "wall_time": wall_times,
    }
    parser.add_argument("--only", nargs="+", choices=measures, help="by default all tables")
    parser.add_argument("--data", type=Path, default=series, help="a folder with nile.csv and co2.csv")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name in given.only or measures:
        if name == "real" and not (given.data / "nile.csv").exists():
            print(f"real: {given.data} has no nile.csv, so the table is left as it is")
            continue
        results[name] = measures[name]()
        results["environment"][name] = environment()
        write_text_whole(RESULTS, json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
