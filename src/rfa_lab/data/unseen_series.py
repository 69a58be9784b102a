"""Series of which a network knows nothing beforehand, each in units of its own past.

Simulated ones are sums of components of `rfa.estimation` with drawn parameters, exact at any times, and noise:

    dx = -(mu - i w) x dt + noise of variance q dt in each part,    its real part is shown
        level: mu = w = 0;   autoregression: w = 0;   cycle: both above 0;   season: mu = 0, several w
    d trend = -mu trend dt + noise of variance q dt,    the integral of the trend is shown

Real ones are windows of Nile, CO2 or ETTh1.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import check_range, require
from rfa.forecasting.table import read_series
from rfa.models.series_tokens import median, robust_location_and_spread

from .public_series import load_ett
from .simulated_series import SeriesBatch

_EXACT, _TINY = torch.float64, 1e-60

# Simulated signals. The unit of time is the median gap, and that of values the deviation of the noise


class Waves(NamedTuple):
    """Components of series: mu, w, q and the deviation of each part at first, `(series, components)` each.

    The last component is the slope of a trend.
    """

    decay: Tensor
    frequency: Tensor
    diffusion: Tensor
    start: Tensor

    def signal(self, times: Float[Tensor, "series rows"], generator: torch.Generator) -> Float[Tensor, "series rows"]:
        """Draw the sum of the components at times in order, from the start at the first one. The law is exact."""
        lags = torch.diff(times, dim=1, prepend=times[:, :1])
        x, diffused = self.decay[:, None] * lags[..., None], self.diffusion[:, None] * lags[..., None]
        variance = diffused * _share(2 * x)
        steps = torch.complex(*(variance.sqrt() * _normal((2, *x.shape), generator)).unbind())
        factors = torch.exp(torch.complex(-x, self.frequency[:, None] * lags[..., None]))
        states = [torch.complex(*(self.start * _normal((2, *self.start.shape), generator)).unbind())]
        for row in range(1, times.shape[1]):
            states.append(factors[:, row] * states[-1] + steps[:, row])
        shown = torch.stack(states, 1).real
        # the integral of the slope over each lag, whose noise goes with that of the slope
        x, diffused, variance = (part[..., -1] for part in (x, diffused, variance))
        exact = (x + 2 * torch.expm1(-x) - torch.expm1(-2 * x) / 2) / x.clamp(min=_TINY) ** 3
        integral = diffused * lags.square() * torch.where(x > 0.01, exact, 1 / 3 - x / 4)  # it cancels for small x
        both = diffused * lags * _share(x).square() / 2
        gain = both / variance.clamp(min=_TINY)
        rest = (integral - gain * both).clamp(min=0).sqrt() * _normal(x.shape, generator)
        moved = lags * _share(x) * shown[..., -1].roll(1, 1) + gain * steps[..., -1].real + rest
        return shown[..., :-1].sum(-1) + moved.cumsum(1)


_PERIODS = torch.tensor([4.0, 7.0, 12.0, 24.0, 48.0, 52.18], dtype=_EXACT)  # of seasons that people record, in readings
_SHARES = {"level": 0.4, "ar": 0.4, "second ar": 0.15, "cycle": 0.3, "season": 0.4, "trend": 0.35}


def drawn_waves(series: int, generator: torch.Generator) -> Waves:
    """A level, two autoregressions, a cycle, a season of three harmonics and a trend, some of them with size 0."""

    def between(low: float, high: float) -> Tensor:
        return _between(low, high, (series,), generator)

    def yes(share: float) -> Tensor:
        return _uniform((series,), generator) < share

    there = {name: yes(share) for name, share in _SHARES.items()}
    there["level"] |= ~torch.stack([*there.values()]).any(0)
    none = torch.zeros(series, dtype=_EXACT)
    level = (none, none, between(0.01, 3.0).square() * there["level"], none)
    waves = [level]
    for name in ("ar", "second ar"):
        decay, size = 1 / between(0.5, 100.0), between(0.1, 30.0) * there[name]
        waves.append((decay, none, 2 * decay * size.square(), size))
    period = between(4.0, 200.0)
    decay, size = 1 / (period * between(0.5, 20.0)), between(0.1, 30.0) * there["cycle"]
    waves.append((decay, 2 * math.pi / period, 2 * decay * size.square(), size))
    usual = _PERIODS[torch.randint(len(_PERIODS), (series,), generator=generator)]
    period = torch.where(yes(0.5), usual, between(4.0, 100.0))
    size, change = between(0.3, 30.0) * there["season"], between(1e-3, 0.2)
    for harmonic in range(1, 4):
        # what turns faster than once in two readings is not seen as it is
        own = size * _uniform((series,), generator) * (period >= 2 * harmonic) / harmonic
        waves.append((none, 2 * math.pi * harmonic / period, (change * own).square() / period, own))
    decay, size = torch.where(yes(0.5), 1 / between(3.0, 300.0), none), there["trend"]
    waves.append((decay, none, between(1e-4, 0.1).square() * size, between(1e-3, 0.3) * size))
    decay, frequency, diffusion, start = (torch.stack(part, -1) for part in zip(*waves, strict=True))
    return Waves(decay, frequency, diffusion, start)


def drawn_times(series: int, rows: int, generator: torch.Generator) -> Float[Tensor, "series rows"]:
    """Half of the series regular, others with readings missing from a grid, or any gaps; a third have a hole."""
    shape = (series, rows)
    kind, uniform = _uniform((series, 1), generator), _uniform(shape, generator)
    missing = 0.6 * _uniform((series, 1), generator)  # share of a grid
    grid = 1 + torch.floor(torch.log(uniform) / torch.log(missing))
    wide = torch.exp((0.2 + _uniform((series, 1), generator)) * _normal(shape, generator))
    gaps = torch.where(kind < 0.5, torch.ones(shape, dtype=_EXACT), torch.where(kind < 0.7, grid, wide))
    hole = torch.randint(rows, (series, 1), generator=generator)
    size = _between(5.0, 60.0, (series, 1), generator).floor() * (_uniform((series, 1), generator) < 1 / 3)
    times = gaps.clamp(min=1e-3).scatter_add(1, hole, size).cumsum(1)
    return times - times[:, :1]


# Batches

_COLUMNS = {"nile": ("year", ["volume"]), "co2": ("date", ["co2"])}
SOURCES = ("simulated", *_COLUMNS, "ETTh1")
_LEAST_SIZE = 3.0


@dataclass(frozen=True, kw_only=True)
class UnseenSetting:
    """What is read of a series, and what is asked.

    Args:
        unseen: "simulated", "nile", "co2" or "ETTh1".
        path: a local copy of a real series; by default `examples/NAME.csv`, and ETTh1 is fetched once.
        length: readings of a series.
        shortest: the length is drawn anew for each batch, between this and `length`. None: it is `length`.
        left_out: readings between the others that are asked instead of given.
        forecasts: readings asked after the last one given, whole gaps of a regular series later, near ones more often.
        horizon: the farthest of them, in these gaps.
        known: least share of the readings by whose median, spread and median gap a series is scaled. The share is drawn
            for each series up to 1, and the last of these readings is the first that is asked for its state.
        outliers: share of the readings that are wrong.
        size: their errors are so many times too large. The noise of a real series is the robust deviation of its
            changes, divided by the root of two.
        varied: share and size are drawn for each series, from 0 and 3 up to these.

    Raises:
        ValueError: for an unknown series, or a number out of range.
    """

    unseen: str = "simulated"
    path: str | None = None
    length: int = 128
    shortest: int | None = None
    left_out: int = 8
    forecasts: int = 8
    horizon: int = 48
    known: float = 0.5
    outliers: float = 0.0
    size: float = 30.0
    varied: bool = False

    def __post_init__(self) -> None:
        require(self.unseen in SOURCES, "unseen", self.unseen, f"one of {', '.join(SOURCES)}")
        for name, least in (("length", 8), ("left_out", 0), ("forecasts", 0), ("horizon", 1)):
            check_range(name, getattr(self, name), least, 10_000)
        check_range("shortest", self.length if self.shortest is None else self.shortest, 8, self.length)
        require(0 < self.known <= 1, "known", self.known, "a share above 0, up to 1")
        require(0 <= self.outliers < 1, "outliers", self.outliers, "a share from 0, below 1")
        require(self.size >= _LEAST_SIZE, "size", self.size, f"at least {_LEAST_SIZE:g}")

    def batch(self, series: int, generator: torch.Generator, split: str = "train") -> SeriesBatch:
        """Series in units of their own past, in order of time. All splits are drawn alike.

        Targets are, from the last known reading on: at readings the signal without noise, where it is simulated; at
        rows left out and forecasts the reading, with its noise and never wrong.
        """
        length = self.length
        if self.shortest is not None:
            length = int(torch.randint(self.shortest, length + 1, (), generator=generator))
        rows = length + self.left_out
        ahead = _between(1.0, float(self.horizon), (series, self.forecasts), generator).round().sort(-1).values
        if self.unseen == "simulated":
            times = drawn_times(series, rows, generator)
            times = torch.cat([times, times[:, -1:] + ahead], 1)
            signal = drawn_waves(series, generator).signal(times, generator)
            readings, noise = signal + _normal(signal.shape, generator), torch.ones(series, 1, dtype=_EXACT)
        else:
            times, readings, noise = self._windows(series, rows, ahead.to(torch.int64), generator)
            signal = torch.full_like(readings, torch.nan)
        given = torch.ones(times.shape, dtype=torch.bool)
        given[:, rows:] = False
        if self.left_out:  # never the first or the last one
            places = 1 + _uniform((series, rows - 2), generator).argsort(-1)[:, : self.left_out]
            given.scatter_(1, places, False)
        values = (readings + noise * self._errors(times.shape, generator)).masked_fill(~given, torch.nan)
        count = torch.ceil((self.known + (1 - self.known) * _uniform((series, 1), generator)) * length)
        order = given.cumsum(1)
        known, asked = given & (order <= count), order >= count
        targets = torch.where(given, signal, readings).masked_fill(~asked, torch.nan)
        return in_own_units(times, values, targets, known)

    def _errors(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """What wrong readings have beside their noise, so that the sum is `size` times too large; 0 elsewhere."""
        share = self.outliers * (_uniform((shape[0], 1), generator) if self.varied else 1.0)
        size = _between(_LEAST_SIZE if self.varied else self.size, self.size, (shape[0], 1), generator)
        error = (size.square() - 1).sqrt() * _normal(shape, generator)
        return torch.where(_uniform(shape, generator) < share, error, 0.0)

    def _windows(
        self, series: int, rows: int, ahead: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Times and readings of windows at random places, and the deviation of their noise."""
        times, table = _real(self.unseen, self.path)
        last = len(times) - rows - self.horizon
        require(last >= 0, "length", self.length, f"windows of at most {len(times)} rows, with those ahead")
        start = torch.randint(last + 1, (series, 1), generator=generator)
        channel = torch.randint(table.shape[1], (series, 1), generator=generator)
        here = torch.cat([torch.arange(rows).expand(series, -1), rows - 1 + ahead], 1) + start
        readings = table[here, channel]
        noise = robust_location_and_spread(readings[:, :rows, None].diff(dim=1))[1] / math.sqrt(2)
        return times[here], readings, noise


