"""Public sets of irregular series that users compare on: ETT, PhysioNet 2012, USHCN. They are fetched when asked for.

Each loader takes a local file or folder instead, so that it works without a network.
"""

import io
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import check_range, require
from rfa.files import cache_folder, cached_file
from rfa.forecasting.table import SeriesTable, read_series

from .hub import Unreachable, download
from .simulated_series import SeriesBatch

_ETT = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/{name}.csv"
_PHYSIONET = "https://physionet.org/files/challenge-2012/1.0.0/set-{part}.tar.gz?download"
_USHCN = "https://raw.githubusercontent.com/edebrouwer/gru_ode_bayes/master/gru_ode_bayes/datasets/Climate/small_chunked_sporadic.csv"
_LARGEST = 1 << 27  # bytes
_STATIC = ("RecordID", "Age", "Gender", "Height", "ICUType")  # of PhysioNet's records, given once


class IrregularSeries(NamedTuple):
    """One series of a set, in float64.

    Fields:
        name: of the patient, station or record.
        times: strictly increasing.
        values: NaN where nothing was read.
    """

    name: str
    times: Float[Tensor, " T"]
    values: Float[Tensor, "T channels"]


class SeriesSet(NamedTuple):
    """Series of the same channels.

    Fields:
        series: in the order of the set.
        channels: their names.
        unit: of the times, in words.
    """

    series: tuple[IrregularSeries, ...]
    channels: tuple[str, ...]
    unit: str


def load_ett(name: str = "ETTh1", path: str | Path | None = None) -> SeriesTable:
    """The transformer temperatures of Zhou et al. (2021): 7 channels.

    `ETTh1` and `ETTh2` are hourly, `ETTm1` and `ETTm2` have a reading each quarter of an hour.

    Args:
        name: "ETTh1", "ETTh2", "ETTm1" or "ETTm2".
        path: a local copy of the file; by default it is fetched once into the cache.

    Raises:
        ValueError: for another name, a file that is another, or no network.
    """
    require(name in ("ETTh1", "ETTh2", "ETTm1", "ETTm2"), "name", name, "ETTh1, ETTh2, ETTm1 or ETTm2")
    found = Path(path) if path is not None else _fetched(_ETT.format(name=name), f"{name}.csv")
    return read_series(found, "date", ["HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"])


def load_physionet2012(part: str = "a", path: str | Path | None = None) -> SeriesSet:
    """The first 48 hours of patients in intensive care (Silva et al. 2012): 37 channels, most of them rarely measured.

    Times are hours since the admission. Of several readings of a channel at one time the last one stays. A value of -1
    stands for a missing one.

    Args:
        part: "a", "b" or "c".
        path: a folder of the unpacked text files; by default the archive is fetched once into the cache.

    Raises:
        ValueError: for another part, no network, or a file that is damaged.
    """
    require(part in ("a", "b", "c"), "part", part, "a, b or c")
    if path is not None:
        texts = {file.stem: file.read_text("utf-8") for file in sorted(Path(path).glob("*.txt"))}
        if not texts:
            raise ValueError(f"path: got {path} without .txt files, expected those of PhysioNet's set-{part}")
    else:
        archive = _fetched(_PHYSIONET.format(part=part), f"physionet2012-{part}.tar.gz")
        texts = _texts_of(archive)
    records = {name: _patient(name, text) for name, text in texts.items()}
    channels = tuple(sorted({channel for rows in records.values() for channel in rows["channel"]}))
    series = tuple(_pivoted(name, rows, channels) for name, rows in records.items() if len(rows))
    return SeriesSet(series, channels, "hours")


def _texts_of(archive: Path) -> dict[str, str]:
    """The records of PhysioNet's archive. Nothing is unpacked to the disk."""
    texts = {}
    try:
        with tarfile.open(archive, "r:gz") as packed:
            for member in packed:
                if member.isfile() and member.name.endswith(".txt") and (file := packed.extractfile(member)):
                    texts[Path(member.name).stem] = file.read().decode("utf-8")
    except (tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"series: {archive} is damaged ({error}), expected PhysioNet's archive") from None
    return texts


