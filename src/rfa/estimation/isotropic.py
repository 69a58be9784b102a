"""Isotropic SDEs, whose states all decay alike and turn in pairs, and the co-rotating frame, where they only decay.

    A = -mu I + S,  Q = sigma^2 I,  C = c I,  R = eta^2 I,    S turns pairs of states
    y(t) = exp(-S t) x(t):    dy = -mu y dt + sigma dW

Source: equation `isotropic_covariance` of the paper for the family.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rfa.dynamics import accumulated_variance

from .grid import ObservationGrid
from .linear_sde import LinearSDE
from .matrices import flattened, identity_like
from .problem import LARGEST_VARIANCE, EstimationProblem, along_grid
from .robust_weight import LOWEST_LOG_WEIGHT

_TOLERANCE = 1e-9  # relative: rounding in a model that was fitted or transformed


class IsotropicModel(NamedTuple):
    """`A = -mu I + S`, `Q = sigma^2 I`, `C = c I`, `R = eta^2 I`, one of each for b series.

    Args:
        decay: mu, `(b, 1)`.
        frequency: |omega| of each state, `(b, n)`. It is 0 for a state without a partner.
        signs: of S, `(b, n, n)`: `exp(S t) = cos(omega t) + sin(omega t) signs`.
        process_noise: sigma^2 of one state, `(b, 1)`.
        observation: c, `(b, 1)`.
        observation_noise: eta^2 of one component, `(b, 1)`.
    """

    decay: Float[Tensor, "b 1"]
    frequency: Float[Tensor, "b n"]
    signs: Float[Tensor, "b n n"]
    process_noise: Float[Tensor, "b 1"]
    observation: Float[Tensor, "b 1"]
    observation_noise: Float[Tensor, "b 1"]

    @classmethod
    def of(cls, sde: LinearSDE, batch_shape: torch.Size) -> "IsotropicModel":
        """Of a model, for series of a batch shape. Gradients are those within the isotropic family.

        Raises:
            ValueError: naming the matrix that is not isotropic.
        """
        diagonal = sde.dynamics * identity_like(sde.dynamics)
        decay, turning = -mean_diagonal(sde.dynamics), sde.dynamics - diagonal
        tolerance = _TOLERANCE * sde.dynamics.detach().abs().amax((-2, -1), keepdim=True)
        turns = turning.detach().abs() > tolerance
        antisymmetric = bool((turning + turning.mT).detach().abs().le(tolerance).all())
        pairs = antisymmetric and bool((turns.sum(-1) <= 1).all())
        for holds, given in (
            (pairs, "states that do more to each other than turn in pairs"),
            (is_scalar(diagonal), "states that decay each in its own way"),
            (bool((decay >= 0).all()), "states that grow"),
        ):
            if not holds:
                raise ValueError(
                    f"dynamics: got {given}, expected with backend='fused' -mu I with mu >= 0 and rotations of pairs "
                    "of states, [[0, -omega], [omega, 0]]"
                )
        for name in ("diffusion", "observation", "observation_noise"):
            matrix = getattr(sde, name)
            if matrix.shape[-2] != matrix.shape[-1] or not is_scalar(matrix):
                raise ValueError(
                    f"{name}: got a matrix that is not a multiple of the identity, expected one with backend='fused'"
                )
        if bool((mean_diagonal(sde.observation) == 0).any()):
            raise ValueError("observation: got zero, expected with backend='fused' a multiple of the identity")
        signs = torch.where(turns, turning.detach().sign(), 0.0)
        numbers = [decay, *map(mean_diagonal, (sde.diffusion, sde.observation, sde.observation_noise))]
        decay, diffusion, observation, noise = (flattened(x[..., None], batch_shape, 1) for x in numbers)
        frequency = flattened((turning * signs).sum(-1), batch_shape, 1)
        return cls(decay, frequency, flattened(signs, batch_shape, 2), diffusion, observation, noise)

    def rotated(
        self, states: Float[Tensor, "b length n"], elapsed: Float[Tensor, "b length"], inverse: bool = False
    ) -> Float[Tensor, "b length n"]:
        """`exp(S t) x` out of the co-rotating frame, or `exp(-S t) x` into it (`inverse`)."""
        phase = self.frequency[:, None, :] * elapsed[..., None]
        turn = phase.sin() * (states @ self.signs.mT)
        return phase.cos() * states + (-turn if inverse else turn)


@dataclass(frozen=True)
class CorotatingSeries:
    """b series in the co-rotating frame, in units of eta, relative to a reference trajectory of the process.

    Args:
        model: as given.
        grid: the times and observations as given.
        elapsed: since the first grid time, `(b, G)`.
        cumulative_decay: `mu t`, `(b, G)`.
        variance: u, the variance of the process since the first grid time, `(b, G)`.
        process_noise: sigma^2, `(b, 1)`.
        reference: the trajectory that is subtracted, `(b, G, n)`.
        observations: z, `(b, G, n)`, zero where nothing is observed.
        initial: mean `(b, n)` and variance `(b,)` of the first state, or None.
        unit: eta, `(b, 1)`.
        observation_index: the time index of each observation, `(b, T)`.
    """

    model: IsotropicModel
    grid: ObservationGrid
    elapsed: Float[Tensor, "b grid"]
    cumulative_decay: Float[Tensor, "b grid"]
    variance: Float[Tensor, "b grid"]
    process_noise: Float[Tensor, "b 1"]
    reference: Float[Tensor, "b grid n"]
    observations: Float[Tensor, "b grid n"]
    initial: tuple[Tensor, Tensor] | None
    unit: Float[Tensor, "b 1"]
    observation_index: Int[Tensor, "b T"]

    @classmethod
    def of(cls, problem: EstimationProblem) -> "CorotatingSeries":
        """Of a problem.

        Raises:
            ValueError: for a model or an initial covariance that is not isotropic, or a row with some components
                missing.
        """
        grid = problem.grid
        model = IsotropicModel.of(problem.sde, grid.batch_shape)
        observed = grid.rows.diagonal(dim1=-2, dim2=-1) != 0
        if bool((observed.any(-1) & ~observed.all(-1)).any()):
            raise ValueError(
                "observations: got a row with some components missing, expected with backend='fused' whole rows, or "
                "NaN in all of one"
            )
        elapsed = grid.times - grid.times[:, :1]
        variance = model.observation_noise / model.observation.square()
        unit = torch.where(variance > 0, variance, 1.0).sqrt()
        cumulative_decay, process_noise = model.decay * elapsed, model.process_noise / unit.square()
        scaled = grid.observations / (model.observation * unit)[..., None]
        observations = model.rotated(scaled, elapsed, inverse=True)
        reference = torch.exp(-cumulative_decay)[..., None] * _median(
            observations, grid.present & (cumulative_decay < 1)
        )
        initial = None
        if problem.initial is not None:
            mean, covariance = problem.initial
            if not is_scalar(covariance):
                raise ValueError(
                    "initial: got a covariance that is not a multiple of the identity, expected one with "
                    "backend='fused'"
                )
            initial = mean / unit - reference[:, 0], mean_diagonal(covariance) / unit[:, 0].square()
        indices = (grid.observation_index < 0).int().argsort(dim=-1, stable=True)[:, : grid.observation_count]
        observations = torch.where(grid.present[..., None], observations - reference, 0.0)
        accumulated = process_noise * accumulated_variance(model.decay, elapsed)
        return cls(
            model,
            grid,
            elapsed,
            cumulative_decay,
            accumulated,
            process_noise,
            reference,
            observations,
            initial,
            unit,
            indices,
        )

    @property
    def stationary_variance(self) -> Float[Tensor, "b 1"]:
        """`sigma^2 / (2 mu)`, infinite without decay."""
        decays = self.model.decay > 0
        stationary = self.process_noise / (2 * torch.where(decays, self.model.decay, 1.0))
        return torch.where(decays, stationary, torch.inf)

    @property
    def smallest_variance(self) -> float:
        """A lower bound of Sigma for all pairs: Sigma lies between 1 and the stationary variance."""
        return min(1.0, self.stationary_variance.min().item())

    @property
    def starts_stationary(self) -> bool:
        """Whether an unknown state has the stationary distribution: all series have one, and no initial state."""
        return self.initial is None and bool((self.model.decay > 0).all())

    def at_queries(self, x: Float[Tensor, "b grid ..."] | Bool[Tensor, "b grid"]) -> Tensor:
        """`x` at the queries, `(b, queries, ...)`."""
        return along_grid(x, self.grid.query_index)

    def at_observations(self, x: Float[Tensor, "b grid ..."] | Bool[Tensor, "b grid"]) -> Tensor:
        """`x` at the observations, `(b, T, ...)`."""
        return along_grid(x, self.observation_index)

    def first_estimate(
        self,
        prediction: Float[Tensor, "b queries n"],
        precision: Float[Tensor, "b queries"],
        leave_one_out: bool,
    ) -> Float[Tensor, "b queries n"]:
        """Where the first weights are taken.

        Args:
            prediction: the Gaussian estimate without the observation at the query's time.
            precision: of the prediction, in units of an observation's. 0 where there is no prediction.
            leave_one_out: whether the prediction is taken at observations too, where it is certain enough.
        """
        present, observed = self.at_queries(self.grid.present)[..., None], self.at_queries(self.observations)
        if not leave_one_out:
            return torch.where(present, observed, prediction)
        ratio = precision[..., None]
        both = (ratio * prediction + observed) / (ratio + 1)
        first = torch.where(ratio * LARGEST_VARIANCE >= 1, prediction, both)
        if self.starts_stationary:
            no_prediction = (ratio == 0) & (self.stationary_variance <= LARGEST_VARIANCE)[..., None]
            first = torch.where(no_prediction, -self.at_queries(self.reference), first)
        return torch.where(present, first, prediction)

    def restored(
        self,
        mean: Float[Tensor, "b queries n"],
        log_total: Float[Tensor, "b queries"],
        scale: Float[Tensor, "b queries"],
    ) -> tuple[Tensor, Tensor]:
        """Mean `(b, queries, n)` and covariance `(b, queries, n, n)` in the units and the frame of the observations.

        Args:
            mean: in this frame.
            log_total: log of the summed weights, -inf where nothing is observed.
            scale: the precision that a weight of 1 stands for.
        """
        observed = log_total > -torch.inf
        mean = (mean + self.at_queries(self.reference)).masked_fill(~observed[..., None], 0.0)
        mean = self.model.rotated(mean * self.unit[..., None], self.at_queries(self.elapsed))
        stationary = self.stationary_variance
        stationary = stationary if self.starts_stationary else torch.full_like(stationary, torch.inf)
        total = torch.where(observed, log_total, 0.0).clamp(min=LOWEST_LOG_WEIGHT).exp()
        precision = total * torch.where(observed, scale, 1.0)
        variance = torch.where(observed, 1 / precision, stationary) * self.unit.square()
        identity = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device)
        return mean, torch.where(identity, variance[..., None, None], 0.0)


def mean_diagonal(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Of `a I`, a."""
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)


def is_scalar(matrix: Float[Tensor, "*batch n n"]) -> bool:
    """Whether a matrix is a multiple of the identity."""
    matrix = matrix.detach()
    difference = matrix - mean_diagonal(matrix)[..., None, None] * identity_like(matrix)
    return bool((difference.abs().amax((-2, -1)) <= _TOLERANCE * matrix.abs().amax((-2, -1))).all())


@torch.no_grad()
def _median(observations: Tensor, counted: Tensor) -> Float[Tensor, "b 1 n"]:
    """The median of the counted observations, 0 where there are none. An outlier must not cost the others' digits."""
    ordered = torch.where(counted[..., None], observations, torch.inf).sort(dim=1).values
    middle = ((counted.sum(1) - 1) // 2).clamp(min=0)
    return along_grid(ordered, middle[:, None]).nan_to_num(posinf=0.0)
