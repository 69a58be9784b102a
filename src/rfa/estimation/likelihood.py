"""The log-likelihood of a series, by robust one-step predictions.

log p(z_1 ... z_T) = sum_i log p(z_i | estimate from z_1 ... z_i-1),    each p Gaussian or Student-t
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from .compiled import FilterProblem, FirstDerivatives, can_run, different_lags, discretize, run, threads_for
from .estimators import robust_estimate
from .linear_sde import LinearSDE
from .matrices import (
    InitialMoments,
    check_initial,
    flattened,
    identity_like,
    symmetric,
    without_missing,
    without_rounding,
)
from .problem import EstimationProblem, check_gaps, make_problem
from .recursive_filter import overflow_error
from .robust_weight import Number, RobustWeight

# The Gaussian log-likelihood of all rows on compiled code, with its analytic gradient for the model and the start

_MOST_COMPONENTS = 52  # a row's missing components are one number of float64


class NoiseLost(ValueError):
    """The noise of an observation is below the rounding of its prediction's variance."""


@dataclass(frozen=True)
class CompiledLikelihood:
    """Series whose likelihood is computed for many models: what does not depend on the model."""

    problem: EstimationProblem
    values: Float[Tensor, "b T m"]  # z, 0 where missing
    patterns: Bool[Tensor, "patterns m"]  # which components are present, each combination once
    row_index: Int[Tensor, "b T"]  # which pattern each row has
    lags: Float[Tensor, " lags"]
    lag_index: Int[Tensor, "models steps"]  # which lag each step has

    @classmethod
    def of(cls, problem: EstimationProblem, times: Tensor, observations: Tensor) -> "CompiledLikelihood | None":
        """None where compiled code cannot do it: it takes one model for all series, without gradients for them."""
        grid, sde, initial = problem.grid, problem.sde, problem.initial
        given = [times, observations, grid.values, sde.dynamics, sde.observation]
        given += [] if initial is None else [initial.mean, initial.covariance]
        m = observations.shape[-1]
        if not can_run(*given) or sde.batch_shape.numel() != 1 or m > _MOST_COMPONENTS:
            return None
        if torch.is_grad_enabled() and (times.requires_grad or observations.requires_grad):
            return None
        with torch.no_grad():
            observations = flattened(observations.to(torch.float64), grid.batch_shape, 2)
            present = ~observations.isnan()
            codes = (present * 2.0 ** torch.arange(m, dtype=torch.float64)).sum(-1)
            codes, index = torch.unique(codes, return_inverse=True)
            patterns = (codes[:, None].to(torch.int64) >> torch.arange(m)) % 2 == 1
            values = observations.masked_fill(~present, 0.0)
            return cls(problem, values, patterns, index, *different_lags(grid.times[: grid.models]))

    def density(self, sde: LinearSDE) -> tuple[Tensor, Tensor]:
        """`log p` of each row given the earlier ones, `(..., T)`, and which count."""
        n, m = sde.state_size, sde.observation_size
        observation, noise = sde.observation.reshape(m, n), sde.observation_noise.reshape(m, m)
        rows, noise = without_missing(observation, noise, self.patterns)
        factor, failed = torch.linalg.cholesky_ex(noise)
        if bool((failed > 0).any()):
            raise ValueError("observation_noise: got a singular matrix, expected a positive definite one")
        whiten = torch.linalg.solve_triangular(factor, identity_like(noise), upper=False)
        one = len(whiten) == 1
        values = self.values @ whiten[0].mT if one else (whiten[self.row_index] @ self.values[..., None])[..., 0]
        transition, variance = (x[0] for x in discretize(sde, self.lags))
        check_gaps(transition, variance, self.lags)
        (b, length, _), initial = values.shape, self.problem.initial
        if initial is None:
            mean, covariance = values.new_zeros(b, n), values.new_zeros(self.problem.grid.models, n, n)
        else:
            mean, covariance = initial.mean, initial.covariance
        found, counts = FilterDensity.apply(  # type: ignore[no-untyped-call]
            whiten @ rows, values, transition, variance, mean, covariance, self
        )
        present = self.patterns.any(-1)[self.row_index]
        sizes = self.patterns.sum(-1, dtype=torch.float64)
        lost = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + sizes * math.log(2 * math.pi) / 2
        density = found - lost[self.row_index]
        counts = (counts > 0) & present
        if initial is None:
            first = present.to(torch.int64).argmax(-1)
            late = (first > 0).nonzero()[:, 0]  # nothing is seen at the first times
            if len(late) and (stationary := replace(self.problem, sde=sde).stationary) is not None:
                at, lag = first[late], self.lag_index.expand(b, -1)[late, first[late] - 1]
                spread = transition[lag] @ stationary[late] @ transition[lag].mT + variance[lag]
                pattern = self.row_index[late, at]
                own = _log_density((whiten @ rows)[pattern], values[late, at], spread) - lost[pattern]
                density = density.index_put((late, at), own)
                counts = counts.index_put((late, at), torch.tensor(True))
        shape = (*self.problem.grid.batch_shape, length)
        return density.reshape(shape), counts.reshape(shape)

    def filter_problem(self, states: int, covariances: int) -> FilterProblem:
        """For a filter of these series."""
        b, length, m = self.values.shape
        threads = threads_for(covariances, m * length, states)
        diffuse, models = self.problem.initial is None, self.problem.grid.models
        found = FilterProblem(b, covariances, models, length, m, states, threads, 0, diffuse)
        found.patterns, found.lags = len(self.patterns), len(self.lags)
        return found


