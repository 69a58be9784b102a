"""The compiled Kalman filter and smoother: a loop over times in C++, in float64, linear in time and memory.

`kernels/` has the sources. A wheel may bring them compiled; otherwise they are compiled on first use and kept in the
cache, as those of `rfa.ops.cpu`. Where neither is possible, where gradients are wanted, or off the CPU, the filter runs
in PyTorch (`kalman.py`).
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rfa.ops.cpu.build import load_library
from rfa.ops.cpu.compiler import BuildError
from rfa.ops.transforms import transformed

from .grid import check_gaps
from .linear_sde import LinearSDE

SOURCES = Path(__file__).parent / "kernels"
_WORTH_THREADS = 1e7  # nanoseconds
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class FilterProblem(ctypes.Structure):
    """See kernels/problem.h."""

    _fields_ = (
        *((name, _integer) for name in ("series", "covariances", "models", "length")),
        *((name, _integer) for name in ("components", "states", "threads", "smooth", "diffuse")),
        *((name, _pointer) for name in ("rows", "row_index", "values", "transition", "variance", "lag_index")),
        *((name, _pointer) for name in ("start_mean", "start_covariance")),
        *((name, _pointer) for name in ("mean", "covariance", "least_squares", "density", "counts", "overflow")),
        *((name, _pointer) for name in ("grad_density", "grad_rows", "grad_values")),
        *((name, _pointer) for name in ("grad_transition", "grad_variance", "grad_mean", "grad_covariance")),
        ("patterns", _integer),
        ("lags", _integer),
        *((name, _pointer) for name in ("predicted_mean", "predicted_covariance", "weight", "resumed", "carried")),
    )


class LikelihoodProblem(ctypes.Structure):
    """See kernels/problem.h."""

    _fields_ = (
        *((name, _integer) for name in ("models", "length", "states", "sensors", "lags", "threads")),
        *((name, _pointer) for name in ("rows", "values", "sensor", "noise", "sensor_noise", "lag_index")),
        *((name, _pointer) for name in ("transition", "variance", "covariance", "units", "log_likelihood")),
    )


class LagsProblem(ctypes.Structure):
    """See kernels/transitions.cpp."""

    _fields_ = (
        *((name, _integer) for name in ("models", "count", "states", "threads")),
        *((name, _pointer) for name in ("dynamics", "diffusion", "lags", "transition", "variance")),
        *((name, _pointer) for name in ("grad_transition", "grad_variance", "grad_dynamics", "grad_diffusion")),
    )


_SIZES = {"filter_problem": FilterProblem, "lags": LagsProblem, "likelihood_problem": LikelihoodProblem}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled filters, or None where they cannot be compiled or loaded."""
    try:
        loaded = load_library(SOURCES)
    except BuildError:
        return None
    for name, problem in _SIZES.items():
        size = getattr(loaded, f"rfa_{name}_size")
        size.restype = _integer
        if size() != ctypes.sizeof(problem):
            return None
    return loaded


def can_run(*tensors: Tensor | None) -> bool:
    """Whether the compiled filter can take these tensors: on the CPU, outside `torch.func`, with a compiler here."""
    given = [x for x in tensors if x is not None]
    plain = all(type(x) is Tensor and x.device.type == "cpu" for x in given)
    return plain and not transformed() and not torch.compiler.is_compiling() and library() is not None


def threads_for(parts: int, steps: int, states: int) -> int:
    """The threads for independent parts of so many steps. Where all take less than 10 ms, one.

    Beside other programs a second thread is waited for: a fit of 500 readings took 20 times as long with two.
    """
    nanoseconds = parts * steps * (100 + 10 * states**2)
    return min(torch.get_num_threads(), parts) if nanoseconds > _WORTH_THREADS else 1


