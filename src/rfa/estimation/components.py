"""Components of a series, and their sum: a linear SDE with named states and named parameters.

    z(t) = sum_k c_k x_k(t) + e,    dx_k = A_k x_k dt + G_k dW_k,    G_k G_k^T = Q_k

    level           dx = dW,  Var dW = sigma2.level dt
    trend           d level = trend dt + dW_1,  d trend = -mu trend dt + dW_2
    cycle, season   d(x, y) = (-mu I + w J)(x, y) dt + dW,    J a turn by 90 degrees
    autoregression  dx = -mu x dt + dW

Parameters have statsmodels' names where they mean the same. At readings one unit of time apart, `Level`, `Season`,
`Cycle` and `Autoregression` are statsmodels' components exactly. In `Trend` the noise of the slope moves the level
within the unit too: the level gains the variance `sigma2.trend / 3` and the covariance `sigma2.trend / 2` with the
slope, where statsmodels has 0.

Source: Harvey, Forecasting, Structural Time Series Models and the Kalman Filter (1989), chapter 9 (continuous time);
statsmodels' `UnobservedComponents` for the names.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import require

from .linear_sde import LinearSDE

_SLOW = 10.0  # median gaps in which a process forgets, where a search starts
_KEPT = 1e-7  # relative: an error of a decay rate that changes no result

ParameterKind = Literal["variance", "frequency", "factor"]
ParameterValues = Mapping[str, Float[Tensor, "*#models"]]
ComponentMatrices = tuple[Float[Tensor, "*#models n n"], Float[Tensor, "*#models n n"]]  # A and Q


class SeriesScale(NamedTuple):
    """The scale of a series, by medians, so that a minority of outliers changes little.

    Args:
        median: of the readings.
        variance: of the readings.
        step_variance: of the change from one reading to the next.
        widest: variance by the range of nine tenths of the readings, or by all where the filter is not robust. It is
            larger where most readings are alike, such as solar power at night.
        gap: median time between readings.
        span: time from the first reading to the last one.
    """

    median: float
    variance: float
    step_variance: float
    widest: float
    gap: float
    span: float


class Component(ABC):
    """A part of a series. `+` joins it to others.

    A component has a name, and names for its states and parameters. Parameters have kinds: a "variance" >= 0, a
    "frequency" > 0 in radians per unit of time, a "factor" f in (0, 1) per unit of time.

    `start` and `matrices` have the decay rate `mu = -log f > 0` in the place of a factor: f itself may be too close to
    0 or 1 for a float, where the unit of time is far from the time between readings.
    """

    name: str
    stationary: tuple[int, ...] = ()  # places of states that start so; nothing is known of the others before a reading

    @property
    @abstractmethod
    def states(self) -> dict[str, float]:
        """The states by name, and how much of each a reading shows: a row of C."""

    @property
    def parameters(self) -> dict[str, ParameterKind]:
        """The parameters by name. By default none."""
        return {}

    def start(self, scale: SeriesScale) -> dict[str, float]:
        """Where a search for the parameters starts."""
        return {}

    @abstractmethod
    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A and Q."""

    def units(self, gap: float) -> tuple[float, ...]:
        """The size of one unit of each diffuse state, given the median gap. Results do not depend on it."""
        return (1.0,) * len(self.states)

    def shortest_span(self) -> float:
        """The shortest span of a series that can show the component, in units of time."""
        return 0.0

    def __add__(self, other: "Component | StructuralModel") -> "StructuralModel":
        return StructuralModel.of(self) + other


class StructuralModel:
    """A sum of components.

    Args:
        components: each with a name of its own.

    Raises:
        ValueError: for a name that occurs twice, and for two components that have a level.
    """

    def __init__(self, *components: Component):
        self.components = components
        names = [component.name for component in components]
        for each in names:
            require(names.count(each) == 1, "model", f"two components with the name {each!r}", "name=... for one")
        states = [state for component in components for state in component.states]
        for state in states:
            require(states.count(state) == 1, "model", f"two components with a state {state!r}", "one of them")

    @classmethod
    def of(cls, model: "Component | StructuralModel") -> "StructuralModel":
        """A model of one component, or the model itself."""
        if isinstance(model, Component):
            return cls(model)
        require(isinstance(model, StructuralModel), "model", model, "components joined by +, such as Level() + Cycle()")
        return model

    def __add__(self, other: "Component | StructuralModel") -> "StructuralModel":
        if not isinstance(other, Component | StructuralModel):
            return NotImplemented
        return StructuralModel(*self.components, *StructuralModel.of(other).components)

    @property
    def states(self) -> dict[str, float]:
        """The states by name, and how much of each a reading shows: C."""
        return {name: row for component in self.components for name, row in component.states.items()}

    @property
    def parameters(self) -> dict[str, ParameterKind]:
        """The parameters by name, without the noise of the readings."""
        return {name: kind for component in self.components for name, kind in component.parameters.items()}

    def start(self, scale: SeriesScale) -> dict[str, float]:
        """Where a search for the parameters starts."""
        return {name: value for component in self.components for name, value in component.start(scale).items()}

    def to_sde(
        self,
        parameters: Mapping[str, float | int | Float[Tensor, "*models"]],
        observation_noise: float | int | Float[Tensor, "*models"] = 1.0,
    ) -> LinearSDE:
        """The linear SDE of given parameters. Its states have the order of `states`.

        Args:
            parameters: a value for each parameter, `()` or `(models,)`. `NAME.rate` is the decay rate of a factor.
            observation_noise: R, a variance.

        Raises:
            ValueError: for a parameter without a value.
        """
        values = to_rates(self.parameters, parameters)
        missing = [name for name in self.parameters if name not in values]
        require(not missing, "parameters", sorted(parameters), f"values for {', '.join(missing)} too")
        return self.sde_of_rates(values, observation_noise)

    def sde_of_rates(
        self,
        parameters: Mapping[str, float | int | Float[Tensor, "*models"]],
        observation_noise: float | int | Float[Tensor, "*models"] = 1.0,
    ) -> LinearSDE:
        """As `to_sde`, with decay rates in the place of factors."""
        values = {name: torch.as_tensor(parameters[name], dtype=torch.float64) for name in self.parameters}
        noise = torch.as_tensor(observation_noise, dtype=torch.float64)
        shape = torch.broadcast_shapes(noise.shape, *(value.shape for value in values.values()))
        values = {name: value.expand(shape) for name, value in values.items()}
        blocks = [component.matrices(values) for component in self.components]
        dynamics, diffusion = (block_diagonal(parts, shape) for parts in zip(*blocks, strict=True))
        row = torch.tensor([list(self.states.values())], dtype=torch.float64)
        return LinearSDE(dynamics, diffusion, row, noise.expand(shape)[..., None, None])

    def initial(self, sde: LinearSDE, gap: float) -> tuple[Float[Tensor, "*models n n"], Float[Tensor, " n"]]:
        """What is known before the first reading.

        Args:
            sde: of this model.
            gap: the median time between readings.

        Returns:
            The covariance of stationary states, 0 elsewhere; the unit of each diffuse state, 0 elsewhere.
        """
        blocks, units = list[Tensor](), list[float]()
        for component in self.components:
            own = slice(len(units), len(units) + len(component.states))
            block, known = torch.zeros_like(sde.dynamics[..., own, own]), list(component.stationary)
            if known:
                dynamics, diffusion = (
                    x[..., own, own][..., known, :][..., known] for x in (sde.dynamics, sde.diffusion)
                )
                alone = LinearSDE(dynamics, diffusion, torch.zeros_like(dynamics), torch.zeros_like(dynamics))
                block[..., torch.tensor(known)[:, None], known] = alone.stationary_covariance()
            blocks.append(block)
            units += [0.0 if place in known else unit for place, unit in enumerate(component.units(gap))]
        return block_diagonal(blocks, sde.batch_shape), torch.tensor(units, dtype=torch.float64)


