"""Series of the examples, hours that are drawn, and statsmodels' models of them."""

import csv
from pathlib import Path

import numpy as np
import statsmodels.api as sm

EXAMPLES = Path(__file__).parents[3] / "examples"


def column(name: str, field: str) -> np.ndarray:
    """Of a file of `examples/`, NaN where a field is empty."""
    with (EXAMPLES / name).open(newline="") as file:
        return np.array([float(row[field] or "nan") for row in csv.DictReader(file)])


def hours(count: int) -> np.ndarray:
    """A level that wanders, a daily wave and an autoregression, as an hourly temperature has them."""
    generator = np.random.default_rng(0)
    level, error = (generator.normal(0, s, count) for s in (0.5, 0.7))
    short = np.zeros(count)
    for k in range(1, count):
        short[k] = 0.7 * short[k - 1] + generator.normal()
    return 20 + level.cumsum() + 3 * np.sin(2 * np.pi * np.arange(count) / 24) + short + error


def unobserved_components(values: np.ndarray, parameters: dict[str, float], **specification):
    """Filter and smoother of statsmodels, with an exact diffuse start."""
    model = sm.tsa.UnobservedComponents(values, use_exact_diffuse=True, **specification)
    return model.smooth([parameters[name] for name in model.param_names])
