"""A forecast that anybody can make, with its errors in training; and a network's scores beside it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, Normal

from rfa.forecasting.choice import SEASONS
from rfa.forecasting.network import TrainingData, WindowPlace, predicted
from rfa.forecasting.scores import forecast_scores
from rfa.forecasting.table import SeriesTable
from rfa.models import RFAForTimeSeries

_BINS = 4  # of the lead, each with a standard deviation of its own
_MOST = 512  # windows from which errors are learned


class NaiveForecast(NamedTuple):
    """The last value, or the value a `period` before; with its errors in training.

    `middle` is the median of each channel, for one that a series has not shown yet. `deviations` are root mean square
    errors for each bin of the lead and each channel, `leads` the upper ends of the bins.
    """

    words: str
    period: float
    middle: Float[np.ndarray, " channels"]
    leads: Float[np.ndarray, " bins"]
    deviations: Float[np.ndarray, "bins channels"]

    def __call__(self, table: SeriesTable, place: WindowPlace) -> Normal:
        """The forecast at the rows after a window's last reading, `(targets, channels)`."""
        times = table.times.numpy()
        lead = times[place.now + 1 : place.end] - times[place.now]
        bins = np.searchsorted(self.leads, lead).clip(max=len(self.leads) - 1)
        mean = _naive_values(table, place, self.period, self.middle)
        return Normal(torch.tensor(mean), torch.tensor(self.deviations[bins]))


def learned_naive(series: Sequence[SeriesTable], places: Sequence[WindowPlace]) -> NaiveForecast:
    """The better of the last value and, for dated series, the value a day, a week or a year before.

    Better is a smaller median error in the windows of training, relative to the spread of the channel.
    """
    few = np.unique(np.linspace(0, len(places) - 1, _MOST).round().astype(int)).tolist()
    chosen = [places[k] for k in few]
    first = series[0]
    periods = {"last value": 0.0}
    for period in SEASONS if first.unit else ():
        length = first.duration("season", period)
        spans = [float(table.times[-1] - table.times[0]) for table in series]
        if 2 * length <= float(np.median(spans)) and length >= 2 * first.gap:
            periods[f"value {period} before"] = length
    lead = np.concatenate(
        [(series[p.series].times[p.now + 1 : p.end] - series[p.series].times[p.now]).numpy() for p in chosen]
    )
    truth = np.concatenate([series[p.series].values[p.now + 1 : p.end].numpy() for p in chosen])
    middle = np.nan_to_num(np.nanmedian(truth, axis=0))
    spread = np.nanmedian(np.abs(truth - middle), axis=0)
    spread = np.where(spread > 0, spread, 1.0)
    errors = {
        words: truth - np.concatenate([_naive_values(series[p.series], p, period, middle) for p in chosen])
        for words, period in periods.items()
    }
    best = min(errors, key=lambda words: float(np.nanmedian(np.abs(errors[words]) / spread)))
    leads = np.unique(np.quantile(lead, np.arange(1, _BINS + 1) / _BINS))
    bins = np.searchsorted(leads, lead).clip(max=len(leads) - 1)
    overall = np.sqrt(np.nanmean(errors[best] ** 2, axis=0))
    deviations = np.stack([_root_mean_square(errors[best][bins == k], overall) for k in range(len(leads))])
    return NaiveForecast(best, periods[best], middle, leads, np.maximum(deviations, 1e-6 * spread))


def _root_mean_square(errors: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    count = (~np.isnan(errors)).sum(0)
    total = np.nansum(errors**2, axis=0)
    return np.where(count > 1, np.sqrt(total / np.maximum(count, 1)), otherwise)


def _naive_values(table: SeriesTable, place: WindowPlace, period: float, middle: np.ndarray) -> np.ndarray:
    """For each row after the window's last reading the value whole periods before: the nearest reading up to now."""
    times, values = table.times.numpy(), table.values.numpy()
    asked = times[place.now + 1 : place.end]
    found = np.empty((len(asked), values.shape[1]))
    for channel in range(values.shape[1]):
        rows = np.flatnonzero(~np.isnan(values[: place.now + 1, channel]))
        if not len(rows):  # never seen so far
            found[:, channel] = middle[channel]
            continue
        at = np.full(len(asked), times[place.now])
        if period:
            rounding = 1e-9 + 4 * np.spacing(np.abs(times).max()) / period
            back = np.ceil((asked - times[place.now]) / period - rounding) * period
            at = asked - back
        right = np.searchsorted(times[rows], at).clip(max=len(rows) - 1)
        left = (right - 1).clip(min=0)
        nearest = np.where(at - times[rows][left] < times[rows][right] - at, left, right)
        found[:, channel] = values[rows[nearest if period else np.full(len(asked), len(rows) - 1)], channel]
    return found


def validation_scores(model: RFAForTimeSeries, data: TrainingData) -> dict[str, dict[str, Any]]:
    """The scores of the network and of a naive forecast, in spreads of each channel, over the windows of validation."""
    naive = learned_naive(data.series, data.split.train)
    spread = torch.tensor(model.config.spread, dtype=torch.float64)
    parts: dict[str, list[Distribution]] = {"network": [], "naive": []}
    truths = []
    for place in data.split.valid:
        table, ahead = data.series[place.series], slice(place.now + 1, place.end)
        seen, now = table.rows(slice(max(0, ahead.start - data.context), ahead.start)), table.times[place.now]
        parts["network"].append(predicted(model, seen, now, table.times[ahead] - now))
        parts["naive"].append(naive(table, place))
        truths.append(table.values[ahead])
    truth = torch.cat(truths) / spread
    scores: dict[str, dict[str, Any]] = {
        name: forecast_scores(_joined(found, spread), truth)._asdict() for name, found in parts.items()
    }
    scores["naive"]["method"] = naive.words
    return scores


def _joined(found: list[Distribution], spread: Tensor) -> Distribution:
    """Several forecasts one after the other, in spreads of the channels."""
    kind: Any = type(found[0])
    parts = {name: torch.cat([getattr(one, name) for one in found]) for name in kind.arg_constraints}
    return kind(**{name: part / spread if name in ("loc", "scale") else part for name, part in parts.items()})