def to_rates(kinds: Mapping[str, ParameterKind], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with the decay rate `-log f` in the place of each factor f, or as `NAME.rate`. Numbers or tensors."""
    rates = {f"{name}.rate": name for name, kind in kinds.items() if kind == "factor"}
    return {
        rates.get(name, name): -torch.as_tensor(value, dtype=torch.float64).log()
        if kinds.get(name) == "factor"
        else value
        for name, value in parameters.items()
    }


def to_factors(kinds: Mapping[str, ParameterKind], values: Mapping[str, float]) -> dict[str, float]:
    """The reverse of `to_rates`, as a caller names parameters: the factor `exp(-mu)` of each decay rate.

    A factor so near to 0 or 1 that it does not give back the rate stays a rate, `NAME.rate`.
    """
    return dict(as_factor(name, x) if kinds.get(name) == "factor" else (name, x) for name, x in values.items())


def as_factor(name: str, rate: float) -> tuple[str, float]:
    """The name and the value by which a caller knows a decay rate."""
    factor = math.exp(-rate)
    kept = 0.0 < factor < 1.0 and abs(math.log(factor) / rate + 1) < _KEPT
    return (name, factor) if kept else (f"{name}.rate", rate)


def block_diagonal(blocks: tuple[Tensor, ...] | list[Tensor], shape: torch.Size) -> Float[Tensor, "*models n n"]:
    """Square blocks, broadcast to the batch dimensions `shape`, along a diagonal."""
    size, place = sum(block.shape[-1] for block in blocks), 0
    joined = torch.zeros(*shape, size, size, dtype=torch.float64)
    for block in blocks:
        own = slice(place, place + block.shape[-1])
        joined[..., own, own] = block
        place = own.stop
    return joined


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
        name: for `fixed`, and in the place of "cycle" in the names of the parameters.

    Raises:
        ValueError: for a period that is not positive and finite.
    """

    period: float | int | None = None
    name: str = "cycle"
    stationary = (0, 1)

    def __post_init__(self):
        good = self.period is None or 0 < self.period < math.inf
        require(good, "period", self.period, "a positive number of units of time, or None")

    @property
    def states(self) -> dict[str, float]:
        """Two. A reading shows the first."""
        return {self.name: 1.0, f"{self.name}.auxiliary": 0.0}

    @property
    def parameters(self) -> dict[str, ParameterKind]:
        """`sigma2.cycle`, `frequency.cycle` and `damping.cycle`."""
        kinds: dict[str, ParameterKind] = {"sigma2": "variance", "frequency": "frequency", "damping": "factor"}
        return {f"{name}.{self.name}": kind for name, kind in kinds.items()}

    def start(self, scale: SeriesScale) -> dict[str, float]:
        """A wave of the guessed period that fades within three periods."""
        period = self.period or max(scale.span / 5, 2 * scale.gap)
        decay = 1 / (3 * period)
        variance = 0.1 * scale.step_variance / scale.gap * unit_share(decay)
        return dict(zip(self.parameters, (variance, 2 * math.pi / period, decay), strict=True))

    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A turn that fades, and the same noise for both states."""
        variance, frequency, decay = (parameters[name] for name in self.parameters)
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


def unit_share(decay: Any) -> Any:
    """`(1 - exp(-2 mu)) / (2 mu)`: the variance gained over a unit of time, over Q. A number or a tensor."""
    lost = -torch.expm1(-2 * decay) if isinstance(decay, Tensor) else -math.expm1(-2 * decay)
    return lost / (2 * decay)