@cache
def _real(name: str, path: str | None) -> tuple[Tensor, Tensor]:
    """Times and values `(rows, channels)` of the rows in which all channels were read."""
    if name == "ETTh1":
        table = load_ett(name, path)
    else:
        time, channels = _COLUMNS[name]
        table = read_series(Path(path or f"examples/{name}.csv"), time, channels)
    seen = ~table.values.isnan().any(1)
    return table.times[seen], table.values[seen]


def in_own_units(times: Tensor, values: Tensor, targets: Tensor, known: Tensor) -> SeriesBatch:
    """Series `(series, rows)` without unit: by the median and the median deviation of known readings, and their gap.

    The median deviation is 0 where more than half of them are equal. Then the spread is that of the mean deviation.
    """
    of_known = values.masked_fill(~known, torch.nan)[..., None]
    location, spread = robust_location_and_spread(of_known)
    far = (of_known - location[:, None]).abs().nanmean(1) * math.sqrt(math.pi / 2)
    spread = torch.where(spread > 0, spread, torch.where(far > 0, far, torch.ones_like(far)))
    ranks = times.masked_fill(~known, math.inf).sort(1).values.diff(dim=1)
    gap = median(torch.where(ranks.isfinite(), ranks, torch.nan)[..., None])
    values, targets = ((part - location) / spread for part in (values, targets))
    return SeriesBatch((times - times[:, :1]) / gap, values[..., None], targets[..., None])


def _share(x: Tensor) -> Tensor:
    """`(1 - exp(-x)) / x`, 1 at 0."""
    return torch.where(x > 0, -torch.expm1(-x) / x.clamp(min=_TINY), 1.0)


def _between(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform in the logarithm."""
    return low * torch.exp(math.log(high / low) * _uniform(shape, generator))


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=_EXACT)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=_EXACT)
