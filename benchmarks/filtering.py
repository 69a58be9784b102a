"""Robust filtering against filterpy's Kalman filter and WoLF: `python benchmarks/filtering.py [--data FOLDER]`.

Four minutes. Writes benchmarks/results/filtering.json and prints the tables of docs/filtering.md. WoLF is the weighted
observation likelihood filter with the inverse multi-quadratic weight (Duran-Martin and others, 2024): R_i becomes
`R (1 + e_i^T R^-1 e_i / c^2)`, e_i the innovation, `c^2 = 4 m` for m components (SPEC's 4 in complex units).
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import filterpy.kalman
import numpy as np
import torch
from torch import Tensor

from rfa.estimation import LinearSDE, robust_estimate
from rfa.files import write_text_whole
from rfa.training.environment import environment

ROOT = Path(__file__).parents[1]
SEEDS = 40
ROBUST = {"prior": "riccati", "nu": 16.0, "kappa": 2.0, "iterations": 5, "start": "leave_one_out"}
WILD = {"Gaussian": None, "5 % x10": (0.05, 10.0), "20 % x10": (0.2, 10.0)}
Found = tuple[Tensor, Tensor]  # mean and covariance
Start = tuple[Tensor, Tensor]


def kalman(sde: LinearSDE, times: Tensor, seen: Tensor, start: Start, soft: float = math.inf) -> Found:
    """The Kalman filter, of all series at once; WoLF for a finite `soft` = c^2."""
    observation, noise = sde.observation, sde.observation_noise
    lags = times.expand(len(seen), -1).diff()
    transition, forcing = sde.transition(lags), sde.covariance(lags)
    mean = start[0].to(torch.float64).expand(len(seen), -1)
    covariance = start[1].to(torch.float64).expand(len(seen), -1, -1)
    means, covariances = [], []
    for k in range(seen.shape[1]):
        if k:
            phi = transition[:, k - 1]
            mean = (phi @ mean[..., None])[..., 0]
            covariance = phi @ covariance @ phi.mT + forcing[:, k - 1]
        here = ~seen[:, k].isnan().any(-1)
        missed = torch.where(here[:, None], seen[:, k] - mean @ observation.mT, 0.0)
        distance = (missed @ torch.linalg.inv(noise) * missed).sum(-1)
        judged = noise * (1 + distance / soft)[:, None, None]
        gain = covariance @ observation.mT @ torch.linalg.inv(observation @ covariance @ observation.mT + judged)
        gain = torch.where(here[:, None, None], gain, 0.0)
        mean = mean + (gain @ missed[..., None])[..., 0]
        covariance = covariance - gain @ observation @ covariance
        means.append(mean)
        covariances.append(covariance)
    return torch.stack(means, 1), torch.stack(covariances, 1)


def filterpys(sde: LinearSDE, times: Tensor, seen: Tensor, start: Start) -> np.ndarray:
    """Means of filterpy's loop over one series."""
    found = filterpy.kalman.KalmanFilter(dim_x=sde.state_size, dim_z=sde.observation_size)
    found.x, found.P = start[0].numpy()[:, None].copy(), start[1].numpy().copy()
    found.H, found.R = sde.observation.numpy(), sde.observation_noise.numpy()
    lags = times.diff()
    transitions, forcings = sde.transition(lags).numpy(), sde.covariance(lags).numpy()
    means = []
    for k, row in enumerate(seen.numpy()):
        if k:
            found.predict(F=transitions[k - 1], Q=forcings[k - 1])
        found.update(None if np.isnan(row).any() else row[:, None])
        means.append(found.x[:, 0].copy())
    return np.array(means)


def ours(sde: LinearSDE, times: Tensor, seen: Tensor, known: Start, **options) -> Found:
    """`robust_estimate` with the options of the table."""
    found = robust_estimate(sde, times, seen, initial=known, return_weights=False, **(options or ROBUST))
    return found.mean, found.covariance


ESTIMATORS: dict[str, Callable[..., Found]] = {
    "Kalman filter": kalman,
    "WoLF": lambda sde, *given: kalman(sde, *given, soft=4.0 * sde.observation_size),
    "rfa, Riccati": ours,
    "rfa, Lyapunov, one step": lambda *given: ours(*given, prior="lyapunov", nu=16.0, start="query"),
}


def inside(mean: Tensor, covariance: Tensor, truth: Tensor) -> float:
    """The share of states within their 90 % intervals."""
    width = 1.6448536 * covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    return ((mean - truth).abs() < width).double().mean().item()


def simulated(title: str, sde: LinearSDE, times: Callable[[int], Tensor], gaps: float) -> list[dict]:
    """Mean squared error and coverage over seeds, of each estimator and contamination."""
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
        assert gap < 1e-8, gap  # the batched filter is filterpy's
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
    """SPEC section 7: mu 0.3, omega 2, sigma^2 0.5, eta^2 0.5 in the real form."""
    eye = torch.eye(2, dtype=torch.float64)
    return LinearSDE(torch.tensor([[-0.3, -2.0], [2.0, -0.3]]), 0.25 * eye, eye, 0.25 * eye)


def oscillators() -> LinearSDE:
    """Two coupled, damped oscillators, driven and seen at their positions only."""
    dynamics = torch.tensor([[0.0, 1.0, 0, 0], [-4.0, -0.4, 1.0, 0], [0, 0, 0, 1.0], [1.0, 0, -9.0, -0.6]])
    driven = torch.diag(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    seen = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1.0, 0]])
    return LinearSDE(dynamics, driven, seen, 0.1 * torch.eye(2))


