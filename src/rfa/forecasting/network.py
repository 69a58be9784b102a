"""Forecasts by a trained network, and what it takes for outliers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.data import Dataset

from rfa.checks import check_range, require
from rfa.files import sha256, write_text_whole
from rfa.models import PRESETS, RFAForTimeSeries, RFATimeSeriesConfig
from rfa.models.saved_files import quiet_transformers, read_model

from .request import LEVELS, ChannelForecast, Forecaster, names_in
from .scores import central_interval
from .table import SeriesTable, TableFormat, read_many_series, table_files

# Windows of series to learn forecasts from: readings up to a moment, and what follows within the horizon

FEWEST_READINGS = 4  # that a window begins with
_MOST_VALIDATED = 256  # windows
_SEVERAL = 5  # series, from which on whole series are held out


class WindowPlace(NamedTuple):
    """Where a window is: the number of its series, the row of its last reading, and the row after its last target."""

    series: int
    now: int
    end: int


class SeriesWindows(Dataset):
    """Windows of up to `context` rows for `TimeSeriesCollator`: later rows are NaN in `values`, and have `targets`."""

    def __init__(self, series: Sequence[SeriesTable], places: Sequence[WindowPlace], context: int):
        self.series, self.places, self.context = series, places, context

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = self.places[index]
        table, rows = self.series[place.series], slice(max(0, place.now + 1 - self.context), place.end)
        values = table.values[rows]
        future = torch.arange(rows.start, rows.stop) > place.now
        times = table.times[rows] - table.times[place.now]
        return {
            "times": times,
            "values": values.masked_fill(future[:, None], torch.nan),
            "targets": values.masked_fill(~future[:, None], torch.nan),
        }


class WindowSplit(NamedTuple):
    """Windows for training and for validation, and in words how they were split."""

    train: list[WindowPlace]
    valid: list[WindowPlace]
    words: str


def split_windows(series: Sequence[SeriesTable], horizon: float, held_out: float, seed: int) -> WindowSplit:
    """All windows of the training part, and up to 256 of the part that is held out; both within a horizon.

    Of five series or more a share is held out, drawn by the seed. Of fewer the last part of each is: windows of
    training end before it, targets and all, and those of validation begin their targets in it.

    Raises:
        ValueError: for a share that is none, or series too short for a window of each kind.
    """
    require(0 < held_out < 1, "hold_out", held_out, "a share between 0 and 1")
    require(0 <= seed < 2**31, "seed", seed, "a number from 0 to 2147483647")
    every = [_places(number, table, horizon) for number, table in enumerate(series)]
    usable = [number for number, places in enumerate(every) if places]
    if len(usable) >= _SEVERAL:
        count = min(max(1, round(held_out * len(usable))), len(usable) - 1)
        generator = torch.Generator().manual_seed(seed)
        drawn = {usable[k] for k in torch.randperm(len(usable), generator=generator)[:count].tolist()}
        train = [place for number in usable if number not in drawn for place in every[number]]
        valid = [place for number in sorted(drawn) for place in every[number]]
        words = f"{count} of {len(usable)} series held out"
    else:
        train, valid = [], []
        for number in usable:
            border = round((1 - held_out) * len(series[number].times))
            train += [place for place in every[number] if place.end <= border]
            valid += [place for place in every[number] if place.now >= border - 1]
        words = f"the last {held_out:.0%} of each series held out"
    if not train or not valid:
        longest = max((len(table.times) for table in series), default=0)
        expected = f"windows with {FEWEST_READINGS} readings and one within the horizon after them, in both parts"
        raise ValueError(f"horizon: got {horizon:g} for series of at most {longest} rows, expected {expected}")
    few = np.unique(np.linspace(0, len(valid) - 1, _MOST_VALIDATED).round().astype(int)).tolist()
    return WindowSplit(train, [valid[k] for k in few], words)


def _places(number: int, table: SeriesTable, horizon: float) -> list[WindowPlace]:
    """All windows of a series: each ends its readings at a row that has one."""
    times = table.times.numpy()
    present = (~table.values.isnan().all(1)).numpy()
    rounding = 4 * np.spacing(np.abs(times).max())  # seconds since 1970 are known to 1e-7
    seen, ends = np.cumsum(present), np.searchsorted(times, times + horizon * (1 + 1e-9) + rounding, side="right")
    rows = np.flatnonzero(present & (seen >= FEWEST_READINGS))
    return [WindowPlace(number, int(row), int(ends[row])) for row in rows if seen[ends[row] - 1] > seen[row]]


def training_part(series: Sequence[SeriesTable], places: Sequence[WindowPlace]) -> list[tuple[Tensor, Tensor]]:
    """Times and values of the series up to the last row of training, as `RFATimeSeriesConfig.from_data` takes them."""
    last: dict[int, int] = {}
    for place in places:
        last[place.series] = max(last.get(place.series, 0), place.end)
    return [(series[number].times[:end], series[number].values[:end]) for number, end in sorted(last.items())]


def windows_span(series: Sequence[SeriesTable], places: Sequence[WindowPlace], context: int) -> float:
    """The longest time from the first row of a window to its last."""
    ends = ((series[p.series].times, max(0, p.now + 1 - context), p.end - 1) for p in places)
    return max(float(times[last] - times[first]) for times, first, last in ends)


# What a network is to learn, its data, and the folder in which it is kept

NETWORK_FORMAT = 1
RECORD, MODEL, CHECKPOINTS = "network.json", "model", "checkpoints"
_LEAST_CONTEXT, _MOST_CONTEXT, _HORIZONS = 32, 192, 4  # rows that a window begins with, by default
_MOST = 10_000_000


@dataclass(frozen=True, kw_only=True)
class NetworkRequest:
    """What to train, and on what.

    Args:
        files: CSV files, and folders of them.
        time: the column of times.
        values: the columns of channels; by default all others.
        series: a column that names the series of each row; by default each file is one.
        table_format: how the files are written.
        horizon: how far ahead the network learns to look, such as `24h`.
        context: the most rows that it looks back; by default those of four horizons, from 32 to 192.
        preset: the attention, one of `PRESETS`.
        steps: of the optimiser.
        rate: the peak of the learning rate.
        batch_size: windows of a step.
        hold_out: the share of the series, or of the end of each, for validation.
        seed: of the weights, the order of the windows, and the series that are held out.
        hidden_size, num_hidden_layers, num_attention_heads: sizes of the network.

    Raises:
        ValueError: for a number out of range, or an unknown preset.
    """

    files: tuple[str, ...]
    time: str | Sequence[str]
    values: tuple[str, ...] | None = None
    series: str | None = None
    table_format: TableFormat = field(default_factory=TableFormat)
    horizon: str
    context: int | None = None
    preset: str = RFATimeSeriesConfig.preset
    steps: int = 500
    rate: float = 3e-3
    batch_size: int = 32
    hold_out: float = 0.2
    seed: int = 0
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.table_format, dict):  # of a record
            object.__setattr__(self, "table_format", TableFormat(**self.table_format))
        check_range("steps", self.steps, 1, _MOST)
        check_range("batch_size", self.batch_size, 1, _MOST)
        require(0 < self.rate < 1, "rate", self.rate, "a number between 0 and 1")
        require(self.preset in PRESETS, "preset", self.preset, f"one of {', '.join(PRESETS)}")
        if self.context is not None:
            check_range("context", self.context, 4, 100_000)


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The series of a request, their windows, and what the record says of them."""

    series: list[SeriesTable]
    split: WindowSplit
    context: int
    horizon: float
    digests: dict[str, str]