def run(entry: str, problem: FilterProblem | LagsProblem | LikelihoodProblem, **tensors: Tensor | None) -> None:
    """Run `rfa_<entry>`. Fields that are tensors must be contiguous, in float64 or int64.

    Raises:
        MemoryError: if its working memory cannot be had.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            assert tensor.is_contiguous(), name
            assert tensor.element_size() == 8, name
            setattr(problem, name, tensor.data_ptr())
    if getattr(library(), f"rfa_{entry}")(ctypes.byref(problem)):
        raise MemoryError(f"rfa: no memory for the {entry} on the CPU")


class FirstDerivatives(torch.autograd.Function):
    """Gradients by compiled code, as they are. A second derivative raises; without this it would be wrong silently.

    `once_differentiable` does not see that a gradient depends on the inputs.
    """

    @staticmethod
    def forward(ctx, count, *tensors):  # noqa: D102 - `count` gradients, then what they depend on
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):  # noqa: D102
        raise RuntimeError("got a second derivative of compiled code, expected a first one: take torch.func.hessian")


class Discretization(torch.autograd.Function):
    """`Phi(dt)` and `V(dt)` of many lags, `(lags, n, n)`, with the gradient for A and Q."""

    @staticmethod
    def forward(ctx, dynamics, diffusion, lags):  # noqa: D102 - of PyTorch
        dynamics, diffusion = dynamics.contiguous(), diffusion.contiguous()
        transition = lags.new_zeros(len(lags), *dynamics.shape)
        variance = torch.zeros_like(transition)
        problem = LagsProblem(1, len(lags), len(dynamics), 1)
        given = {"dynamics": dynamics, "diffusion": diffusion, "lags": lags}
        run("transitions", problem, **given, transition=transition, variance=variance)
        ctx.save_for_backward(dynamics, diffusion, lags)
        return transition, variance

    @staticmethod
    def backward(ctx, grad_transition, grad_variance):  # noqa: D102
        dynamics, diffusion, lags = ctx.saved_tensors
        grads = torch.empty_like(dynamics), torch.empty_like(diffusion)
        given = {"dynamics": dynamics, "diffusion": diffusion, "lags": lags}
        given |= {"grad_transition": grad_transition.contiguous(), "grad_variance": grad_variance.contiguous()}
        run(
            "transitions_gradient",
            LagsProblem(1, len(lags), len(dynamics), 1),
            **given,
            grad_dynamics=grads[0],
            grad_diffusion=grads[1],
        )
        given_grads = grad_transition, grad_variance
        return *FirstDerivatives.apply(2, *grads, *given_grads, dynamics, diffusion), None  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Lags:
    """The different lags of a grid.

    Args:
        lags: each once, `(lags,)`.
        index: which lag each step has, `(b, steps)`.
    """

    lags: Float[Tensor, " lags"]
    index: Int[Tensor, "b steps"]

    @classmethod
    def of(cls, times: Float[Tensor, "b grid"]) -> "Lags":
        """Of increasing times. Those of a regular series, such as multiples of 0.1, have some ten lags by rounding."""
        return cls(*torch.unique(times.diff(dim=-1), return_inverse=True))


@torch.no_grad()
def transitions_of_models(sde: LinearSDE, lags: Float[Tensor, " lags"]) -> tuple[Tensor, Tensor]:
    """Phi and V of several models for each lag, `(models, lags, n, n)`. They may not be finite."""
    dynamics, diffusion = (x.contiguous() for x in torch.broadcast_tensors(sde.dynamics, sde.diffusion))
    b, n, _ = dynamics.shape
    if not bool((dynamics - torch.diag_embed(dynamics.diagonal(dim1=-2, dim2=-1))).any()):
        return sde.transition(lags), sde.covariance(lags)
    transition, variance = (lags.new_zeros(b, len(lags), n, n) for _ in range(2))
    problem = LagsProblem(b, len(lags), n, threads_for(b, len(lags), n))
    given = {"dynamics": dynamics, "diffusion": diffusion, "lags": lags}
    run("transitions", problem, **given, transition=transition, variance=variance)
    return transition, variance


def transitions(sde: LinearSDE, lags: Float[Tensor, " lags"]) -> tuple[Tensor, Tensor]:
    """Phi and V of one model for each lag, `(lags, n, n)`. First derivatives for A and Q only.

    Raises:
        ValueError: for a gap over which an unstable state overflows.
    """
    n = sde.state_size
    dynamics, diffusion = (x.reshape(n, n) for x in (sde.dynamics, sde.diffusion))
    if not dynamics.requires_grad and not bool((dynamics - dynamics.diagonal().diag()).any()):
        transition, variance = (of(lags).reshape(-1, n, n) for of in (sde.transition, sde.covariance))
    else:
        transition, variance = Discretization.apply(dynamics, diffusion, lags)  # type: ignore[no-untyped-call]
    check_gaps(transition, variance, lags)
    return transition, variance
