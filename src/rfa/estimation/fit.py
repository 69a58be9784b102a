"""Maximum likelihood: the search, and noise and decay of a linear SDE by it, from robust one-step predictions."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Real
from torch import Tensor

from .likelihood import density_function
from .linear_sde import LinearSDE
from .matrices import InitialMoments, real, symmetric
from .robust_weight import RobustWeight

FREE = ("decay", "diffusion", "observation_noise")
WEIGHT = ("nu", "kappa")  # parameters of the robust weight, which may be free too
_LARGEST_CHANGE = math.log(1e24)  # of a parameter's logarithm. Beyond it, the likelihood has no maximum.
_STEP = 1e-4  # of a parameter's logarithm: differences lose half of the digits
_FLAT = 1e-4  # curvature in nats, by a parameter's logarithm. Less is rounding.


class Maximum(NamedTuple):
    """The best point that a search has seen."""

    total: float  # the likelihood
    at: Tensor
    slope: Tensor  # along each coordinate
    finished: bool  # False: the search left its range, or went where the likelihood cannot be computed


class _SearchTooFar(Exception):
    """A coordinate has left the range of the search."""


def maximise(
    likelihood: Callable[[Tensor], tuple[Tensor, Tensor]],
    origin: Tensor,
    max_steps: int,
    *,
    largest_change: float,
    tolerance_grad: float,
    tolerance_change: float = 1e-9,
) -> Maximum:
    """L-BFGS from `origin`, with the value and the slope that `likelihood` gives for coordinates."""
    coordinates = origin.clone().requires_grad_()
    seen: list[tuple[float, Tensor, Tensor]] = []
    tolerances: dict[str, Any] = {"tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change}
    search = torch.optim.LBFGS([coordinates], max_iter=max_steps, line_search_fn="strong_wolfe", **tolerances)

    def evaluate() -> Tensor:
        at = coordinates.detach().clone()
        if not bool((at - origin).abs().max() < largest_change):
            raise _SearchTooFar
        total, slope = likelihood(at)
        coordinates.grad = -slope
        seen[:] = [max([*seen, (total.item(), at, slope)], key=lambda one: one[0])]
        return -total

    evaluate()  # an error here is the caller's; a later one is the search's, which has gone too far
    finished = True
    try:
        search.step(evaluate)  # type: ignore[no-untyped-call]
    except (_SearchTooFar, ValueError, torch.linalg.LinAlgError):
        finished = False
    return Maximum(*seen[0], finished)


@dataclass(frozen=True)
class Fit:
    """What `fit` finds.

    Args:
        sde: the model at the maximum.
        log_likelihood: of all one-step predictions, in nats. Rows that a diffuse start cannot predict do not count.
        parameters: by name. Brackets hold the states that share one: `diffusion[0,1]` is the diagonal of Q there.
        standard_errors: of the parameters, from the curvature at the maximum. Never NaN, infinite where it is flat.
        converged: whether the slope along every parameter's logarithm is below 1e-3 nats. It is False also where
            a parameter has changed by a factor of 1e24, where the likelihood cannot be computed, and where no row can
            be predicted. The model is then the best one of the search.
        nu, kappa: of the robust weight, as given, or as found where they were free.
    """

    sde: LinearSDE
    log_likelihood: float
    parameters: dict[str, float]
    standard_errors: dict[str, float]
    converged: bool
    nu: float
    kappa: float | None


def fit(
    sde: LinearSDE,
    times: Real[Tensor, "*#batch T"],
    observations: Real[Tensor, "*#batch T m"],
    *,
    free: Collection[str] = FREE,
    nu: float = torch.inf,
    kappa: float | None = 2.0,
    iterations: int = 5,
    initial: InitialMoments | None = None,
    max_steps: int = 200,
) -> Fit:
    """Maximise `log_likelihood` by L-BFGS over the logarithms of the free parameters.

    Parameters are the positive entries of the diagonals of -A ("decay"), Q ("diffusion") and R ("observation_noise").
    The given model defines the structure: entries that start equal stay equal, zeros stay zero, and correlations within
    Q and R stay. The "nu" and "kappa" of the robust weight may be free too, from a finite start. With R free beside
    them, the fit separates a wrong R from outliers. With `nu = inf` one step over 10,000 readings takes some
    milliseconds where there is a C++ compiler: filter and gradient are compiled.

    Args:
        sde: where to start. A, Q, R have no batch dimensions: several series share one model.
        times, observations, nu, kappa, iterations, initial: as `log_likelihood`.
        free: some of "decay", "diffusion", "observation_noise", "nu", "kappa", or one of them.
        max_steps: of L-BFGS.

    Raises:
        ValueError: for nothing to fit, nothing observed, a model with batch dimensions, or as `robust_estimate`.
    """
    free = (free,) if isinstance(free, str) else free
    unknown = set(free) - {*FREE, *WEIGHT}
    if unknown or not free:
        raise ValueError(f"free: got {sorted(unknown) or 'nothing'}, expected some of {', '.join((*FREE, *WEIGHT))}")
    robust_weight = RobustWeight.of(nu, kappa, sde.observation_size)
    weight: dict[str, Any] = {"nu": robust_weight.nu, "kappa": robust_weight.kappa}
    tuned = [name for name in WEIGHT if name in free]
    for name in tuned:
        if weight[name] is None or robust_weight.gaussian:
            raise ValueError(f"{name}: got {weight[name]} with nu = {nu}, expected finite numbers to start from")
    if sde.batch_shape:
        raise ValueError(f"sde: got batch dimensions {tuple(sde.batch_shape)}, expected one model for all series")
    if bool(real("observations", observations).isnan().all()):
        raise ValueError("observations: got nothing but missing values, expected some observations")
    names, start, build = _parameters(sde, free)
    matrices, names = len(names), names + tuned
    start = torch.cat([start, torch.tensor([float(weight[name]) for name in tuned], dtype=torch.float64)])
    if not names:
        raise ValueError(f"free: got {', '.join(free)}, expected positive entries there to start from")

    densities = density_function(sde, times, observations, robust_weight, iterations, initial)

    def likelihood(logs: Tensor) -> tuple[Tensor, Tensor]:
        logs = logs.detach().requires_grad_()
        values = logs.exp()
        chosen = weight | dict(zip(tuned, values[matrices:], strict=True))
        density, counts = densities(build(values[:matrices]), chosen["nu"], chosen["kappa"])
        total = torch.where(counts, density, 0.0).sum()
        return total.detach(), torch.autograd.grad(total, logs)[0]

    _, counts = densities(sde, nu, kappa)
    best = maximise(likelihood, start.log(), max_steps, largest_change=_LARGEST_CHANGE, tolerance_grad=1e-6)
    converged = best.finished and bool(counts.any()) and bool(best.slope.abs().max() < 1e-3)
    values = best.at.exp()
    # the curvature by central differences of exact slopes: second derivatives would take ten times as long
    steps = torch.diag(torch.full_like(values, _STEP))
    rows = [(likelihood(best.at - step)[1] - likelihood(best.at + step)[1]) / (2 * _STEP) for step in steps]
    errors = values * _standard_errors(symmetric(torch.stack(rows)))
    parameters, errors_by_name = (dict(zip(names, x.tolist(), strict=True)) for x in (values, errors))
    found_nu, found_kappa = parameters.get("nu", nu), parameters.get("kappa", kappa)
    return Fit(build(values[:matrices]), best.total, parameters, errors_by_name, converged, found_nu, found_kappa)


def _parameters(sde: LinearSDE, free: Collection[str]) -> tuple[list[str], Tensor, Callable[[Tensor], LinearSDE]]:
    """Names and values of the free parameters, and a function that makes the model of other values."""
    diagonals = {
        "decay": -sde.dynamics.detach().diagonal(),
        "diffusion": sde.diffusion.detach().diagonal(),
        "observation_noise": sde.observation_noise.detach().diagonal(),
    }
    names, start, positions = [], [], []
    for kind in FREE:
        if kind not in free:
            continue
        diagonal = diagonals[kind]
        for value in dict.fromkeys(diagonal[diagonal > 0].tolist()):
            tied = [index for index, entry in enumerate(diagonal.tolist()) if entry == value]
            names.append(f"{kind}[{','.join(map(str, tied))}]")
            start.append(value)
            positions.append((kind, tied))

    def build(values: Tensor) -> LinearSDE:
        ratios = {kind: list(torch.ones_like(diagonal)) for kind, diagonal in diagonals.items()}
        for value, first, (kind, tied) in zip(values, start, positions, strict=True):
            for index in tied:
                ratios[kind][index] = value / first
        decay, *scales = (torch.stack(ratios[kind]) for kind in FREE)
        diffusion, noise = (scale.sqrt()[:, None] * scale.sqrt() for scale in scales)
        return LinearSDE(
            sde.dynamics.detach() + torch.diag(diagonals["decay"] * (1 - decay)),
            sde.diffusion.detach() * diffusion,
            sde.observation.detach(),
            sde.observation_noise.detach() * noise,
        )

    return names, torch.tensor(start, dtype=torch.float64), build


def _standard_errors(curvature: Tensor) -> Tensor:
    """Square roots of the diagonal of the inverse curvature. Infinite where the likelihood is flat or not at a maximum.

    A parameter that is flat by itself, such as a noise of zero, does not change the others.
    """
    found = torch.full_like(curvature[0], torch.inf)
    size, shared = curvature.diagonal().abs(), (curvature - curvature.diagonal().diag()).abs()
    curved = ~(size <= _FLAT) | (shared.square() > 1e-4 * _FLAT * size.clamp(min=_FLAT)).any(-1)
    curvature = curvature[curved][:, curved]
    scale = curvature.diagonal().sqrt()
    relative = curvature / scale / scale[:, None]
    if not bool(relative.isfinite().all()):  # by overflow
        return found
    eigenvalues, basis = torch.linalg.eigh(relative)
    if bool((eigenvalues > 1e-12).all()):
        found[curved] = (basis.square() / eigenvalues).sum(-1).sqrt() / scale
    return found
