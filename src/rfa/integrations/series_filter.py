"""A filter of a series of another library, with its components chosen as `rfa forecast` does."""

from rfa.checks import needs

needs("pandas")

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from rfa.checks import require
from rfa.estimation import Component, Level, RobustFilter, StructuralModel
from rfa.estimation.time_axis import TimeAxis
from rfa.forecasting.components import chosen_components, components_of
from rfa.forecasting.table import SeriesTable

_COMPARED = 1000  # readings, the last ones
_FEWEST = 4  # readings between which components can be told
_UNITS = {"second": "s", "minute": "min", "hour": "h", "day": "D"}


class FilterOptions(Protocol):
    """An estimator that has the arguments of `RobustFilter`. A model of None is one that the data choose."""

    model: Component | StructuralModel | None
    robust: bool
    time_unit: str


def fitted_filter(
    options: FilterOptions,
    index: Any,
    values: Any,
    *,
    exog: Any = None,
    model: Component | StructuralModel | None = None,
    fixed: Mapping[str, float] | None = None,
) -> RobustFilter:
    """A filter of a series `(T,)`. `model` goes before that of the options. Raises as `RobustFilter.fit`."""
    model = options.model if model is None else model
    if model is None:
        model = default_model(index, np.asarray(values, dtype=float), options.time_unit)
    found = RobustFilter(model, options.robust, time_unit=options.time_unit)
    return found.fit(index, values, exog=exog, fixed=fixed)


def default_model(index: Any, values: Float[np.ndarray, " T"], time_unit: str) -> StructuralModel:
    """Components for a series, by its last 1,000 readings; a level for fewer than four.

    Args:
        index: of pandas, dates or numbers.
        values: NaN where nothing was read.
        time_unit: of dates, in which the model's periods are. One from "second" to "day".

    Raises:
        ValueError: for another unit, or no reading.
    """
    require(time_unit in _UNITS, "time_unit", time_unit, f"one of {', '.join(_UNITS)} where no model is given")
    seen = np.flatnonzero(~np.isnan(values))
    require(len(seen) > 0, "values", "missing values in all rows", "some readings")
    if len(seen) < _FEWEST:
        return StructuralModel(Level())
    rows = slice(seen[-min(_COMPARED, len(seen))], seen[-1] + 1)
    axis = TimeAxis.of(index, time_unit)
    times, recent = torch.tensor(axis.numbers("times", index)[rows]), torch.tensor(values[rows])
    table = SeriesTable(times, recent[:, None], ("value",))
    if axis.origin is not None:
        table = table._replace(unit=_UNITS[time_unit], origin=pd.Timestamp(axis.origin))
    words, _ = chosen_components(table, recent.numpy())
    return components_of(words, table)
