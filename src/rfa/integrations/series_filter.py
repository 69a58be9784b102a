"""Forecasts and filters of a series of another library: a `Forecaster`, or a `RobustFilter` if a model is given."""

from rfa.checks import needs

needs("pandas")

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pandas as pd

from rfa.estimation import Component, RobustFilter, StructuralModel
from rfa.forecasting import Forecaster

COMPONENTS = Component | StructuralModel


class FilterOptions(Protocol):
    """An estimator that has the arguments of `RobustFilter`. A model of None: a `Forecaster`."""

    model: COMPONENTS | None
    robust: bool
    time_unit: str


def fitted_filter(
    options: FilterOptions,
    index: Any,
    values: Any,
    *,
    exog: Any = None,
    model: COMPONENTS | None = None,
    fixed: Mapping[str, float] | None = None,
) -> RobustFilter:
    """A filter of a series `(T,)`. `model` goes before that of the options. Raises as `RobustFilter.fit`."""
    model = options.model if model is None else model
    assert model is not None
    found = RobustFilter(model, options.robust, time_unit=options.time_unit)
    return found.fit(index, values, exog=exog, fixed=fixed)


def combined_forecast(
    robust: bool,
    index: Any,
    values: Any,
    steps: int,
    quantiles: Sequence[float] = (),
    exog: Any = None,
    later: Any = None,
    later_exog: Any = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The forecast and the history of a series `(T,)`, by a `Forecaster`; their index has the times.

    Args:
        robust: as of `Forecaster`.
        index: times of pandas.
        values: NaN where nothing was read.
        steps: number of steps to forecast.
        quantiles: the probabilities of the columns `rfa-q-...`.
        exog: regressors `(T, k)`.
        later, later_exog: times and regressors `(h, k)` that are known; steps between have those of the last one.

    Raises:
        ValueError: as `Forecaster.forecast`.
    """
    table, future = pd.DataFrame({"ds": index, "y": np.asarray(values, dtype=float)}), None
    forecaster = Forecaster(robust)
    if exog is not None:
        names = [f"x{k}" for k in range(np.shape(exog)[1])]
        ahead = forecaster.forecast(table, steps)["ds"]  # the times, without regressors
        known = pd.DataFrame(np.asarray(later_exog, dtype=float), pd.Index(later), names)
        table[names] = np.asarray(exog, dtype=float)
        future = known.reindex(pd.Index(ahead)).ffill().bfill().rename_axis("ds").reset_index()
    found = forecaster.forecast(table, steps, level=None, quantiles=quantiles, X=future)
    return found.set_index("ds"), forecaster.history().set_index("ds")
