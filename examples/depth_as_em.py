"""Depth as EM (appendix E.7): one layer of filter attention is one step of robust estimation, so depth is iteration.

A notebook in a script: editors run the cells between `# %%`, or run it whole: `python examples/depth_as_em.py`.
It takes under a minute, prints what docs/theory.md quotes, and draws docs/depth-as-em.png.
"""

# %% A rotating state, seen through noise; a tenth of the measurement errors is ten times as large
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

import rfa
from rfa.estimation import LinearSDE, robust_estimate
from rfa.forecasting.figure import COLOURS, save

FIGURE = Path(__file__).parents[1] / "docs" / "depth-as-em.png"
DECAY, FREQUENCY, PROCESS_NOISE, KEY_NOISE = 0.3, 2.0, 0.5, 0.5  # the last two are variances of complex numbers
STARTS = [(prior, start) for prior in ("lyapunov", "riccati") for start in ("query", "leave_one_out")]


def process() -> LinearSDE:
    """One complex mode `dx = (-mu + i omega) x dt + sigma dW`, `z = x + eta e`, as two real states."""
    eye = torch.eye(2, dtype=torch.float64)
    turning = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    return LinearSDE(FREQUENCY * turning - DECAY * eye, PROCESS_NOISE / 2 * eye, eye, KEY_NOISE / 2 * eye)


def draw(length: int, series: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Times `(T,)`, states and observations `(series, T, 2)`."""
    times = 0.1 * torch.arange(length, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    return times, *process().simulate(times, generator, outliers=(0.1, 10.0), sample_shape=(series,))


# %% One layer is one step
# The operator's weight, at beta_s = 1, gamma^2 = 0 and sigma_0^2 = 0, is
#     A_ij ~ 1 / Sigma_ij (1 + r_ij / (nu_s d Sigma_ij))^-(nu_s + 1)
# In the real form a complex variance is halved, so N_ij = 2 / Sigma_ij I, d_ij^2 = 2 r_ij / Sigma_ij, and the weight is
#     w_ij N_ij ~ 1 / Sigma_ij (1 + 2 r_ij / (nu Sigma_ij))^-kappa
# They are the same for nu = 2 d nu_s = m nu_s and kappa = nu_s + 1 = (nu + m) / m, the default. Keys and values are the
# observations; the first query is the observation too (`start="query"`), each later one the estimate before it.


def by_attention(
    times: Tensor, observations: Tensor, steps: int, robustness: float, query_noise: float = 0.0
) -> list[Tensor]:
    """The estimate of each step, `(series, T, 2)`, by the attention operator alone."""
    head = torch.ones(1, dtype=torch.float64)
    dynamics = {"decay": DECAY * head, "frequency": FREQUENCY * head[:, None]}
    noises = {"process_noise": PROCESS_NOISE * head, "key_noise": KEY_NOISE * head}
    noises |= {"query_noise": query_noise * head, "noise_floor": 0 * head}
    weights = {"robustness": robustness * head, "inverse_temperature": head}
    seen = observations[:, None]  # one head
    query, found = seen, []
    for _ in range(steps):
        query = rfa.robust_filter_attention(query, seen, seen, times=times, **dynamics, **noises, **weights)
        found.append(query[:, 0])
    return found


def largest_difference(length: int, series: int, steps: int, robustness: float = 1.0) -> float:
    """Between `steps` calls of the operator and the estimator with `iterations` of 1 to `steps`."""
    times, _, observations = draw(length, series)
    largest = 0.0
    for step, by_hand in enumerate(by_attention(times, observations, steps, robustness), start=1):
        nu = robustness * observations.shape[-1]
        estimate = robust_estimate(
            process(), times, observations, prior="lyapunov", start="query", nu=nu, kappa=None, iterations=step
        )
        largest = max(largest, (estimate.mean - by_hand).abs().max().item())
    assert largest < 1e-6, f"the operator and the estimator differ by {largest:.2e}"
    return largest


# %% More steps: the objective falls, and so does the error
# The start matters more than the number of steps. Suppose that the start is the query's own observation. An outlier is
# then near its own estimate, all others look wrong, and the iteration ends in a poor minimum. There are two ways out:
# leave the own observation out at the start, or give the query a large variance gamma^2, as attention can.


def unroll(length: int, series: int, depths: list[int]) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """For each prior and start: the objective of steps 0 to the last, over its first value, and the error by depth."""
    times, states, observations = draw(length, series)
    found = {}
    for prior, start in STARTS:
        options = {"nu": 16.0, "kappa": 2.0, "prior": prior, "start": start, "return_weights": False}
        estimates = [robust_estimate(process(), times, observations, iterations=k, **options) for k in depths]
        errors = [(estimate.mean - states).square().sum(-1).mean() for estimate in estimates]
        objective = estimates[-1].objective.mean(-1)
        found[prior, start] = objective / objective[0], torch.stack(errors)
    return found


# %% Print and draw


def plot(depths: list[int], found: dict[tuple[str, str], tuple[Tensor, Tensor]], kalman: float) -> Figure:
    """The objective and the error over the steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for (prior, start), (objective, errors) in found.items():
        look = {"color": COLOURS[("lyapunov", "riccati").index(prior)], "marker": "os"[start != "query"]}
        look |= {"linestyle": ":" if start == "query" else "-", "markersize": 4, "linewidth": 1.4}
        left.plot(range(len(objective)), objective, **look)
        right.plot(depths, errors, **look, label=f"{prior.capitalize()}, {start.replace('_', '-')} start")
    right.axhline(kalman, color="0.6", linestyle="--", linewidth=1, label="Kalman filter")
    left.set(xlabel="step", ylabel="objective / its value at the start", ylim=(0, 1.02))
    right.set(xlabel="step", ylabel="mean squared error of the state", yscale="log")
    ticks = [0.1, 0.2, 0.5, 1, 2, 5]
    right.set_yticks(ticks, [str(tick) for tick in ticks])
    right.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    for axes in (left, right):
        axes.set_xticks(range(max(depths) + 1))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.5)
    return figure


def main(figure: Path, length: int = 120, series: int = 16, last: int = 8) -> None:
    """Compare, unroll, draw."""
    print(f"operator and estimator differ by {largest_difference(60, series, 5):.1e} at most over 5 steps")
    times, states, observations = draw(length, series)
    kalman = robust_estimate(process(), times, observations, nu=torch.inf).mean
    raw_error, kalman_error = ((each - states).square().sum(-1).mean().item() for each in (observations, kalman))
    print(f"mean squared error: observations {raw_error:.3f}, Kalman filter {kalman_error:.3f}")
    depths = [k for k in (1, 2, 3, 4, 6, 8) if k <= last]
    found = unroll(length, series, depths)
    for (prior, start), (objective, errors) in found.items():
        print(f"{prior}, {start}: objective 1 -> {objective[1]:.3f} -> {objective[-1]:.3f}", end=", ")
        print("error", " ".join(f"{k}: {error:.3f}" for k, error in zip(depths, errors.tolist(), strict=True)))
    for query_noise in (0.0, 1.0, 10.0, 100.0):
        steps = by_attention(times, observations, last, 1.0, query_noise)
        first_error, last_error = ((step - states).square().sum(-1).mean() for step in (steps[0], steps[-1]))
        print(f"operator, query noise {query_noise:g}: error 1: {first_error:.3f} {last}: {last_error:.3f}")
    save(plot(depths, found, kalman_error), figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    main(parser.parse_args().figure)