def _log_density(
    rows: Float[Tensor, "b m n"], values: Float[Tensor, "b m"], spread: Float[Tensor, "b n n"]
) -> Float[Tensor, " b"]:
    """Of whitened rows, without 2 pi, from a state with mean 0."""
    factor = torch.linalg.cholesky(rows @ spread @ rows.mT + torch.eye(rows.shape[-2], dtype=rows.dtype))
    residual = torch.linalg.solve_triangular(factor, values[..., None], upper=False)
    return -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - residual.square().sum((-2, -1)) / 2


class FilterDensity(torch.autograd.Function):
    """The log density of each whitened row, `(b, T)`, and whether it has one, `(b, T)`."""

    @staticmethod
    def forward(ctx, rows, values, transition, variance, mean, covariance, series):  # noqa: D102 - of PyTorch
        (b, length, _), n = values.shape, rows.shape[-1]
        models = series.problem.grid.models
        covariances = max(models, len(covariance))
        tensors = {
            "rows": rows.contiguous(),
            "row_index": series.row_index[:models].contiguous(),
            "values": values.contiguous(),
            "transition": transition.contiguous(),
            "variance": variance.contiguous(),
            "lag_index": series.lag_index.contiguous(),
            "start_mean": mean.contiguous(),
            "start_covariance": covariance.expand(covariances, n, n).contiguous(),
        }
        density, overflow = values.new_empty(b, length), torch.full((covariances,), -1)
        counts = torch.zeros(covariances, length, dtype=torch.int64)
        written = {"density": density, "counts": counts, "overflow": overflow}
        run("filter", series.filter_problem(n, covariances), **tensors, **written)
        if bool((overflow >= 0).any()):
            raise overflow_error(int(overflow[overflow >= 0].min()))
        if bool((counts < 0).any()):
            raise NoiseLost("observation_noise: got a noise that is lost to rounding, expected a larger one")
        ctx.series, ctx.names, ctx.starts = series, tuple(tensors), len(covariance)
        ctx.save_for_backward(*tensors.values())
        counts = counts.expand(b, length)
        ctx.mark_non_differentiable(counts)
        return density, counts

    @staticmethod
    def backward(ctx, grad_density, _):  # noqa: D102
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        covariances, n, _ = tensors["start_covariance"].shape

        def zeros(name: str, *leading: int) -> Tensor:
            return tensors[name].new_zeros(*leading, *tensors[name].shape)

        grads = {name: zeros(name, covariances) for name in ("rows", "transition", "variance")}
        grads |= {"values": zeros("values"), "mean": zeros("start_mean"), "covariance": zeros("start_covariance")}
        written = {f"grad_{name}": grad for name, grad in grads.items()}
        problem = ctx.series.filter_problem(n, covariances)
        run("filter_gradient", problem, **tensors, grad_density=grad_density.contiguous(), **written)
        shared = {name: grads[name].sum(0) for name in ("rows", "transition", "variance")}
        start = grads["covariance"].sum(0, keepdim=True) if ctx.starts == 1 else grads["covariance"]
        found = shared["rows"], grads["values"], shared["transition"], shared["variance"], grads["mean"], start
        return *FirstDerivatives.apply(6, *found, grad_density, *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


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
    `nu = inf`, else Student-t with nu degrees of freedom. With `nu = inf` and a kappa it is the Kalman filter's.

    Args: as `robust_estimate`, with its Riccati prior and recursive start.

    Returns:
        `(...)`, differentiable. For the Kalman filter, first derivatives for the model and `initial` are compiled code,
        in linear time. `torch.func` gives higher ones, in PyTorch. Under a diffuse start, rows without a prediction do
        not count. With `initial` the first row counts, predicted from there.

    Raises:
        ValueError: as `robust_estimate`, and where the noise of an observation is below the rounding of its
            prediction's variance.
    """
    robust_weight = RobustWeight.of(nu, kappa, sde.observation_size)
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
    """A function of model, nu and kappa: `log p` of each row, `(..., T)`, and which count."""
    compiled = None
    if robust_weight.gaussian:
        problem = make_problem(sde, times, observations, robust=False, initial=initial)
        compiled = CompiledLikelihood.of(problem, times, observations)

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
    iterations = 1 if robust_weight.gaussian else iterations
    options: dict[str, Any] = {"nu": nu, "kappa": kappa, "iterations": iterations, "initial": initial}
    estimate = robust_estimate(sde, times, observations, **options, return_weights=False)
    shape = estimate.mean.shape[:-2]
    times = flattened(times.to(torch.float64), shape, 1)
    lags = times.diff(dim=-1).reshape(*shape, -1)
    transition, variance = sde.transition(lags), sde.covariance(lags)
    before = estimate.covariance[..., :-1, :, :]
    unknown = before.isinf()
    diffuse, joined = unknown.diagonal(dim1=-2, dim2=-1), torch.triu(unknown, 1).any(-1).any(-1)
    moved = sde.observation[..., None, :, :] @ without_rounding(transition.detach())
    before = torch.where(unknown | joined[..., None, None], 0.0, before)
    mean = (transition @ estimate.mean[..., :-1, :, None])[..., 0]
    spread = symmetric(transition @ before @ transition.mT) + variance
    values = observations.to(torch.float64)
    seen = ~values[..., 1:, :].isnan() & ((moved != 0) & diffuse[..., None, :]).any(-1)
    known = ~(joined | seen.any(-1))
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
        name, largest = "observation_noise" if initial is None else "initial", spread.detach().amax().item()
        given = f"{name}: got a variance of the prediction of up to {largest:.3g}"
        raise ValueError(f"{given}, expected less: the noise of the observations is lost to rounding")
    residual = torch.linalg.solve_triangular(factor, values[..., None] - rows @ mean[..., None], upper=False)
    distance, size = residual.square().sum((-2, -1)), present.sum(-1).to(torch.float64)
    density = -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # a missing component adds 0
    if not isinstance(robust_weight.nu, Tensor) and math.isinf(robust_weight.nu):
        density = density - distance / 2 - size / 2 * math.log(2 * math.pi)
    else:
        freedom = torch.as_tensor(robust_weight.nu, dtype=torch.float64)
        density = density + torch.lgamma((freedom + size) / 2) - torch.lgamma(freedom / 2)
        density = density - size / 2 * torch.log(freedom * math.pi)
        density = density - (freedom + size) / 2 * torch.log1p(distance / freedom)
    return density, known & present.any(-1)
