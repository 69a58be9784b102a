"""The components of a series in continuous time. Parameters have statsmodels' names where they mean the same.

    level           dx = dW,  Var dW = sigma2.level dt
    trend           d level = trend dt + dW_1,  d trend = -mu trend dt + dW_2
    cycle, season   d(x, y) = (-mu I + w J)(x, y) dt + dW,    J a turn by 90 degrees
    autoregression  dx = -mu x dt + dW

At readings one unit of time apart, `Level`, `Season`, `Cycle` and `Autoregression` are statsmodels' components
exactly. In `Trend` the noise of the slope moves the level within the unit too: the level gains the variance
`sigma2.trend / 3` and the covariance `sigma2.trend / 2` with the slope, where statsmodels has 0.

Source: Harvey (1989), chapter 9; statsmodels' `UnobservedComponents` for the names.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rfa.checks import require

from .structural_model import Component, ComponentMatrices, ParameterKind, ParameterValues, SeriesScale
from .time_axis import SECONDS

_USUAL = {name: SECONDS[name] for name in ("minute", "hour", "day", "week", "year")} | {"half day": 43200.0}
_NEAR = 0.025  # relative: 12 months of 31 days are a year
_SLOW = 10.0  # median gaps in which a process forgets, where a search starts


@dataclass(frozen=True)
class Level(Component):
    """A value that wanders: `dx = dW`. Its parameter is `sigma2.level`, the variance of its change in a unit of time.

    Args:
        name: for `fixed`, where the default occurs twice.
    """

    name: str = "level"

    @property
    def states(self) -> dict[str, float]:
        """One, the level."""
        return {"level": 1.0}

    @property
    def parameters(self) -> dict[str, ParameterKind]:
        """`sigma2.level`."""
        return {"sigma2.level": "variance"}

    def start(self, scale: SeriesScale) -> dict[str, float]:
        """A tenth of the change from reading to reading."""
        return {"sigma2.level": 0.1 * scale.step_variance / scale.gap}

    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A = 0 and Q = sigma2.level."""
        diffusion = parameters["sigma2.level"][..., None, None]
        return torch.zeros_like(diffusion), diffusion


