"""Speed of `RobustFilter` and of the compiled filters: `python benchmarks/filtering_speed.py [--lengths 500 10000]`.

`RobustFilter` is timed from arrays to results, as statsmodels' `UnobservedComponents`: a new object, filtered,
smoothed or fitted. `robust_estimate` and `recursive_estimate` filter batches; statsmodels filters their series one
after another, its matrices prepared before. filterpy has its loop, with matrices prepared before. All have their turns
in each round, in one process, with as many threads as the user has. A ratio is the median over rounds; below 1 rfa is
faster. Before it is timed, an estimate is compared with statsmodels'. The command prints Markdown tables and writes
benchmarks/results/filtering_speed.json. Start it on a quiet machine.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import filterpy.kalman
import numpy as np
import statsmodels.api as sm
import torch
from filters import filterpys
from statsmodels.tsa.statespace.kalman_smoother import KalmanSmoother
from torch import Tensor

from rfa.environment import environment
from rfa.estimation import (
    Component,
    Level,
    LinearSDE,
    RobustFilter,
    Season,
    StructuralModel,
    Trend,
    recursive_estimate,
    robust_estimate,
)
from rfa.files import write_text_whole

RESULTS = Path(__file__).parent / "results" / "filtering_speed.json"
ROUNDS = 5
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


@dataclasses.dataclass(frozen=True)
class Case:
    """Components, values of their parameters, and the same model in statsmodels."""

    name: str
    states: int
    model: Component | StructuralModel
    parameters: dict[str, float]
    peer: dict[str, object]


def cases() -> list[Case]:
    """At parameters at which both libraries have the same model: the slope does not wander."""
    given = {"sigma2.irregular": 1.0, "sigma2.level": 0.25}
    sloped, two, six = {**given, "sigma2.trend": 0.0}, Season(24, 2), Season(24, 6)
    return [
        Case("level", 1, Level(), given, {"level": "llevel"}),
        Case("trend", 2, Trend(), sloped, {"level": "lltrend"}),
        Case(
            "trend, season", 6, Trend() + two, {**sloped, "sigma2.freq_seasonal_24(2)": 1e-3},
            {"level": "lltrend", "freq_seasonal": [{"period": 24, "harmonics": 2}]},
        ),
        Case(
            "level, season", 13, Level() + six, {**given, "sigma2.freq_seasonal_24(6)": 1e-3},
            {"level": "llevel", "freq_seasonal": [{"period": 24, "harmonics": 6}]},
        ),
    ]  # fmt: skip


def daily(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Hours, and a level that wanders with a daily pattern and unit noise."""
    generator, times = np.random.default_rng(0), np.arange(float(length))
    level, turn = generator.normal(0, 0.5, length).cumsum(), 2 * np.pi * times / 24
    return times, 10 + level + 2 * np.sin(turn) + np.cos(2 * turn) + generator.normal(size=length)


