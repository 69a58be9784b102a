"""A filter of a series of another library, with its components chosen among those of `rfa forecast`."""

from rfa.checks import needs

needs("pandas")

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import pandas as pd
from jaxtyping import Float

from rfa.checks import require
from rfa.estimation import Component, Level, RobustFilter, StructuralModel
from rfa.estimation.time_axis import TimeAxis
from rfa.forecasting.choice import choose
from rfa.forecasting.components import components_of
from rfa.forecasting.rolling import Channel
from rfa.forecasting.table import SeriesTable

_COMPARED = 1000  # readings, the last ones
_FEWEST = 4  # readings between which components can be told
_STEPS, _SHARE = 24, 0.1  # of the horizon where none is given: typical gaps, and of the span, at most
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
    ahead: Any = None,
) -> RobustFilter:
    """A filter of a series `(T,)`. `model` goes before that of the options. Raises as `RobustFilter.fit`.

    `ahead` are the times that will be forecast, for the choice of a model.
    """
    model = options.model if model is None else model
    if model is None:
        model = default_model(index, np.asarray(values, dtype=float), options, ahead)
    found = RobustFilter(model, options.robust, time_unit=options.time_unit)
    return found.fit(index, values, exog=exog, fixed=fixed)


def default_model(
    index: Any, values: Float[np.ndarray, " T"], options: FilterOptions, ahead: Any = None
) -> StructuralModel:
    """Components for a series, by rolling forecasts of its last 1,000 readings; a level for fewer than four.

    They are those that `rfa forecast` compares, but for free seasons and for scales of the values.

    Args:
        index: of pandas, dates or numbers.
        values: NaN where nothing was read.
        options: whose unit of dates is one from "second" to "day".
        ahead: the times that will be forecast. Without later ones 24 typical gaps, at most a tenth of the span.

    Raises:
        ValueError: for another unit, or no reading.
    """
    unit = options.time_unit
    require(unit in _UNITS, "time_unit", unit, f"one of {', '.join(_UNITS)} where no model is given")
    seen = np.flatnonzero(~np.isnan(values))
    require(len(seen) > 0, "values", "missing values in all rows", "some readings")
    if len(seen) < _FEWEST:
        return StructuralModel(Level())
    rows = slice(seen[-min(_COMPARED, len(seen))], seen[-1] + 1)
    axis = TimeAxis.of(index, unit)
    times, recent = axis.numbers("times", index)[rows], values[rows]
    table = SeriesTable(times, recent[:, None], ("value",))
    if axis.origin is not None:
        table = table._replace(unit=_UNITS[unit], origin=pd.Timestamp(axis.origin))
    last = float(times[-1])
    horizon = 0.0 if ahead is None else float(axis.numbers("fh", ahead).max()) - last
    horizon = horizon if horizon > 0 else max(table.gap, min(_STEPS * table.gap, _SHARE * (last - float(times[0]))))
    past = times[-1:], recent[-1:]  # without a past there are no free seasons
    channel = Channel(table, recent, past)
    words = choose({"linear": channel}, times[-1:] + horizon, options.robust, lambda done, most: None).words
    return components_of(words, table).components