def _patient(name: str, text: str) -> pd.DataFrame:
    """Time in hours, channel and value of each reading."""
    names = ["clock", "channel", "value"]
    rows = pd.read_csv(io.StringIO(text), header=0, names=names, dtype=str, keep_default_na=False, index_col=False)
    clock = rows["clock"].str.extract(r"^(\d+):(\d+)$").astype(float)
    rows["time"], rows["value"] = clock[0] + clock[1] / 60, pd.to_numeric(rows["value"], errors="coerce")
    wrong = ~np.isfinite(rows[["time", "value"]]).all(axis=1)
    if wrong.any():
        line = text.splitlines()[1 + int(np.flatnonzero(wrong)[0])]
        number = 2 + int(np.flatnonzero(wrong)[0])
        raise ValueError(f"series: got {line!r} in line {number} of {name}.txt, expected HH:MM,channel,value")
    return rows[~rows["channel"].isin(["", *_STATIC]) & (rows["value"] != -1)]


def load_ushcn(path: str | Path | None = None) -> SeriesSet:
    """Daily weather of stations in the United States, thinned out by De Brouwer et al. (2019): 5 channels.

    Args:
        path: a local copy of `small_chunked_sporadic.csv`; by default it is fetched once into the cache.

    Raises:
        ValueError: for no network, or a file with other columns.
        OSError: for a local copy that cannot be read.
    """
    found = Path(path) if path is not None else _fetched(_USHCN, "ushcn.csv")
    try:
        table = pd.read_csv(found, dtype={"ID": str})
        channels = tuple(name for name in table if name.startswith("Value_"))
        masks = [f"Mask_{name.removeprefix('Value_')}" for name in channels]
        read = table.reindex(columns=["Time", *channels, *masks]).astype(np.float64)
    except ValueError as error:  # pandas' own among them
        raise ValueError(f"path: {found} is damaged ({error}), expected the CSV file of De Brouwer et al.") from None
    if not channels or not {"ID", "Time", *masks} <= set(table):
        raise ValueError(f"path: got columns {', '.join(table)} in {found}, expected ID, Time, Value_0, Mask_0, ...")
    parts = []
    for channel, mask in zip(channels, masks, strict=True):
        part = pd.DataFrame({"name": table["ID"], "time": read["Time"], "channel": channel, "value": read[channel]})
        parts.append(part[read[mask] != 0])
    rows = pd.concat(parts).sort_index(kind="stable")
    wrong = ~np.isfinite(rows[["time", "value"]]).all(axis=1)
    if wrong.any():
        raise ValueError(f"series: got no number in line {2 + wrong.idxmax()} of {found}, expected numbers")
    series = tuple(_pivoted(name, own, channels) for name, own in rows.groupby("name", sort=False))
    return SeriesSet(series, channels, "days")


def _fetched(address: str, name: str) -> Path:
    def write(file: BinaryIO) -> None:
        file.write(download(address, _LARGEST))

    try:
        return cached_file(cache_folder() / "series" / name, write)
    except Unreachable as error:
        raise ValueError(f"series: tried {error}. Try again, or give `path` of a local copy") from error


def _pivoted(name: str, readings: pd.DataFrame, channels: tuple[str, ...]) -> IrregularSeries:
    """Readings of single channels as rows of all channels; the last one of a time."""
    table = readings.groupby(["time", "channel"])["value"].last().unstack().reindex(columns=list(channels))
    return IrregularSeries(name, torch.tensor(table.index.to_numpy()), torch.tensor(table.to_numpy()))


# Windows of the ETT tables: rows dropped at random, readings made wrong, later rows to forecast

Split = Literal["train", "valid", "test"]
TABLES = {"ETTh1": 1, "ETTh2": 1, "ETTm1": 4, "ETTm2": 4}  # rows an hour
_MONTH = 30 * 24  # hours
_BORDERS = {"train": (0, 12), "valid": (12, 16), "test": (16, 20)}  # months, as the literature on these sets has them


