"""Windows of a long table of readings: rows dropped at random, readings made wrong, later rows to forecast."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import check_range, require

from .public_series import load_ett
from .simulated_series import SeriesBatch

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
        """Windows at random places of a split. The rows seen may reach back into the split before it.

        Raises:
            ValueError: for a table that cannot be had, or that is too short.
        """
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