@dataclass(frozen=True)
class Trend(Component):
    """A level that moves by a slope, and both wander: `d level = trend dt + dW_1`, `d trend = -mu trend dt + dW_2`.

    Its parameters are `sigma2.level` and `sigma2.trend`, variances per unit of time. With `sigma2.level` fixed at 0 the
    level is smooth. Where the slope is damped, `damping.trend` is the factor `exp(-mu)` in (0, 1) that is left of it
    after a unit of time, and a forecast flattens out at `level + trend / mu`. A damped slope starts stationary: with a
    diffuse one the likelihood would grow with mu without an end. Without damping mu is 0.

    Args:
        damped: whether the slope fades.
        name: for `fixed`.
    """

    damped: bool = False
    name: str = "trend"

    @property
    def stationary(self) -> tuple[int, ...]:  # type: ignore[override]
        """The slope, where it is damped."""
        return (1,) if self.damped else ()

    @property
    def states(self) -> dict[str, float]:
        """The level, which a reading shows, and its slope."""
        return {"level": 1.0, "trend": 0.0}

    @property
    def parameters(self) -> dict[str, ParameterKind]:
        """`sigma2.level`, `sigma2.trend` and, where it is damped, `damping.trend`."""
        found: dict[str, ParameterKind] = {"sigma2.level": "variance", "sigma2.trend": "variance"}
        return {**found, "damping.trend": "factor"} if self.damped else found

    def start(self, scale: SeriesScale) -> dict[str, float]:
        """A tenth of the change from reading to reading, and a hundredth of that for the slope."""
        level = 0.1 * scale.step_variance / scale.gap
        start = {"sigma2.level": level, "sigma2.trend": 0.01 * level / scale.gap**2}
        return {**start, "damping.trend": 1 / (_SLOW * scale.gap)} if self.damped else start

    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A with the slope above the diagonal and its decay on it, and a diagonal Q."""
        noises = torch.stack([parameters["sigma2.level"], parameters["sigma2.trend"]], dim=-1)
        diffusion = torch.diag_embed(noises)
        dynamics = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64).expand_as(diffusion)
        if self.damped:
            decay = torch.stack([torch.zeros_like(parameters["damping.trend"]), parameters["damping.trend"]], dim=-1)
            dynamics = dynamics - torch.diag_embed(decay)
        return dynamics, diffusion

    def units(self, gap: float) -> tuple[float, ...]:
        """Of the level, and of the slope: a unit of the level in the median gap."""
        return 1.0, 1.0 / gap


@dataclass(frozen=True)
class Season(Component):
    """A pattern that repeats, and changes slowly: one pair of states turns at each harmonic of the period.

    Its parameter is `sigma2.freq_seasonal_PERIOD(HARMONICS)`, the variance that each state gains in a unit of time. It
    is statsmodels' `freq_seasonal`.

    Args:
        period: of the pattern, in units of time. `fit` warns where it looks like a number of readings.
        harmonics: 1 is a sine wave; more give sharper patterns. At most half of the readings in a period.
        name: for `fixed`, and for the parameter: `sigma2.NAME`. Give one where a model has two seasons.

    Raises:
        ValueError: unless the period is positive and finite, and harmonics a whole number >= 1.
    """

    period: float | int
    harmonics: int = 1
    name: str = "season"

    def __post_init__(self):
        require(0 < self.period < math.inf, "period", self.period, "a positive number of units of time")
        whole = isinstance(self.harmonics, int) and not isinstance(self.harmonics, bool)
        require(whole and self.harmonics >= 1, "harmonics", self.harmonics, "a whole number >= 1")

    @property
    def _variance(self) -> str:
        label = f"freq_seasonal_{self.period!r}({self.harmonics!r})" if self.name == "season" else self.name
        return f"sigma2.{label}"

    @property
    def states(self) -> dict[str, float]:
        """Two for each harmonic. A reading shows the first."""
        pairs = ((f"{self.name}.{k}", f"{self.name}.{k}.auxiliary") for k in range(1, self.harmonics + 1))
        return {name: shown for pair in pairs for name, shown in zip(pair, (1.0, 0.0), strict=True)}

    @property
    def parameters(self) -> dict[str, ParameterKind]:
        """One variance for all harmonics."""
        return {self._variance: "variance"}

    def start(self, scale: SeriesScale) -> dict[str, float]:
        """A pattern that hardly changes."""
        return {self._variance: 0.01 * scale.step_variance / scale.gap}

    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A rotation for each harmonic, and the same noise for every state."""
        size = 2 * self.harmonics
        diffusion = parameters[self._variance][..., None, None] * torch.eye(size, dtype=torch.float64)
        dynamics = torch.zeros(size, size, dtype=torch.float64)
        for k in range(1, self.harmonics + 1):
            turn = 2 * math.pi * k / self.period
            dynamics[2 * k - 2, 2 * k - 1], dynamics[2 * k - 1, 2 * k - 2] = turn, -turn
        return dynamics.expand_as(diffusion), diffusion

    def shortest_span(self) -> float:
        """A period."""
        return float(self.period)


