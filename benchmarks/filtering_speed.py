"""Speed of the compiled filters on one long series: `python benchmarks/filtering_speed.py [--length 10000]`.

The peers are statsmodels (one series after another, its matrices prepared before), filterpy's loop, and the same filter
in PyTorch. All have their turns in each round, in one process on one thread. A ratio is the median over rounds; below 1
rfa is faster. Before it is timed, an estimate is compared with statsmodels'. The command prints Markdown tables and
writes benchmarks/results/filtering_speed.json. Start it on a quiet machine.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import statsmodels.api as sm
import torch
from filters import filterpys
from statsmodels.tsa.statespace.kalman_smoother import KalmanSmoother
from torch import Tensor

from rfa.estimation import LinearSDE, compiled, fit, recursive_estimate, robust_estimate
from rfa.files import write_text_whole
from rfa.training.environment import environment

RESULTS = Path(__file__).parent / "results" / "filtering_speed.json"
ROUNDS = 7
Call = Callable[[], object]


def trend() -> LinearSDE:
    """A local linear trend, 2 states."""
    rows = [[0.0, 1.0], [0.0, 0.0]], [[0.2, 0.0], [0.0, 0.05]], [[1.0, 0.0]], [[0.5]]
    return LinearSDE(*(torch.tensor(x, dtype=torch.float64) for x in rows))


def oscillators() -> LinearSDE:
    """Two coupled oscillators, 4 states, the sum of whose positions is seen."""
    dynamics = torch.tensor([[0.0, 1.0, 0, 0], [-4.0, -0.4, 1.0, 0], [0, 0, 0, 1.0], [1.0, 0, -9.0, -0.6]])
    driven = torch.diag(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    return LinearSDE(dynamics, driven, torch.tensor([[1.0, 0, 1.0, 0]]), torch.tensor([[0.1]]))


def in_turns(calls: dict[str, Call], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each call in each round. Every second round has the opposite order."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for turn in range(rounds):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def without_compiler(call: Call) -> Call:
    """The same call in PyTorch."""

    def run() -> object:
        library, compiled.library = compiled.library, lambda: None  # type: ignore[assignment]
        try:
            return call()
        finally:
            compiled.library = library

    return run


def statsmodels(sde: LinearSDE, times: Tensor, seen: Tensor, start: tuple[Tensor, Tensor]) -> list[KalmanSmoother]:
    """Of each series of `(b, T, m)`."""
    lags = times.diff()
    matrices = [of(lags).permute(1, 2, 0).numpy() for of in (sde.transition, sde.covariance)]
    if bool((lags - lags[0]).abs().max() < 1e-9):
        parts = [x[..., 0].copy() for x in matrices]
    else:
        parts = [np.concatenate([x, x[..., -1:]], axis=2).copy() for x in matrices]
    models = []
    for series in seen:
        model = KalmanSmoother(k_endog=sde.observation_size, k_states=sde.state_size)
        model.bind(series.numpy().copy())
        model["transition"], model["state_cov"] = parts
        model["selection"] = np.eye(sde.state_size)
        model["design"], model["obs_cov"] = sde.observation.numpy(), sde.observation_noise.numpy()
        model.initialize_known(start[0].numpy(), start[1].numpy())
        models.append(model)
    return models


def estimates(name: str, sde: LinearSDE, regular: bool, batch: int, length: int) -> list[dict]:
    """The filter and the smoother of a batch of series with a tenth of the readings missing."""
    generator = torch.Generator().manual_seed(0)
    gaps = 0.1 + 0.9 * torch.rand(length, generator=generator, dtype=torch.float64)
    times = 0.5 * torch.arange(length, dtype=torch.float64) if regular else gaps.cumsum(0)
    seen = sde.simulate(times, generator, sample_shape=(batch,)).observations
    seen = seen.masked_fill(torch.rand(seen.shape, generator=generator) < 0.1, torch.nan)
    n = sde.state_size
    start = torch.zeros(n, dtype=torch.float64), 10 * torch.eye(n, dtype=torch.float64)
    models = statsmodels(sde, times, seen, start)
    lines = []
    for direction in ("filter", "smooth"):
        options = {"initial": start, "direction": direction}

        def ours(options=options) -> Tensor:
            return robust_estimate(sde, times, seen, nu=math.inf, return_weights=False, **options).mean

        def theirs(direction=direction) -> list[np.ndarray]:
            if direction == "filter":
                return [model.filter().filtered_state.T for model in models]
            return [model.smooth().smoothed_state.T for model in models]

        error = np.abs(ours().numpy() - np.array(theirs())).max()
        assert error < 1e-8, error
        calls: dict[str, Call] = {
            "rfa": ours,
            "statsmodels": theirs,
            "rfa, robust": lambda options=options: recursive_estimate(sde, times, seen, **options),
        }
        seconds = in_turns(calls)
        if batch == 1:
            rounds = 1  # they take seconds
            seconds |= in_turns({"rfa in PyTorch": without_compiler(ours)}, rounds)
            if direction == "filter":
                seconds |= in_turns({"filterpy": lambda: filterpys(sde, times, seen[0], start)}, rounds)
        lines.append({
            "what": direction, "model": name, "times": "regular" if regular else "irregular", "series": batch,
            "length": length, "error": float(error), "seconds": seconds,
        })  # fmt: skip
    return lines


def fits(length: int) -> list[dict]:
    """Maximum likelihood of a local linear trend, from the same likelihood."""
    sde, times = trend(), torch.arange(length, dtype=torch.float64)
    seen = sde.simulate(times, torch.Generator().manual_seed(0)).observations
    begin = LinearSDE(sde.dynamics, 3 * sde.diffusion, sde.observation, 0.5 * sde.observation_noise)
    model = sm.tsa.UnobservedComponents(seen[:, 0].numpy(), "lltrend")
    found, theirs = fit(begin, times, seen), model.fit(disp=0)
    irregular = (0.1 + 0.9 * torch.rand(length, dtype=torch.float64)).cumsum(0)
    calls: dict[str, Call] = {
        "rfa": lambda: fit(begin, times, seen),
        "statsmodels": lambda: model.fit(disp=0),
        "rfa, irregular times": lambda: fit(begin, irregular, seen),
    }
    return [{
        "what": "fit", "model": "trend", "times": "regular", "series": 1, "length": length,
        "log_likelihoods": [found.log_likelihood, float(theirs.llf)], "seconds": in_turns(calls, 3),
    }]  # fmt: skip


def table(lines: list[dict]) -> str:
    """Milliseconds, and ratios to statsmodels and to the Kalman filter."""
    heads = ["what", "model", "times", "series", "rfa, ms", "statsmodels, ms", "ratio", "robust / Kalman"]
    heads += ["PyTorch, ms", "filterpy, ms"]
    rows = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for line in lines:
        seconds = line["seconds"]

        def ms(name: str, seconds=seconds) -> str:
            return f"{1e3 * statistics.median(seconds[name]):,.1f}" if name in seconds else ""

        def ratio(name: str, peer: str, seconds=seconds) -> str:
            if name not in seconds:
                return ""
            return f"{statistics.median(a / b for a, b in zip(seconds[name], seconds[peer], strict=True)):.2f}"

        cells = [line["what"], line["model"], line["times"], str(line["series"]), ms("rfa"), ms("statsmodels")]
        cells += [ratio("rfa", "statsmodels"), ratio("rfa, robust", "rfa"), ms("rfa in PyTorch"), ms("filterpy")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=10_000)
    length = parser.parse_args().length
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = []
    for name, sde in (("trend", trend()), ("oscillators", oscillators())):
        for regular in (True, False):
            for batch in (1, 4, 16):
                lines += estimates(name, sde, regular, batch, length)
    lines += fits(length)
    machine = environment()
    print(f"{machine['machine']}; {length:,} readings, {machine['threads']} thread\n\n{table(lines)}")
    write_text_whole(RESULTS, json.dumps({"environment": machine, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
