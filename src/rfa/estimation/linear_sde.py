"""A linear stochastic differential equation: its transition, covariance, stationary covariance and samples.

    dx = A x dt + G dW,  G G^T = Q           Phi(dt) = exp(A dt)
    z_i = C x(t_i) + e_i,  e_i ~ N(0, R)     V(dt) = integral_0^dt exp(A s) Q exp(A s)^T ds

Source: equation `SDE` and appendices A.1 and A.2.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Real
from torch import Tensor

from rfa.checks import require
from rfa.dynamics import accumulated_variance

from .time_axis import as_numbers

InitialMoments = tuple[Real[Tensor, "*#initial n"], Real[Tensor, "*#initial n n"]]  # mean and covariance

_TOLERANCE = 1e-9  # relative: rounding in a covariance that the caller has computed
_SHORT = 0.5  # |A| dt up to which the block exponential is computed directly


# Whether a linear process is stable: the real parts of its eigenvalues, with their rounding errors


def real_parts_with_errors(dynamics: Float[Tensor, "*batch n n"]) -> tuple[Tensor, Tensor]:
    """The real parts of the eigenvalues, and estimates of their rounding errors, `(..., n)` each.

    With the computed `A X = X diag(l) + r` and `Y = X^-1` the error is about `(|Y| (|r| + eps |A| |X|))_ii`. In a
    Jordan block of two it is `eps^(1/2) rho(|A|)`. Units of states change neither.
    """
    eigenvalues, vectors = torch.linalg.eig(dynamics)
    inverse, failed = torch.linalg.inv_ex(vectors)
    size, rounding = dynamics.abs(), 10 * torch.finfo(dynamics.dtype).eps
    residual = (dynamics.to(vectors.dtype) @ vectors - vectors * eigenvalues[..., None, :]).abs()
    errors = 3 * (inverse.abs() @ (residual + rounding * size @ vectors.abs())).diagonal(dim1=-2, dim2=-1)
    errors = torch.where((failed > 0)[..., None] | errors.isnan(), torch.inf, errors)
    largest = torch.linalg.eigvals(size).real.amax(-1, keepdim=True)
    return eigenvalues.real, torch.minimum(errors, rounding**0.5 * largest)


def turns_only(dynamics: Float[Tensor, "*batch n n"], diffusion: Float[Tensor, "*batch n n"]) -> bool:
    """Whether `A = -mu I + S` with a skew-symmetric S, and `Q = q I`, without gradients.

    The real parts are -mu exactly then, and the stationary covariance is `q / (2 mu) I`.
    """
    if dynamics.requires_grad or diffusion.requires_grad:
        return False
    decay, noise = -dynamics.diagonal(dim1=-2, dim2=-1), diffusion.diagonal(dim1=-2, dim2=-1)
    skew = dynamics + torch.diag_embed(decay)
    alike = bool((decay == decay[..., :1]).all() & (noise == noise[..., :1]).all())
    return alike and torch.equal(skew, -skew.mT) and torch.equal(diffusion, torch.diag_embed(noise))


def solve_lyapunov(
    dynamics: Float[Tensor, "*batch n n"], diffusion: Float[Tensor, "*batch n n"]
) -> Float[Tensor, "*batch n n"]:
    """P with `A P + P A^T + Q = 0`, as a linear system of n^2 unknowns."""
    n = dynamics.shape[-1]
    identity = identity_like(dynamics)
    # row-major vec: vec(A P) = (A x I) vec P, vec(P A^T) = (I x A) vec P
    left = torch.einsum("...ij,kl->...ikjl", dynamics, identity) + torch.einsum("ij,...kl->...ikjl", identity, dynamics)
    right = -diffusion.flatten(-2).unsqueeze(-1)
    solved, failed = torch.linalg.solve_ex(left.reshape(*left.shape[:-4], n * n, n * n), right)
    if bool((failed > 0).any()):
        raise ValueError("dynamics: got a singular Lyapunov equation, expected eigenvalues with real parts < 0")
    return symmetric(solved.reshape(diffusion.shape))


class Outliers(NamedTuple):
    """With `probability`, the measurement error of a row is multiplied by `scale`."""

    probability: float
    scale: float


class Simulation(NamedTuple):
    """What `LinearSDE.simulate` draws: states `(..., T, n)` and observations `(..., T, m)`."""

    states: Float[Tensor, "*batch T n"]
    observations: Float[Tensor, "*batch T m"]


class LinearModel:
    """The matrices of a linear model, checked, in float64. `names` are those of the arguments of its process."""

    def __init__(self, names: tuple[str, str], dynamics: Any, diffusion: Any, observation: Any, noise: Any):
        self.dynamics, self.diffusion = matrix(names[0], dynamics), matrix(names[1], diffusion)
        self.observation, self.observation_noise, self.sensors = stacked_sensors(observation, noise)
        check_matrix(names[0], self.dynamics)
        self.state_size = n = self.dynamics.shape[-1]
        check_covariance(names[1], self.diffusion, n)
        check_matrix("observation", self.observation, columns=n)
        self.observation_size = m = self.observation.shape[-2]
        check_covariance("observation_noise", self.observation_noise, m)
        shapes = [x.shape[:-2] for x in (self.dynamics, self.diffusion, self.observation, self.observation_noise)]
        self.batch_shape = broadcast_shapes("sde", " of A, Q, C, R", shapes)


class LinearSDE(LinearModel):
    """`dx = A x dt + G dW` with `G G^T = Q`, observed as `z_i = C x(t_i) + e_i`, `e_i ~ N(0, R)`.

    All matrices are kept in float64 and carry gradients. They may have leading batch dimensions that broadcast.

    Args:
        dynamics: A, `(..., n, n)`, per unit of time. Any real matrix, stable or not.
        diffusion: Q, `(..., n, n)`, symmetric positive semi-definite, variance per unit of time.
        observation: C, `(..., m, n)`. m may be smaller or larger than n. Of several sensors a C `(m, n)` by name,
            each with its own m. They are kept one after another.
        observation_noise: R, `(..., m, m)`, symmetric positive semi-definite, a variance. Of several sensors by name.

    Raises:
        ValueError: for a shape that does not fit, NaN or infinite numbers, a covariance that is not symmetric or not
            positive semi-definite.

    Source: equation `SDE` and appendix A.1.
    """

    def __init__(
        self,
        dynamics: Real[Tensor, "*#batch n n"],
        diffusion: Real[Tensor, "*#batch n n"],
        observation: Real[Tensor, "*#batch m n"] | Mapping[str, Tensor],
        observation_noise: Real[Tensor, "*#batch m m"] | Mapping[str, Tensor],
    ):
        super().__init__(("dynamics", "diffusion"), dynamics, diffusion, observation, observation_noise)
        off_diagonal = self.dynamics - torch.diag_embed(self.dynamics.diagonal(dim1=-2, dim2=-1))
        # where A needs a gradient, its zeros need one too
        self._diagonal = not self.dynamics.requires_grad and not bool(off_diagonal.any())

    @staticmethod
    def discrete(
        transition: Any,
        process_noise: Any,
        observation: Any,
        observation_noise: Any,
        step: float = 1.0,
        *,
        cross_covariance: None = None,
    ) -> "DiscreteModel":
        """The model `x_k+1 = F x_k + w_k` at times a `step` apart, for `RobustFilter`. Its F need not have a logarithm.

        Args:
            transition, process_noise: F and Q, `(n, n)`, of one step. Q may be singular.
            observation, observation_noise: H `(m, n)` and R `(m, m)`, or by the names of sensors.
            step: in units of time. Gaps must be whole numbers of steps.
            cross_covariance: of process and measurement noise. They must be independent.

        Raises:
            ValueError: as `LinearSDE`, and for a cross covariance.
        """
        independent = "None: process noise that is correlated with measurement noise is not supported"
        require(cross_covariance is None, "cross_covariance", "a matrix", independent)
        return DiscreteModel(transition, process_noise, observation, observation_noise, step)

    def transition(self, dt: float | int | Real[Tensor, "*dt"]) -> Float[Tensor, "*lags n n"]:
        """`Phi(dt) = exp(A dt)`.

        Args:
            dt: lag in units of time, of any sign. A number, or `(..., T)` with leading dimensions that broadcast
                against the batch.

        Returns:
            `(..., n, n)` for a number, else `(..., T, n, n)`.

        Raises:
            ValueError: for lags that are no numbers, NaN or infinite, and for one over which `|A| dt` overflows, unless
                A is diagonal.
        """
        lags = _lags(dt)
        if not lags.dim():
            return self.transition(lags[None]).squeeze(-3)
        if self._diagonal:
            decayed = torch.exp(self.dynamics.diagonal(dim1=-2, dim2=-1)[..., None, :] * lags[..., None])
            return torch.diag_embed(decayed)
        self._longest(lags)
        return torch.linalg.matrix_exp(_at_each_time(self.dynamics) * lags[..., None, None])

    def covariance(self, dt: float | int | Real[Tensor, "*dt"]) -> Float[Tensor, "*lags n n"]:
        """`V(dt) = integral_0^dt exp(A s) Q exp(A s)^T ds`: the covariance that a known state gains over a lag.

        V solves the differential Lyapunov equation `V' = A V + V A^T + Q`, `V(0) = 0` (appendix A.2). It is computed
        by a block exponential over a short lag, doubled by `V(2h) = V(h) + Phi(h) V(h) Phi(h)^T`. So it overflows
        only where V itself does. Where A is diagonal, `V_ij = Q_ij integral_0^dt exp((a_i + a_j) s) ds` in closed form.

        Args, Returns and Raises are those of `transition`; lags are >= 0.
        """
        lags = _lags(dt)
        require(not bool((lags < 0).any()), "dt", lags.amin().item() if lags.numel() else 0.0, "lags >= 0")
        if not lags.dim():
            return self.covariance(lags[None]).squeeze(-3)
        if not self._diagonal:
            return self._block_covariance(lags)
        decay = -self.dynamics.diagonal(dim1=-2, dim2=-1)
        rates = (decay[..., :, None] + decay[..., None, :]) / 2  # mean mu of two states: exp(-2 mu s)
        gained = accumulated_variance(_at_each_time(rates), lags[..., None, None])
        return _at_each_time(self.diffusion) * gained

    def _longest(self, dt: Tensor) -> float:
        """`|A| dt` of the longest lag, in the 1-norm."""
        if not dt.numel():
            return 0.0
        norm, lag = torch.linalg.matrix_norm(self.dynamics.detach(), 1).max().item(), dt.detach().abs().max().item()
        require(math.isfinite(norm * lag), "dt", lag, f"lags with a finite |A| dt, where |A| is {norm:.3g}")
        return norm * lag

    def _block_covariance(self, dt: Tensor) -> Tensor:
        n = self.state_size
        size = self.diffusion.detach().abs().amax(dim=(-2, -1), keepdim=True)
        size = torch.where(size > 0, size, 1.0)  # large noise must not need more halvings
        longest = self._longest(dt)
        halvings = max(0, math.ceil(math.log2(longest / _SHORT))) if longest > 0 else 0
        dynamics, diffusion = torch.broadcast_tensors(self.dynamics, self.diffusion / size)
        upper = torch.cat([-dynamics, diffusion], dim=-1)
        lower = torch.cat([torch.zeros_like(dynamics), dynamics.mT], dim=-1)
        short = (dt * 0.5**halvings)[..., None, None]
        blocks = torch.linalg.matrix_exp(_at_each_time(torch.cat([upper, lower], dim=-2)) * short)
        phi = blocks[..., n:, n:].mT
        variance = phi @ blocks[..., :n, n:]
        for _ in range(halvings):
            variance = variance + phi @ variance @ phi.mT
            phi = phi @ phi
        return symmetric(variance) * _at_each_time(size)

    def stationary_covariance(self) -> Float[Tensor, "*batch n n"]:
        """P with `A P + P A^T + Q = 0`: the limit of `covariance(dt)` for long lags, `(..., n, n)`.

        Raises:
            ValueError: where an eigenvalue of A has no negative real part, or none that is beyond its rounding error:
                the variance grows without bound. Where A is diagonal, or states only turn beside a common decay, there
                is no such error, unless A or Q needs a gradient.
        """
        decay = -self.dynamics.diagonal(dim1=-2, dim2=-1)
        closed_form = self._diagonal or turns_only(self.dynamics, self.diffusion)
        real_parts, errors = -decay, torch.zeros_like(decay)
        if not closed_form:
            real_parts, errors = real_parts_with_errors(self.dynamics.detach())
        if bool((real_parts >= -errors).any()):
            slowest, error = real_parts.max().item(), errors.max().item()
            raise ValueError(
                f"dynamics: got an eigenvalue with real part {slowest:.6g} (to {error:.1g}), "
                "expected all < 0: only such a process has a stationary covariance"
            )
        if closed_form:
            return self.diffusion / (decay[..., :, None] + decay[..., None, :])
        return solve_lyapunov(*torch.broadcast_tensors(self.dynamics, self.diffusion))

    @torch.no_grad()
    def simulate(
        self,
        times: Real[Tensor, "*#batch T"],
        generator: torch.Generator | None = None,
        outliers: Outliers | tuple[float, float] | None = None,
        *,
        initial: InitialMoments | None = None,
        sample_shape: Sequence[int] = (),
    ) -> Simulation:
        """Draw states and observations.

        Args:
            times: `(T,)` or `(..., T)`, not decreasing.
            generator: source of the random numbers.
            outliers: `(probability, scale)`. With this probability a row's measurement error is multiplied by scale.
            initial: mean `(..., n)` and covariance `(..., n, n)` of the first state. Their leading dimensions
                broadcast with the others. By default the stationary distribution. A model without one starts at zero.
            sample_shape: leading dimensions of independent samples.

        Raises:
            ValueError: for no times, times that decrease or are not finite, an impossible initial state or outlier,
                or batch dimensions that do not broadcast.
        """
        times = real("times", times)
        if not times.dim() or not times.shape[-1]:
            raise ValueError(f"times: got shape {tuple(times.shape)}, expected (..., T) with at least one time")
        steps = times.diff(dim=-1)
        if not bool(times.isfinite().all() & (steps >= 0).all()):
            raise ValueError(
                "times: got NaN, infinite or decreasing values, expected (..., T) numbers that do not decrease"
            )
        probability, scale = outliers or (0.0, 1.0)
        if not (0 <= probability <= 1 and 0 <= scale < math.inf):
            raise ValueError(f"outliers: got {outliers}, expected a probability and a finite scale >= 0")
        mean, covariance = self._default_initial() if initial is None else check_initial(self.state_size, initial)
        shapes = self.batch_shape, times.shape[:-1], mean.shape[:-1], covariance.shape[:-2]
        what = " of model, times, initial mean and covariance"
        shape = (*sample_shape, *broadcast_shapes("times", what, shapes))

        def normal(*size: int) -> Tensor:
            return torch.randn(*shape, *size, 1, generator=generator, dtype=torch.float64, device=times.device)

        state = mean[..., None] + square_root(covariance) @ normal(self.state_size)
        states = [state]
        transition, noise = self.transition(steps), square_root(self.covariance(steps))
        for k in range(steps.shape[-1]):
            state = transition[..., k, :, :] @ state + noise[..., k, :, :] @ normal(self.state_size)
            states.append(state)
        path = torch.stack(states, dim=-3)[..., 0]
        errors = _at_each_time(square_root(self.observation_noise)) @ normal(times.shape[-1], self.observation_size)
        drawn = torch.rand(*path.shape[:-1], 1, 1, generator=generator, dtype=torch.float64, device=times.device)
        size = torch.where(drawn < probability, scale, 1.0)
        return Simulation(path, (_at_each_time(self.observation) @ path[..., None] + size * errors)[..., 0])

    def _default_initial(self) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(*self.batch_shape, self.state_size, dtype=torch.float64, device=self.dynamics.device)
        try:
            return zeros, self.stationary_covariance()
        except ValueError:
            return zeros, torch.diag_embed(zeros)


class DiscreteModel(LinearModel):
    """`x_k+1 = F x_k + w_k`, `w_k ~ N(0, Q)`, at times a step apart, observed as `z = H x + e`, `e ~ N(0, R)`.

    `LinearSDE.discrete` makes it. It has the same attributes as `LinearSDE`; gaps are whole numbers of steps.
    """

    def __init__(self, transition: Any, process_noise: Any, observation: Any, observation_noise: Any, step: float):
        names = ("transition", "process_noise")
        super().__init__(names, transition, process_noise, observation, observation_noise)
        require(not self.batch_shape, "transition", "matrices of more than two dimensions", "one model, (n, n)")
        number = isinstance(step, numbers.Real) and not isinstance(step, bool) and 0 < step < 1e300
        require(number, "step", step, "a length of time > 0")
        self.step = float(step)


def matrix(name: str, given: Any) -> torch.Tensor:
    """A matrix as a tensor in float64: of a tensor, of NumPy or of lists."""
    return real(name, given if isinstance(given, torch.Tensor) else torch.from_numpy(as_numbers(name, given).copy()))


def stacked_sensors(observation: Any, noise: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """C and R of all sensors, one after another, and how many components each has: of matrices or of them by name."""
    if not isinstance(observation, Mapping):
        require(not isinstance(noise, Mapping), "observation_noise", "matrices by name", "one matrix, as observation")
        rows = matrix("observation", observation)
        return rows, matrix("observation_noise", noise), {"": rows.shape[-2] if rows.dim() > 1 else 0}
    names = [*observation]
    fits = isinstance(noise, Mapping) and sorted(map(str, noise)) == sorted(map(str, names)) and len(names) > 0
    require(fits, "observation_noise", [*noise] if isinstance(noise, Mapping) else "a matrix", f"R of each of {names}")
    each_row = {str(name): matrix("observation", observation[name]) for name in names}
    blocks = {str(name): matrix("observation_noise", noise[name]) for name in names}
    for name, each in each_row.items():
        check_matrix(f"observation of {name}", each, columns=each.shape[-1] if each.dim() else 1)
        check_covariance(f"observation_noise of {name}", blocks[name], each.shape[-2])
    widths = {each.shape[-1] for each in each_row.values()}
    require(len(widths) == 1, "observation", f"matrices with {sorted(widths)} columns", "one for each state")
    sizes = {name: each.shape[-2] for name, each in each_row.items()}
    return torch.cat([*each_row.values()]), torch.block_diag(*blocks.values()), sizes


def _lags(dt: float | int | Real[Tensor, "*dt"]) -> Float[Tensor, "*lags"]:
    """In float64, without dimensions for a number."""
    try:
        lags = torch.as_tensor(dt, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"dt: got {dt!r}, expected a number or a tensor of real numbers") from error
    if not bool(lags.isfinite().all()):
        raise ValueError("dt: got NaN or infinite values, expected finite lags")
    return lags


def _at_each_time(matrix: Tensor) -> Tensor:
    """The matrix with a dimension for times: `(..., 1, n, n)`."""
    return matrix.unsqueeze(-3)


# Checks of matrices that a caller gives, and their algebra


def real(name: str, given: object) -> Tensor:
    """`given` in float64."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name}: got {type(given).__name__}, expected a tensor")
    if given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"{name}: got dtype {given.dtype}, expected real numbers")
    return given.to(torch.float64)