@dataclass(frozen=True, kw_only=True)
class TableSetting:
    """Windows of one of the ETT tables. Times are rows of the window. Channels are standardised by the training split.

    Args:
        table: one of `TABLES`.
        path: a local copy of the table; by default it is fetched once.
        seen: rows of a window before the forecasts.
        horizon: the forecasts lie in so many rows after them.
        forecasts: so many rows of the horizon are asked for, drawn at random; 0: all of them.
        dropped: share of the rows seen that are taken away at random. At least two rows stay.
        dropped_least: the share is drawn anew for each batch, between this and `dropped`. None: it is `dropped`.
        spikes: share of the single readings that are made wrong.
        size: a wrong reading gets an error of so many standard deviations of its channel, times a normal number.

    Raises:
        ValueError: for an unknown table, or a number out of range.
    """

    table: str = "ETTh1"
    path: str | None = None
    seen: int = 96
    horizon: int = 24
    forecasts: int = 0
    dropped: float = 0.0
    dropped_least: float | None = None
    spikes: float = 0.0
    size: float = 10.0

    def __post_init__(self) -> None:
        require(self.table in TABLES, "table", self.table, f"one of {', '.join(TABLES)}")
        check_range("seen", self.seen, 2, 10_000)
        check_range("horizon", self.horizon, 1, 10_000)
        check_range("forecasts", self.forecasts, 0, self.horizon)
        for name in ("dropped", "spikes"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "a share from 0, below 1")
        least = self.dropped if self.dropped_least is None else self.dropped_least
        require(0 <= least <= self.dropped, "dropped_least", least, f"a share up to dropped = {self.dropped}")
        require(self.size >= 0, "size", self.size, "at least 0")

    def batch(self, series: int, generator: torch.Generator, split: Split = "train") -> SeriesBatch:
        """Windows at random places of a split; rows seen may lie before it. Raises `ValueError` for a short table."""
        require(split in _BORDERS, "split", split, f"one of {', '.join(_BORDERS)}")
        rows = _standardised(self.table, self.path)
        window = self.seen + self.horizon
        first, last = (months * _MONTH * TABLES[self.table] for months in _BORDERS[split])
        first = max(0, first - self.seen)
        require(last <= len(rows), "table", f"{len(rows)} rows", f"at least {last}, as {self.table} has")
        require(last - first >= window, "seen", self.seen, f"windows of at most {last - first} rows")
        start = torch.randint(first, last - window + 1, (series,), generator=generator)
        share = self.dropped
        if self.dropped_least is not None:
            share = self.dropped_least + (share - self.dropped_least) * float(torch.rand((), generator=generator))
        seen = _chosen(series, self.seen, max(2, round((1 - share) * self.seen)), generator)
        ahead = self.seen + _chosen(series, self.horizon, self.forecasts or self.horizon, generator)
        readings = rows[start[:, None] + seen]
        if self.spikes:
            wrong = torch.rand(readings.shape, generator=generator) < self.spikes
            errors = self.size * torch.randn(readings.shape, generator=generator, dtype=torch.float64)
            readings = readings + torch.where(wrong, errors, 0.0)
        future = rows[start[:, None] + ahead]
        return SeriesBatch(
            torch.cat([seen, ahead], dim=1).to(torch.float64),
            torch.cat([readings, torch.full_like(future, torch.nan)], dim=1),
            torch.cat([torch.full_like(readings, torch.nan), future], dim=1),
        )


def _chosen(series: int, rows: int, kept: int, generator: torch.Generator) -> Tensor:
    """So many different numbers below `rows` for each series, ascending."""
    return torch.rand(series, rows, generator=generator).argsort(dim=-1)[:, :kept].sort(dim=-1).values


@cache
def _standardised(table: str, path: str | None) -> Float[Tensor, "T channels"]:
    rows = torch.as_tensor(load_ett(table, path).values, dtype=torch.float64)
    train = rows[: _BORDERS["train"][1] * _MONTH * TABLES[table]]
    location = train.nanmean(0)
    deviation = (train - location).square().nanmean(0).sqrt()
    flat = (~(deviation > 0)).nonzero().flatten().tolist()
    require(not flat, "table", f"channels {flat} that do not change in the first year", "channels that change")
    return (rows - location) / deviation
