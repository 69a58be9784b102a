"""What a network is to learn, its data, and the folder in which it is kept.

The folder holds `network.json` (request, data, versions and the result), `checkpoints/` (the newest two) and `model/`
(the weights with the best validation so far, as transformers saves them).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from rfa.checks import check_range, require
from rfa.data.series_table import SeriesTable, TableFormat, read_many_series, table_files
from rfa.files import sha256, whole_name, write_text_whole
from rfa.models import PRESETS, RFAForTimeSeries, RFATimeSeriesConfig
from rfa.training.saved_files import read_model
from rfa.training.trainer import quiet_transformers

from .forecast_windows import WindowSplit, split_windows

NETWORK_FORMAT = 1
RECORD, MODEL, CHECKPOINTS, LOCK = "network.json", "model", "checkpoints", ".lock"
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
    time: str
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
    """Read and split the series.

    Raises:
        ValueError: as `read_many_series` and `split_windows`.
    """
    values = None if request.values is None else list(request.values)
    found = read_many_series(
        request.files, request.time, values, series=request.series, table_format=request.table_format
    )
    series = list(found.values())
    horizon = max(one.longest_duration("horizon", request.horizon) for one in series)
    split = split_windows(series, horizon, request.hold_out, request.seed)
    gap = sorted(table.gap for table in series)[len(series) // 2]
    rows = round(_HORIZONS * horizon / gap)
    context = request.context or min(max(rows, _LEAST_CONTEXT), _MOST_CONTEXT)
    return TrainingData(
        series=series,
        split=split,
        context=context,
        horizon=horizon,
        digests={str(file): sha256(file) for file in sorted(table_files(request.files))},
    )


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
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file, expected a folder")
    there = {whole_name(path) for path in out.iterdir()} - {LOCK} if out.exists() else set()
    foreign = sorted(there - {RECORD, MODEL, CHECKPOINTS})
    if foreign:
        raise ValueError(f"out: {out} has other files, {', '.join(foreign)[:80]}, expected an empty folder")
    if there and not overwrite:
        raise ValueError(f"out: {out} has a network already, expected an empty folder, --resume or --overwrite")
