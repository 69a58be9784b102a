"""Components of a series, and their sum: a linear SDE with named states and named parameters.

    z(t) = sum_k c_k x_k(t) + e,    dx_k = A_k x_k dt + G_k dW_k,    G_k G_k^T = Q_k

Source: Harvey, Forecasting, Structural Time Series Models and the Kalman Filter (1989), chapter 9 (continuous time).
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


@dataclass(frozen=True)
class Regression(Component):
    """Coefficients that do not change, with a diffuse start. `RobustFilter.fit` adds it for `exog`."""

    regressors: tuple[str, ...]  # their names; the states are `beta.NAME`
    sizes: tuple[float, ...]  # the root mean square of each
    name: str = "regression"

    @property
    def states(self) -> dict[str, float]:
        """One for each regressor. How much of it a reading shows is the regressor itself."""
        return {f"beta.{name}": 0.0 for name in self.regressors}

    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A = 0 and Q = 0."""
        zeros = torch.zeros(len(self.regressors), len(self.regressors), dtype=torch.float64)
        return zeros, zeros

    def units(self, gap: float) -> tuple[float, ...]:
        """The inverse sizes of the regressors."""
        return tuple(1 / size for size in self.sizes)


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
