"""Series drawn from linear SDEs with gaps and wrong readings: processes whose best filter is known.

    dx = A x dt + noise of covariance Q dt,    z_k = C x(t_k) + s_k v_k,    v_k ~ N(0, R)

The gaps between readings are exponential. `s_k` is 1, or larger where a reading is wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rfa.checks import require
from rfa.estimation import LinearSDE

# A batch of series to learn from or to be scored on: what simulations, tables and training share


class SeriesBatch(NamedTuple):
    """Series of equal length. A row without a reading asks for a prediction, such as a forecast.

    Fields:
        times: of the rows, in order.
        values: the readings; NaN where nothing was read.
        targets: what a model should say at each row from the readings up to and including it; NaN: nothing is asked.
        noise: the factor by which each reading's error is too large, where it is known; None elsewhere.
    """

    times: Float[Tensor, "batch rows"]
    values: Float[Tensor, "batch rows channels"]
    targets: Float[Tensor, "batch rows channels"]
    noise: Float[Tensor, "batch rows channels"] | None = None

    def part(self, start: int, stop: int) -> "SeriesBatch":
        """Some of the series."""
        rows = slice(start, stop)
        noise = None if self.noise is None else self.noise[rows]
        return SeriesBatch(self.times[rows], self.values[rows], self.targets[rows], noise)


def damped_oscillator(
    decay: float = 0.05, frequency: float = 1.0, process: float = 0.1, noise: float = 0.2
) -> LinearSDE:
    """A damped rotation in the plane whose first component is read.

    Decay is per unit of time, frequency in radians per unit of time; process is the variance of each component per unit
    of time, noise the variance of a reading's error.
    """
    rotation = torch.tensor([[-decay, -frequency], [frequency, -decay]], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    return LinearSDE(rotation, process * eye, eye[:1], noise * eye[:1, :1])


def two_oscillators(noise: float = 0.2) -> LinearSDE:
    """The sum of a slow and a fast damped oscillator, with frequencies 0.4 and 2.1; only the sum is read."""
    slow, fast = damped_oscillator(0.03, 0.4, 0.03), damped_oscillator(0.1, 2.1, 0.2)
    dynamics = torch.block_diag(slow.dynamics, fast.dynamics)
    diffusion = torch.block_diag(slow.diffusion, fast.diffusion)
    row = torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    return LinearSDE(dynamics, diffusion, row, torch.full((1, 1), noise, dtype=torch.float64))


def tracker(process: float = 0.05, noise: float = 1.0) -> LinearSDE:
    """A point that moves in the plane at a speed that wanders; its position is read."""
    eye, none = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    dynamics = torch.cat([torch.cat([none, eye], 1), torch.cat([none, none], 1)])
    diffusion = torch.block_diag(none, process * eye)
    return LinearSDE(dynamics, diffusion, torch.cat([eye, none], 1), noise * eye)


PROCESSES: dict[str, Callable[[], LinearSDE]] = {
    "oscillator": damped_oscillator,
    "two_oscillators": two_oscillators,
    "tracker": tracker,
}


@dataclass(frozen=True, kw_only=True)
class SimulatedSetting:
    """What series of a process are read, and how wrong the readings are.

    Args:
        process: one of `PROCESSES`.
        length: readings of a series.
        gap: mean time between readings.
        horizon: the forecasts lie between 0 and this time after the last reading.
        forecasts: number of forecasts of a series.
        outliers: fraction of the readings that are wrong.
        size: the error of a wrong reading is this many times too large.
        burst: wrong readings come in runs of this length, which may overlap.
        channels: "all" or "first": the channels in which readings are wrong.

    Raises:
        ValueError: for an unknown process, or a number out of range.
    """

    process: str = "oscillator"
    length: int = 64
    gap: float = 0.5
    horizon: float = 4.0
    forecasts: int = 8
    outliers: float = 0.1
    size: float = 10.0
    burst: int = 1
    channels: str = "all"

    def __post_init__(self) -> None:
        require(self.process in PROCESSES, "process", self.process, f"one of {', '.join(PROCESSES)}")
        require(self.length >= 1, "length", self.length, "at least 1")
        require(self.gap > 0, "gap", self.gap, "a time above 0")
        require(self.horizon > 0, "horizon", self.horizon, "a time above 0")
        require(self.forecasts >= 0, "forecasts", self.forecasts, "at least 0")
        require(0 <= self.outliers < 1, "outliers", self.outliers, "a fraction from 0, below 1")
        require(self.size >= 1, "size", self.size, "at least 1")
        require(self.burst >= 1, "burst", self.burst, "at least 1")
        require(self.channels in ("all", "first"), "channels", self.channels, "'all' or 'first'")

    def changed(self, **changes: object) -> "SimulatedSetting":
        """The same with other values of some fields."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def sde(self) -> LinearSDE:
        """The true model of the process, with the noise of readings that are not wrong."""
        return PROCESSES[self.process]()

    def batch(self, series: int, generator: torch.Generator, split: str = "train") -> SeriesBatch:
        """Series with the signal as target: at each reading, and at the forecasts. All splits are drawn alike."""
        return simulate_series(self, series, generator).batch()