def read_training_data(request: NetworkRequest) -> TrainingData:
    """Read and split the series. Raises as `read_many_series` and `split_windows`."""
    values = None if request.values is None else list(request.values)
    options: dict[str, Any] = {"series": request.series, "table_format": request.table_format}
    series = [*read_many_series(request.files, request.time, values, **options).values()]
    horizon = max(one.longest_duration("horizon", request.horizon) for one in series)
    split = split_windows(series, horizon, request.hold_out, request.seed)
    gap = sorted(table.gap for table in series)[len(series) // 2]
    rows = round(_HORIZONS * horizon / gap)
    context = request.context or min(max(rows, _LEAST_CONTEXT), _MOST_CONTEXT)
    digests = {str(file): sha256(file) for file in sorted(table_files(request.files))}
    return TrainingData(series=series, split=split, context=context, horizon=horizon, digests=digests)


def read_record(out: Path) -> dict[str, Any]:
    """The content of `network.json`.

    Raises:
        ValueError: for a folder without one, a damaged one, or one of another version.
    """
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
        written = record["format"]
        complete = {"finished", "request", "channels", "unit", "horizon", "context", "sha256"} <= record.keys()
    except FileNotFoundError:
        raise ValueError(f"network: {out} has no {RECORD}, expected a folder of `rfa forecast train`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"network: {out / RECORD} is damaged ({error}), expected that of training") from None
    require(written == NETWORK_FORMAT, "network", f"format {written} in {out}", f"format {NETWORK_FORMAT}")
    require(complete, "network", f"{out / RECORD} without its entries", "that of `rfa forecast train`")
    return record


def load_network(out: Path) -> tuple[RFAForTimeSeries, dict[str, Any]]:
    """The best weights of a folder, in evaluation mode, and its record.

    Raises:
        ValueError: as `read_record`, and for weights that are missing or damaged.
    """
    record = read_record(out)
    require((out / MODEL / "config.json").is_file(), "network", str(out), "a folder with a trained model; use --resume")
    try:
        with quiet_transformers():
            model = read_model(out / MODEL, RFAForTimeSeries)
    except Exception as error:  # the libraries raise many types, from OSError to SafetensorError
        first, _, _ = str(error).partition("\n")
        raise ValueError(f"network: {out / MODEL} cannot be read ({type(error).__name__}: {first})") from error
    return model, record


@torch.no_grad()
def predicted(
    model: RFAForTimeSeries, table: SeriesTable, origin: Float[Tensor, ""], asked: Float[Tensor, " n"]
) -> Distribution:
    """The network's distribution at times `(n,)` since `origin`, `(n, channels)`."""
    times, values = (table.times - origin)[None], table.values[None]
    device = next(model.parameters()).device
    output = model(times.to(device), values.to(device), query_times=asked[None].to(device))
    parts = (output.location, output.deviation, output.degrees_of_freedom)
    location, deviation, degrees = (None if part is None else part[0].double().cpu() for part in parts)
    return type(output)(location=location, deviation=deviation, degrees_of_freedom=degrees).distribution


def write_record(out: Path, record: Mapping[str, Any]) -> None:
    """Replace `network.json`, whole."""
    write_text_whole(out / RECORD, json.dumps(record, indent=2) + "\n")


def check_network_free(out: Path, overwrite: bool) -> None:
    """Raise `ValueError` unless the folder is free, or holds a network that may be replaced."""
    there = names_in(out, {RECORD, MODEL, CHECKPOINTS})
    require(overwrite or not there, "out", f"{out} with a network", "an empty folder, --resume or --overwrite")


_QUERIES = 1024  # asked at once; no query sees another one
_FAR = 6.0  # deviations of its one-step forecast at which a reading is an outlier; 4 are common where tails are heavy
_BEFORE = 1e-6  # typical gaps before a reading its one-step forecast is asked for, so that it does not see the reading


def forecast_by_network(folder: Path) -> tuple[Forecaster, dict[str, Any]]:
    """Forecasts by the network of a folder, all channels at once, and the folder's record.

    An outlier is a reading more than six deviations from what the network expects after the earlier readings. The
    deviation is the scale of the Student-t distribution, which a share of wrong readings in training hardly changes. A
    network gives no weights.

    Raises:
        ValueError: as `load_network`. The forecaster raises it for other channels, times of another kind, and sensors.
    """
    model, record = load_network(folder)

    def forecast(table: SeriesTable, query_times: Float[np.ndarray, " steps"]) -> list[ChannelForecast]:
        asked = table.channels
        table, ratio = _as_trained(table, record)
        last = table.times[-1]
        recent = table.rows(slice(max(0, len(table.times) - record["context"]), None))
        leads = torch.tensor(query_times) * ratio - last
        found = [predicted(model, recent, last, part) for part in leads.split(_QUERIES)]
        ends = {}
        for level in LEVELS:
            lower, upper = zip(*(central_interval(part, level) for part in found), strict=True)
            ends[level] = torch.cat(lower).numpy(), torch.cat(upper).numpy()
        (times, *past), outliers = _judged(model, table, record["context"])

        def of_channel(name: str) -> ChannelForecast:
            place = table.channels.index(name)
            mean, lower, upper, values = (each[:, place] for each in past)
            return ChannelForecast(
                name=name,
                mean=torch.cat([part.mean for part in found])[:, place].numpy(),
                intervals={level: (low[:, place], high[:, place]) for level, (low, high) in ends.items()},
                past=pd.DataFrame(
                    {
                        "time": times / ratio,
                        "reading": values,
                        "estimate": mean,
                        "lower_90": lower,
                        "upper_90": upper,
                        "weight": np.nan,
                        "outlier": outliers[:, place],
                    }
                ),
            )

        return [of_channel(name) for name in asked]

    return forecast, record


def _as_trained(table: SeriesTable, record: dict[str, Any]) -> tuple[SeriesTable, float]:
    """The series with the network's channels and unit, and how many of its units are one of the series'."""
    channels = record["channels"]
    expected = f"the channels of the network, {', '.join(channels)}"
    require(sorted(table.channels) == sorted(channels), "values", list(table.channels), expected)
    kinds = {True: "dates", False: "numbers"}
    given, trained = bool(table.unit), record["unit"] is not None
    require(given == trained, "time", kinds[given], f"{kinds[trained]}, as in the network's training")
    require(not table.sensor, "sensor", "a column of sensors", "none with a network; --model filter takes several")
    seen = int((~table.values.isnan().all(1)).sum())
    require(seen >= FEWEST_READINGS, "file", f"{seen} readings", f"at least {FEWEST_READINGS} for a network")
    order = [table.channels.index(name) for name in channels]
    table = table._replace(values=table.values[:, order], channels=tuple(channels))
    unit = record["unit"] or ""
    return table.in_unit(unit), float(table._replace(times=torch.ones(1)).in_unit(unit).times)


def _judged(model: RFAForTimeSeries, table: SeriesTable, context: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Of the past: times `(n,)`, one-step means, ends of the 90 % interval and values; and which are outliers."""
    before, half = _BEFORE * model.config.typical_gap, max(1, context // 2)
    parts: list[list[Tensor]] = []
    total = len(table.times)
    for first in range(0, max(1, total - half), half):
        window = table.rows(slice(first, first + context))
        judged = slice(min(FEWEST_READINGS, total - 1) if first == 0 else context - half, None)
        times = window.times[judged]
        if not len(times):
            continue
        found = predicted(model, window, window.times[-1], times - window.times[-1] - before)
        deviation = found.scale  # type: ignore[attr-defined]
        parts.append([times, found.mean, *central_interval(found, 0.9), window.values[judged], deviation])
    joined = [torch.cat(each).numpy() for each in zip(*parts, strict=True)]
    deviation = joined.pop()
    return tuple(joined), np.abs(joined[4] - joined[1]) > _FAR * deviation