@dataclass(frozen=True)
class Cycle(Component):
    """A wave of unknown frequency that fades and starts again: a damped oscillator driven by noise.

    Its parameters are `sigma2.cycle`, `frequency.cycle` (radians per unit of time) and `damping.cycle`, the factor in
    (0, 1) by which the amplitude falls in a unit of time. The variance `sigma2.cycle` is gained over a unit of time,
    fading included: `Q = sigma2.cycle 2 mu / (1 - rho^2)`, `mu = -log rho`. So its stationary variance is
    `sigma2.cycle / (1 - rho^2)`. A damped cycle starts stationary; statsmodels starts it diffuse.

    Args:
        period: a guess of the period, where the search starts. By default a fifth of the series' span.
        damped: False: the amplitude does not fade by itself, there is no `damping.cycle`, and the start is diffuse.
        name: for `fixed`, and in the place of "cycle" in the names of the parameters.

    Raises:
        ValueError: for a period that is not positive and finite.
    """

    period: float | int | None = None
    damped: bool = True
    name: str = "cycle"

    def __post_init__(self):
        good = self.period is None or 0 < self.period < math.inf
        require(good, "period", self.period, "a positive number of units of time, or None")

    @property
    def stationary(self) -> tuple[int, ...]:  # type: ignore[override]
        """Both, where they are damped."""
        return (0, 1) if self.damped else ()

    @property
    def states(self) -> dict[str, float]:
        """Two. A reading shows the first."""
        return {self.name: 1.0, f"{self.name}.auxiliary": 0.0}

    @property
    def parameters(self) -> dict[str, ParameterKind]:
        """`sigma2.cycle`, `frequency.cycle` and, where it is damped, `damping.cycle`."""
        found: dict[str, ParameterKind] = {f"sigma2.{self.name}": "variance", f"frequency.{self.name}": "frequency"}
        return {**found, f"damping.{self.name}": "factor"} if self.damped else found

    def start(self, scale: SeriesScale) -> dict[str, float]:
        """A wave of the guessed period that fades within three periods."""
        period = self.period or max(scale.span / 5, 2 * scale.gap)
        diffusion, frequency = 0.1 * scale.step_variance / scale.gap, 2 * math.pi / period
        decay = 1 / (3 * period)
        if self.damped:
            diffusion *= unit_share(decay)
        start = {f"sigma2.{self.name}": diffusion, f"frequency.{self.name}": frequency, f"damping.{self.name}": decay}
        return {name: start[name] for name in self.parameters}

    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A turn that fades, and the same noise for both states."""
        frequency, variance = parameters[f"frequency.{self.name}"], parameters[f"sigma2.{self.name}"]
        decay, diffusion = torch.zeros_like(frequency), variance
        if self.damped:
            decay = parameters[f"damping.{self.name}"]
            diffusion = variance / unit_share(decay)
        rows = [torch.stack([-decay, frequency], dim=-1), torch.stack([-frequency, -decay], dim=-1)]
        return torch.stack(rows, dim=-2), diffusion[..., None, None] * torch.eye(2, dtype=torch.float64)


@dataclass(frozen=True)
class Autoregression(Component):
    """A deviation that fades: `dx = -mu x dt + dW`, an Ornstein-Uhlenbeck process, which starts stationary.

    Its parameters are `ar.L1`, the factor in (0, 1) that is left of it after a unit of time, and `sigma2.ar`, the
    variance that it gains over a unit of time. Its stationary variance is `sigma2.ar / (1 - ar.L1^2)`. In continuous
    time higher orders are sums: of two `Autoregression` for real roots, of a `Cycle` for complex ones.

    Args:
        name: for `fixed`. Other than "ar" it is also in the names of the parameters: `sigma2.NAME`, `NAME.L1`.
    """

    name: str = "ar"
    stationary = (0,)

    @property
    def states(self) -> dict[str, float]:
        """One, with the component's name."""
        return {self.name: 1.0}

    @property
    def parameters(self) -> dict[str, ParameterKind]:
        """`sigma2.ar` and `ar.L1`."""
        return {f"sigma2.{self.name}": "variance", f"{self.name}.L1": "factor"}

    def start(self, scale: SeriesScale) -> dict[str, float]:
        """It fades within ten readings, and gains a third of the change from reading to reading."""
        decay, diffusion = 1 / (_SLOW * scale.gap), 0.3 * scale.step_variance / scale.gap
        return {f"sigma2.{self.name}": diffusion * unit_share(decay), f"{self.name}.L1": decay}

    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A = -mu and Q."""
        decay = parameters[f"{self.name}.L1"]
        diffusion = parameters[f"sigma2.{self.name}"] / unit_share(decay)
        return -decay[..., None, None], diffusion[..., None, None]


def doubtful_period(period: float, steps: np.ndarray, unit: str) -> str | None:
    """What is wrong with a period that looks counted in something else than the unit of time of dates. None: nothing.

    It is no usual period, but would be one if it counted readings or a shorter unit: 24 readings an hour apart are a
    day. Or it is shorter than two readings. `steps` are > 0.
    """

    def usual(seconds: float) -> str | None:
        return next((name for name, size in _USUAL.items() if abs(seconds / size - 1) < _NEAR), None)

    gap, least, size = float(np.median(steps)), float(steps.min()), SECONDS[unit]
    seen = period >= 2 * least * (1 - _NEAR)
    if seen and usual(period * size):
        return None
    text = f"the unit of time is the {unit}, so a period of {period:g} is {period / gap:.4g} readings"
    shorter = {f"{name}s": seconds for name, seconds in SECONDS.items() if seconds < size}
    for counted, seconds in {"readings": gap * size, **shorter}.items():
        name = usual(period * seconds)
        if name and period * seconds >= 2 * gap * size * (1 - _NEAR):
            same = [f', or time_unit="{each}"' for each, x in SECONDS.items() if abs(seconds / x - 1) < 1e-6]
            mend = f"period={_USUAL[name] / size:.6g}{''.join(same)}"
            return f"{text}. If {period:g} {counted} are meant, that is one {name}, give {mend}"
    return None if seen else f"{text}, and two are the least that show a pattern. time_unit gives another unit"


def unit_share(decay: Any) -> Any:
    """`(1 - exp(-2 mu)) / (2 mu)`: the variance gained over a unit of time, over Q. A number or a tensor."""
    lost = -torch.expm1(-2 * decay) if isinstance(decay, Tensor) else -math.expm1(-2 * decay)
    return lost / (2 * decay)
