"""Noise and decay of a linear SDE by maximum likelihood of robust one-step predictions.

log p(z_1 ... z_T) = sum_i log p(z_i | estimate from z_1 ... z_i-1),    each p Gaussian or Student-t
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Real
from torch import Tensor

from .linear_sde import LinearSDE
from .matrices import InitialMoments, check_initial, flattened, real, symmetric, without_missing
from .robust import robust_estimate
from .robust_weight import Number, RobustWeight

FREE = ("decay", "diffusion", "observation_noise")
WEIGHT = ("nu", "kappa")  # parameters of the robust weight, which may be free too
_LARGEST_CHANGE = math.log(1e24)  # of a parameter's logarithm. Beyond it, the likelihood has no maximum.
_STEP = 1e-4  # of a parameter's logarithm: differences lose half of the digits
_FLAT = 1e-4  # curvature in nats, by a parameter's logarithm. Less is rounding.


class _OutOfRange(Exception):
    """A parameter has left the range of the search."""


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


def log_likelihood(
    sde: LinearSDE,
    times: Real[Tensor, "*#batch T"],
    observations: Real[Tensor, "*#batch T m"],
    *,
    nu: Number = torch.inf,
    kappa: Number | None = 2.0,
    iterations: int = 5,
    initial: InitialMoments | None = None,
) -> Float[Tensor, "*series"]:
    """`sum_i log p(z_i | robust estimate from earlier rows)` of each series, in nats.

    The prediction has mean `C Phi xbar_{i-1}` and scale `S = C (Phi P Phi^T + V) C^T + R`. The density is Gaussian for
    `nu = inf`, else Student-t with nu degrees of freedom. With `nu = inf` it is the Kalman filter's likelihood.

    Args: as `robust_estimate`, with its Riccati prior and recursive start.

    Returns:
        `(...)`, differentiable. Under a diffuse start, rows without a prediction do not count. With `initial` the first
        row counts, predicted from there.

    Raises:
        ValueError: as `robust_estimate`, and where the noise of an observation is below the rounding of its
            prediction's variance.
    """
    density, counts = _densities(sde, times, observations, nu, kappa, iterations, initial)
    return torch.where(counts, density, 0.0).sum(-1)


def _densities(
    sde: LinearSDE,
    times: Tensor,
    observations: Tensor,
    nu: Number,
    kappa: Number | None,
    iterations: int,
    initial: InitialMoments | None,
) -> tuple[Tensor, Tensor]:
    """`log p` of each row given the earlier ones, `(..., T)`, and which count. The first needs `initial`."""
    robust_weight = RobustWeight.of(nu, kappa, sde.observation_size)
    estimate = robust_estimate(
        sde,
        times,
        observations,
        nu=nu,
        kappa=kappa,
        iterations=1 if robust_weight.gaussian else iterations,
        initial=initial,
        return_weights=False,
    )
    shape = estimate.mean.shape[:-2]
    times = flattened(times.to(torch.float64), shape, 1)
    lags = times.diff(dim=-1).reshape(*shape, -1)
    transition, variance = sde.transition(lags), sde.covariance(lags)
    known = estimate.covariance[..., :-1, :, :].isfinite().all(-1).all(-1)
    before = torch.where(known[..., None, None], estimate.covariance[..., :-1, :, :], 0.0)
    mean = (transition @ estimate.mean[..., :-1, :, None])[..., 0]
    spread = symmetric(transition @ before @ transition.mT) + variance
    values = observations.to(torch.float64)
    if initial is None:
        values = values[..., 1:, :]
    else:
        n = sde.state_size
        first, covariance = check_initial(n, initial)
        mean = torch.cat([first[..., None, :].expand(*shape, 1, n), mean], dim=-2)
        spread = torch.cat([covariance[..., None, :, :].expand(*shape, 1, n, n), spread], dim=-3)
        known = torch.cat([known.new_ones(*shape, 1), known], dim=-1)
    present = ~values.isnan()
    rows, noise = without_missing(sde.observation[..., None, :, :], sde.observation_noise[..., None, :, :], present)
    values = values.masked_fill(~present, 0.0)
    factor, failed = torch.linalg.cholesky_ex(symmetric(rows @ spread @ rows.mT) + noise)
    if bool((failed > 0).any()):
        raise ValueError(
            f"{'observation_noise' if initial is None else 'initial'}: got a variance of the prediction of up to "
            f"{spread.detach().amax().item():.3g}, expected less: "
            "the noise of the observations is lost to rounding"
        )
    residual = torch.linalg.solve_triangular(factor, values[..., None] - rows @ mean[..., None], upper=False)
    distance, size = residual.square().sum((-2, -1)), present.sum(-1).to(torch.float64)
    density = -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # a missing component adds 0
    if robust_weight.gaussian:
        density = density - distance / 2 - size / 2 * math.log(2 * math.pi)
    else:
        freedom = torch.as_tensor(robust_weight.nu, dtype=torch.float64)
        density = density + torch.lgamma((freedom + size) / 2) - torch.lgamma(freedom / 2)
        density = density - size / 2 * torch.log(freedom * math.pi)
        density = density - (freedom + size) / 2 * torch.log1p(distance / freedom)
    return density, known & present.any(-1)


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
    them, the fit separates a wrong R from outliers.

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

    def loss(values: Tensor) -> Tensor:
        chosen = weight | dict(zip(tuned, values[matrices:], strict=True))
        density, counts = _densities(
            build(values[:matrices]), times, observations, chosen["nu"], chosen["kappa"], iterations, initial
        )
        return -torch.where(counts, density, 0.0).sum()

    _, counts = _densities(sde, times, observations, nu, kappa, iterations, initial)
    logs = start.log().requires_grad_()
    found: list[tuple[float, Tensor]] = []
    search = torch.optim.LBFGS([logs], max_iter=max_steps, line_search_fn="strong_wolfe", tolerance_grad=1e-6)

    def evaluate() -> Tensor:
        search.zero_grad()
        if not bool((logs.detach() - start.log()).abs().max() < _LARGEST_CHANGE):
            raise _OutOfRange
        value = loss(logs.exp())
        value.backward()
        found.append((value.item(), logs.detach().clone()))
        return value

    evaluate()  # an error here is the caller's; a later one is the search's, which has gone too far
    finished = True
    try:
        search.step(evaluate)  # type: ignore[no-untyped-call]
    except (_OutOfRange, ValueError, torch.linalg.LinAlgError):
        finished = False
    with torch.no_grad():
        logs.copy_(min(found, key=lambda one: one[0])[1])
    evaluate()
    assert logs.grad is not None
    converged = finished and bool(counts.any()) and bool(logs.grad.abs().max() < 1e-3)
    values = logs.detach().exp()
    errors = values * _standard_errors(_curvature(lambda at: loss(at.exp()), logs.detach()))
    parameters, errors_by_name = (dict(zip(names, x.tolist(), strict=True)) for x in (values, errors))
    found_nu, found_kappa = parameters.get("nu", nu), parameters.get("kappa", kappa)
    return Fit(
        build(values[:matrices]), -loss(values).item(), parameters, errors_by_name, converged, found_nu, found_kappa
    )


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


def _curvature(loss: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """The Hessian by central differences of exact gradients. Second derivatives would take ten times as long."""

    def slope(at: Tensor) -> Tensor:
        at = at.detach().requires_grad_()
        return torch.autograd.grad(loss(at), at)[0]

    steps = torch.diag(torch.full_like(values, _STEP))
    rows = [(slope(values + step) - slope(values - step)) / (2 * step.sum()) for step in steps]
    return symmetric(torch.stack(rows))


def _standard_errors(curvature: Tensor) -> Tensor:
    """Square roots of the diagonal of the inverse curvature. Infinite where the likelihood is flat or not at a maximum.

    A parameter along which the likelihood is flat by itself, such as a noise of zero, does not change the others.
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
