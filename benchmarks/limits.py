"""Difficult cases for robust filters: the state jumps, the first reading is wrong, or wrong readings agree."""

import math

import torch
from filters import ours
from trackers import ERRORS, START, drawn, squared, tracker

from rfa.estimation import LinearSDE, robust_estimate

FILTERS = {"Kalman": {"nu": math.inf}, "rfa": {}, "rfa, smoother": {"direction": "smooth"}}
AFTER = [0, 1, 3, 6]  # readings after the event


def surprised() -> list[dict]:
    """RMSE of a level at the readings after an event.

    Q is 0.1, R is 1; there are 200 series with a reading each unit of time, and the start is unknown. The event is a
    jump of the level at reading 30, or a wrong first reading.
    """
    sde = LinearSDE(*(torch.tensor([[x]], dtype=torch.float64) for x in (0.0, 0.1, 1.0, 1.0)))
    times = torch.arange(60, dtype=torch.float64)
    lines = []
    for event, at, size in (
        ("jump of 10", 30, 10.0),
        ("jump of 100", 30, 100.0),
        ("first reading off by 100", 0, 100.0),
    ):
        states, seen = sde.simulate(times, torch.Generator().manual_seed(3), sample_shape=(200,))
        if at:
            states[:, at:] += size
            seen[:, at:] += size
        else:
            seen[:, 0] += size
        for name, options in FILTERS.items():
            mean = robust_estimate(sde, times, seen, return_weights=False, **options).mean
            errors = (mean - states).square().mean((0, 2)).sqrt()
            lines.append({"event": event, "estimator": name, "errors": [errors[at + k].item() for k in AFTER]})
    return lines


def agreeing() -> list[dict]:
    """RMSE of the tracker's position over 10 seeds, if some readings are replaced by -9999."""
    seeds = range(2000, 2010)
    times, states, seen = drawn(ERRORS["Gaussian"], seeds)
    lines = []
    for share in (0.05, 0.2):
        replaced = torch.rand(seen.shape[:-1], generator=torch.Generator().manual_seed(5)) < share
        given = torch.where(replaced[..., None] & ~seen.isnan(), -9999.0, seen)
        for name, options in FILTERS.items():
            mean, _ = ours(**options)(tracker(1.0), times, given, START)
            error = squared(mean, states, seeds).mean().sqrt().item()
            lines.append({"event": f"{share:.0%} of readings -9999", "estimator": name, "errors": [error]})
    return lines


def limits_table(lines: list[dict]) -> str:
    """A Markdown table with a row for each event and filter."""
    rows = ["| event | filter | RMSE, at the 1st, 2nd, 4th, 7th reading after it |", "| --- | --- | --- |"]
    for line in lines:
        errors = ", ".join(f"{error:.3g}" for error in line["errors"])
        rows.append(f"| {line['event']} | {line['estimator']} | {errors} |")
    return "\n".join(rows)