def irregular(seed: int) -> Tensor:
    """200 times, 0.1 apart on average."""
    gaps = torch.rand(200, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
    return (0.02 + 0.16 * gaps).cumsum(0)


def seasonal() -> LinearSDE:
    """CO2 in ppm over years: a local linear trend and two harmonics of the year, as in examples/filter_co2.py."""
    dynamics = torch.zeros(6, 6, dtype=torch.float64)
    dynamics[0, 1] = 1.0
    for place, turns in ((2, 1), (4, 2)):
        dynamics[place, place + 1], dynamics[place + 1, place] = -2 * math.pi * turns, 2 * math.pi * turns
    noise = torch.diag(torch.tensor([0.5, 0.02, 0.02, 0.02, 0.01, 0.01], dtype=torch.float64))
    return LinearSDE(dynamics, noise, torch.tensor([[1.0, 0, 1, 0, 1, 0]]), torch.tensor([[0.1]]))


def real_series(folder: Path) -> list[dict]:
    """A fifth of the points is held out and forecast from the past; a tenth of the others is hit by outliers."""
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
    """256 series of 1,000 steps and shorter ones: batched against filterpy's loop, of which 4 series are timed.

    The Kalman filter, and robust estimates on the fused operator, which are held against the dense ones of 2 series.
    """
    sde = rotating()
    start = torch.zeros(2, dtype=torch.float64), sde.stationary_covariance()
    lines = []
    for length in (100, 300, 1000):
        times = torch.arange(length, dtype=torch.float64) * 0.1
        seen = sde.simulate(times, torch.Generator().manual_seed(0), sample_shape=(256,)).observations
        wild = sde.simulate(times, torch.Generator().manual_seed(0), WILD["5 % x10"], sample_shape=(256,)).observations
        dense = ours(sde, times, wild[:2], start)[0]
        ours(sde, times, wild[:2], start, backend="fused", **ROBUST)  # the first call may compile the kernels
        batched, looped, fused = [], [], []  # seconds of each round
        for _ in range(3):
            began = time.perf_counter()
            mean = robust_estimate(sde, times, seen, prior="riccati", initial=start, return_weights=False).mean
            batched.append(time.perf_counter() - began)
            began = time.perf_counter()
            loop = [filterpys(sde, times, series, start) for series in seen[:4]]
            looped.append((time.perf_counter() - began) * 64)
            assert np.abs(mean[:4].numpy() - np.array(loop)).max() < 1e-8
            began = time.perf_counter()
            robust = ours(sde, times, wild, start, backend="fused", **ROBUST)[0]
            fused.append(time.perf_counter() - began)
            error = (robust[:2] - dense).abs().max().item()
            assert error < 1e-4, error
        for name, seconds, checked in (
            ("Kalman filter", batched, {}), ("rfa, Riccati, fused", fused, {"error_to_dense": error}),
        ):  # fmt: skip
            lines.append({
                "length": length, "series": 256, "threads": torch.get_num_threads(), "estimator": name,
                "filterpy_over_rfa": sorted(slow / fast for slow, fast in zip(looped, seconds, strict=True)),
                "seconds": sorted(seconds), **checked,
            })  # fmt: skip
    return lines


def table(lines: list[dict], columns: str, cells: Callable[[dict], str]) -> str:
    """Markdown: a row for each series and noise, a column for each estimator."""
    names = list(dict.fromkeys(line["estimator"] for line in lines))
    rows: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        rows.setdefault((line["series"], line["noise"]), []).append(cells(line))
    head = [f"| {columns} | | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    return "\n".join(head + [f"| {series} | {noise} | {' | '.join(row)} |" for (series, noise), row in rows.items()])


def markdown(results: dict[str, list[dict]]) -> str:
    """The tables of docs/filtering.md."""
    parts = [
        table(results["simulated"], "error, coverage", lambda line: (
            f"{line['error']:.4f} ({line['standard_error']:.4f}), {line['coverage']:.1%}")),
        table(results["real"], "error, log likelihood, coverage", lambda line: (
            f"{line['error']:.3g}, {line['log_likelihood']:.3f} ({line['log_likelihood_error']:.3f}), "
            f"{line['coverage']:.1%}")),
        "| steps | estimator | filterpy's time over rfa's | median seconds |\n| --- | --- | --- | --- |",
    ]  # fmt: skip
    for line in results["wall_time"]:
        ratios = ", ".join(f"{ratio:.1f}" for ratio in line["filterpy_over_rfa"])
        seconds = statistics.median(line["seconds"])
        parts[-1] += f"\n| {line['length']:,} | {line['estimator']} | {ratios} | {seconds:.2f} |"
    return "\n\n".join(parts)


def main() -> None:
    """Run everything, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data" / "series", help="nile.csv, co2.csv"
    )
    given = parser.parse_args()
    results = {
        "environment": environment(),
        "simulated": simulated("rotating", rotating(), lambda _: torch.arange(200, dtype=torch.float64) * 0.1, 0.0)
        + simulated("oscillators, irregular, 30 % missing", oscillators(), irregular, 0.3),
        "real": real_series(given.data) if (given.data / "nile.csv").exists() else [],
        "wall_time": wall_times(),
    }
    print(markdown(results))
    write_text_whole(ROOT / "benchmarks" / "results" / "filtering.json", json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