class SimulatedSeries(NamedTuple):
    """A batch of series, in float64.

    Fields:
        times: of the readings, from 0.
        values: the readings.
        signal: what the readings would be without their errors, `C x(t)`.
        query_times: of the forecasts, ascending, after the last reading.
        future: the signal at these times.
        wrong: True where a reading is wrong.
        noise: the factor s by which each reading's error is too large.
    """

    times: Float[Tensor, "series length"]
    values: Float[Tensor, "series length channels"]
    signal: Float[Tensor, "series length channels"]
    query_times: Float[Tensor, "series queries"]
    future: Float[Tensor, "series queries channels"]
    wrong: Bool[Tensor, "series length channels"]
    noise: Float[Tensor, "series length channels"]

    def batch(self) -> SeriesBatch:
        """Readings and forecasts as rows, with the signal as target."""
        empty = torch.full_like(self.future, torch.nan)
        return SeriesBatch(
            torch.cat([self.times, self.query_times], dim=1),
            torch.cat([self.values, empty], dim=1),
            torch.cat([self.signal, self.future], dim=1),
            torch.cat([self.noise, torch.ones_like(empty)], dim=1),
        )


def simulate_series(setting: SimulatedSetting, series: int, generator: torch.Generator) -> SimulatedSeries:
    """Draw series of a setting.

    The first state has the stationary distribution; a tracker, which has none, starts at zero. Raises `ValueError` for
    fewer than one series.
    """
    require(series >= 1, "series", series, "at least 1")
    sde, exact = setting.sde, {"generator": generator, "dtype": torch.float64}
    gaps = -setting.gap * torch.log1p(-torch.rand(series, setting.length, **exact))  # type: ignore[call-overload]
    times = gaps.clamp(min=1e-6 * setting.gap).cumsum(-1)
    times = times - times[:, :1]
    ahead = setting.horizon * torch.rand(series, setting.forecasts, **exact)  # type: ignore[call-overload]
    query_times = times[:, -1:] + ahead.sort(-1).values.clamp(min=1e-6 * setting.gap)
    clean = LinearSDE(sde.dynamics, sde.diffusion, sde.observation, torch.zeros_like(sde.observation_noise))
    drawn = clean.simulate(torch.cat([times, query_times], dim=-1), generator).observations
    signal, future = drawn[:, : setting.length], drawn[:, setting.length :]
    share = 1 - (1 - setting.outliers) ** (1 / setting.burst)  # of the readings at which a run starts
    starts = torch.rand(series, setting.burst - 1 + setting.length, 1, **exact) < share  # type: ignore[call-overload]
    wrong = _in_runs(starts, setting.burst)[:, setting.burst - 1 :].expand(signal.shape).clone()
    if setting.channels == "first":
        wrong[..., 1:] = False
    noise = torch.ones(wrong.shape, dtype=torch.float64).masked_fill(wrong, setting.size)
    deviation = sde.observation_noise.diagonal().sqrt()
    values = signal + noise * deviation * torch.randn(signal.shape, **exact)  # type: ignore[call-overload]
    return SimulatedSeries(times, values, signal, query_times, future, wrong, noise)


def _in_runs(starts: Tensor, burst: int) -> Tensor:
    """True at each start and at the `burst - 1` readings after it."""
    found = starts.clone()
    for later in range(1, min(burst, starts.shape[1])):
        found[:, later:] |= starts[:, :-later]
    return found