def whole_series(length: int) -> Iterator[dict]:
    """`RobustFilter`: filter, smoother and fit of one series."""
    times, values = daily(length)
    for case in cases():
        line = {"model": f"{case.name}, {case.states}", "times": "regular", "series": 1, "length": length}
        order = list(sm.tsa.UnobservedComponents(values, **case.peer).param_names)

        def ours(what: str, robust: bool, case: Case = case) -> np.ndarray:
            found = RobustFilter(case.model, robust).fit(times, values, fixed=case.parameters)
            return getattr(found, what)().mean

        def theirs(what: str, case: Case = case, order: list[str] = order, **options: bool):
            model = sm.tsa.UnobservedComponents(values, **case.peer, **options)
            return getattr(model, what)([case.parameters[name] for name in order])

        sde = RobustFilter(case.model, False).fit(times, values, fixed=case.parameters).sde
        for what in ("filter", "smooth"):
            exact = theirs(what, use_exact_diffuse=True)
            states = exact.filtered_state if what == "filter" else exact.smoothed_state
            expected = sde.observation[0].numpy() @ states
            error = np.abs(ours(what, False) - expected)[length // 4 :].max()  # behind the diffuse start
            assert error < 1e-6 * values.std(), error
            calls: dict[str, Call] = {
                "rfa": lambda what=what: ours(what, False),
                "rfa, robust": lambda what=what: ours(what, True),
                "statsmodels": lambda what=what: theirs(what),
                "filterpy": lambda what=what, sde=sde: filterpy_loop(sde, values, what),
            }
            yield {
                "what": what,
                **line,
                "error": float(error),
                "seconds": in_turns(calls, ROUNDS if length < 2000 else 5),
            }
        model = sm.tsa.UnobservedComponents(values, **case.peer)
        found, peer = RobustFilter(case.model, False).fit(times, values), model.fit(disp=0)
        at_theirs = dict(zip(order, map(float, peer.params), strict=True))
        there = RobustFilter(case.model, False).fit(times, values, fixed=at_theirs)
        calls = {
            "rfa": lambda case=case: RobustFilter(case.model, False).fit(times, values),
            "rfa, robust": lambda case=case: RobustFilter(case.model).fit(times, values),
            "statsmodels": lambda model=model: model.fit(disp=0),
        }
        seconds = in_turns(calls, 5 if length < 2000 else 2)
        if case.states < 10:  # in seconds, once
            irregular = np.random.default_rng(1).exponential(size=length).cumsum()
            began = time.perf_counter()
            RobustFilter(case.model, False).fit(irregular, values)
            seconds["rfa, irregular times"] = [time.perf_counter() - began]
        log_likelihoods = [found.log_likelihood, there.log_likelihood]
        yield {"what": "fit", **line, "log_likelihoods": log_likelihoods, "seconds": seconds}


def filterpy_loop(sde: LinearSDE, values: np.ndarray, what: str) -> np.ndarray:
    """filterpy's `batch_filter`, and its `rts_smoother` on it, from the same wide start."""
    n = sde.state_size
    found = filterpy.kalman.KalmanFilter(dim_x=n, dim_z=1)
    found.P *= 1e8 * values.var()
    found.F, found.Q = sde.transition(1.0).numpy(), sde.covariance(1.0).numpy()
    found.H, found.R = sde.observation.numpy(), sde.observation_noise.numpy()
    means, covariances, *_ = found.batch_filter(values)
    return means if what == "filter" else found.rts_smoother(means, covariances)[0]


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
        if batch == 1 and direction == "filter":
            calls["filterpy"] = lambda: filterpys(sde, times, seen[0], start)
        seconds = in_turns(calls, ROUNDS if batch == 1 else 3)
        lines.append({
            "what": direction, "model": name, "times": "regular" if regular else "irregular", "series": batch,
            "length": length, "error": float(error), "seconds": seconds,
        })  # fmt: skip
    return lines


def table(lines: list[dict]) -> str:
    """Milliseconds, and ratios to statsmodels and to the Kalman filter."""
    heads = ["readings", "what", "model, states", "series", "rfa, ms", "robust, ms", "statsmodels, ms", "filterpy, ms"]
    heads += ["rfa / statsmodels", "robust / statsmodels", "robust / rfa"]
    rows = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for line in lines:
        seconds = line["seconds"]

        def ms(name: str, seconds=seconds) -> str:
            return f"{1e3 * statistics.median(seconds[name]):,.1f}" if name in seconds else ""

        def ratio(name: str, peer: str, seconds=seconds) -> str:
            return f"{statistics.median(a / b for a, b in zip(seconds[name], seconds[peer], strict=True)):.2f}"

        model = line["model"] if line["times"] == "regular" else f"{line['model']}, irregular"
        cells = [f"{line['length']:,}", line["what"], model, str(line["series"])]
        cells += [ms(name) for name in ("rfa", "rfa, robust", "statsmodels", "filterpy")]
        cells += [ratio("rfa", "statsmodels"), ratio("rfa, robust", "statsmodels"), ratio("rfa, robust", "rfa")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 10_000])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    components = [line for length in given.lengths for line in whole_series(length)]
    batches = []
    for name, sde in (("trend, 2", trend()), ("oscillators, 4", oscillators())):
        for regular in (True, False):
            for batch in given.batches:
                batches += estimates(name, sde, regular, batch, max(given.lengths))
    machine = environment()
    print(f"{machine['machine']}; {machine['threads']} thread(s)\n\n{table(components)}\n\n{table(batches)}")
    whole = {"environment": machine, "lines": [*components, *batches]}
    write_text_whole(RESULTS, json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
