"""Series of the examples, and statsmodels' models of them.

`oil_temperature.csv` holds the first 500 hours of column OT of ETTh1.csv, to three digits: ETT-small of
github.com/zhouhaoyi/ETDataset (Zhou and others, Informer, 2021).
"""

import csv
from pathlib import Path

import numpy as np
import statsmodels.api as sm

EXAMPLES = Path(__file__).parents[2] / "examples"


def column(name: str, field: str) -> np.ndarray:
    """Of a file of `examples/`, NaN where a field is empty."""
    with (EXAMPLES / name).open(newline="") as file:
        return np.array([float(row[field] or "nan") for row in csv.DictReader(file)])


def unobserved_components(values: np.ndarray, parameters: dict[str, float], **specification):
    """Filter and smoother of statsmodels, with an exact diffuse start."""
    model = sm.tsa.UnobservedComponents(values, use_exact_diffuse=True, **specification)
    return model.smooth([parameters[name] for name in model.param_names])
