"""The log-likelihood of a series, by robust one-step predictions.

log p(z_1 ... z_T) = sum_i log p(z_i | estimate from z_1 ... z_i-1),    each p Gaussian or Student-t
"""

import contextlib
import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Real
from torch import Tensor

from .compiled_likelihood import CompiledLikelihood, NoiseLost
from .linear_sde import LinearSDE
from .matrices import InitialMoments, check_initial, flattened, symmetric, without_missing
from .problem import EstimatorOptions, make_problem
from .robust import robust_estimate
from .robust_weight import Number, RobustWeight


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
        `(...)`, differentiable. Where `nu = inf`, first derivatives for the model and `initial` are compiled code, in
        linear time. `torch.func` gives higher ones, in PyTorch. Under a diffuse start, rows without a prediction do not
        count. With `initial` the first row counts, predicted from there.

    Raises:
        ValueError: as `robust_estimate`, and where the noise of an observation is below the rounding of its
            prediction's variance.
    """
    robust_weight = RobustWeight.of(nu, kappa, sde.observation_size)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (times, observations)):
        density, counts = _densities(sde, times, observations, nu, kappa, iterations, initial)
    else:
        density, counts = density_function(sde, times, observations, robust_weight, iterations, initial)(sde, nu, kappa)
    return torch.where(counts, density, 0.0).sum(-1)


def density_function(
    sde: LinearSDE,
    times: Tensor,
    observations: Tensor,
    robust_weight: RobustWeight,
    iterations: int,
    initial: InitialMoments | None,
) -> Callable[[LinearSDE, Number, Number | None], tuple[Tensor, Tensor]]:
    """A function of model, nu and kappa: `log p` of each row, `(..., T)`, and which count.

    Gaussian densities of one model for all series are computed by compiled code, with first derivatives for the model
    alone. What depends on the series only is prepared once.
    """
    compiled = None
    if robust_weight.gaussian:
        options = EstimatorOptions(True, False, robust_weight, 1, "recursive", False)
        problem = make_problem(sde, times, observations, options, None, initial)
        compiled = CompiledLikelihood.of(problem, observations)

    def densities(chosen: LinearSDE, nu: Number, kappa: Number | None) -> tuple[Tensor, Tensor]:
        if compiled is not None:
            with contextlib.suppress(NoiseLost):  # the other way names what is too large
                return compiled.density(chosen)
        return _densities(chosen, times, observations, nu, kappa, iterations, initial)

    return densities


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