def check_matrix(name: str, given: Tensor, columns: int | None = None) -> None:
    """Raise `ValueError` unless `given` is finite and `(..., m, columns)`, or square where `columns` is None."""
    shape = tuple(given.shape)
    expected = "(..., n, n)" if columns is None else f"(..., m, {columns})"
    fits = len(shape) >= 2 and 0 not in shape[-2:] and shape[-1] == (shape[-2] if columns is None else columns)
    if not fits:
        raise ValueError(f"{name}: got shape {shape}, expected {expected}")
    if not bool(given.isfinite().all()):
        raise ValueError(f"{name}: got NaN or infinite values, expected finite numbers")


def check_covariance(name: str, given: Tensor, size: int) -> None:
    """Raise `ValueError` unless `given` is `(..., size, size)`, finite, symmetric and positive semi-definite."""
    if tuple(given.shape[-2:]) != (size, size) or given.dim() < 2:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected (..., {size}, {size})")
    check_matrix(name, given)
    detached = given.detach()
    largest = detached.abs().amax(dim=(-2, -1), keepdim=True)
    if bool(((detached - detached.mT).abs() > _TOLERANCE * largest).any()):
        raise ValueError(f"{name}: got a matrix that is not symmetric, expected a covariance")
    least = torch.linalg.eigvalsh(detached)[..., 0]
    if bool((least < -_TOLERANCE * largest[..., 0, 0] * size).any()):
        least = least.min().item()
        raise ValueError(f"{name}: got an eigenvalue of {least:.6g}, expected a positive semi-definite matrix")


def check_initial(size: int, initial: InitialMoments) -> tuple[Tensor, Tensor]:
    """Mean `(..., size)` and covariance `(..., size, size)` of the first state, in float64."""
    if not isinstance(initial, tuple | list) or len(initial) != 2:
        raise ValueError(f"initial: got {type(initial).__name__}, expected a mean and a covariance")
    mean, covariance = (real("initial", part) for part in initial)
    check_covariance("initial", covariance, size)
    if mean.shape[-1:] != (size,) or not bool(mean.isfinite().all()):
        raise ValueError(f"initial: got a mean of shape {tuple(mean.shape)}, expected {size} finite numbers")
    return mean, covariance


def broadcast_shapes(name: str, of: str, shapes: Sequence[torch.Size]) -> torch.Size:
    """The batch dimensions to which some broadcast."""
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        given = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name}: got batch dimensions {given}{of}, expected shapes that broadcast") from None


def identity_like(matrix: Float[Tensor, "... rows n"]) -> Float[Tensor, "n n"]:
    """The identity with as many rows as `matrix` has columns, of its type and on its device."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def trace(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """The sum of the diagonal."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def symmetric(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """The symmetric part, `(M + M^T) / 2`."""
    return (matrix + matrix.mT) / 2


def inverse(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """`matrix^-1`. Many of up to 2 x 2 are inverted by cofactors: the library would take 100 times as long."""
    if matrix.shape[-1] == 1:
        return 1 / matrix
    if matrix.shape[-1] > 2 or matrix.shape[:-2].numel() < 8:
        return torch.linalg.inv_ex(matrix).inverse
    (a, b), (c, d) = (row.unbind(-1) for row in matrix.unbind(-2))
    rows = torch.stack([torch.stack([d, -b], dim=-1), torch.stack([-c, a], dim=-1)], dim=-2)
    return rows / (a * d - b * c)[..., None, None]


def square_root(covariance: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """A matrix L with `L L^T = covariance`. The covariance may be singular."""
    eigenvalues, basis = torch.linalg.eigh(symmetric(covariance))
    return basis * eigenvalues.clamp(min=0.0).sqrt()[..., None, :]
