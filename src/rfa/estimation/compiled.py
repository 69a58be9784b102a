"""The compiled filters, likelihoods and transitions: loops in C++, in float64, linear in time and memory.

`kernels/` has the sources. A wheel may bring them compiled; otherwise they are compiled on first use and kept in the
cache, as those of `rfa.ops.cpu`. Where neither is possible, where gradients are wanted, or off the CPU, PyTorch
does the same (`recursive_filter.py`).
"""

import ctypes
import functools
import warnings
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rfa.ops.cpu.build import load_library
from rfa.ops.cpu.compiler import BuildError
from rfa.ops.transforms import transformed

from . import gaussian
from .linear_sde import LinearSDE

SOURCES = Path(__file__).parent / "kernels"
_WORTH_THREADS = 1e7  # nanoseconds
_ROBUST_NUMBERS = (
    "prior_rows persistence largest_variance rejected prior_log_odds most_log_odds_gain abandoned_log_odds "
    "same_log_odds no_digits"
)
_integer, _pointer, _number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class LikelihoodProblem(ctypes.Structure):
    """See kernels/problem.h."""

    _fields_ = (
        *_fields(_integer, "models length states sensors lags threads"),
        *_fields(_pointer, "rows values sensor noise sensor_noise lag_index"),
        *_fields(_pointer, "transition variance covariance units log_likelihood"),
    )


class LagsProblem(ctypes.Structure):
    """See kernels/transitions.cpp."""

    _fields_ = (
        *_fields(_integer, "models count states threads"),
        *_fields(_pointer, "dynamics diffusion lags transition variance"),
    )


class RobustConstants(ctypes.Structure):
    """See kernels/noise_scale.h."""

    _fields_ = (
        ("scales", _number * gaussian.SCALES),
        ("prior", _number * gaussian.SCALES),
        *_fields(_number, _ROBUST_NUMBERS),
    )

    @classmethod
    def of_library(cls) -> "RobustConstants":
        """Those of `gaussian`."""
        like = torch.zeros(1, dtype=torch.float64)
        lists = gaussian.noise_scales(like).tolist(), gaussian.NoiseScale.prior(like).last[0].tolist()
        arrays = {name: (_number * len(x))(*x) for name, x in zip(("scales", "prior"), lists, strict=True)}
        return cls(**arrays, **{name: getattr(gaussian, name.upper()) for name in _ROBUST_NUMBERS.split()})


_SIZES = {
    "lags": LagsProblem,
    "likelihood_problem": LikelihoodProblem,
    "robust_constants": RobustConstants,
}
_ROBUST_CONSTANTS = RobustConstants.of_library()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled filters, or None where they cannot be compiled or loaded, which a warning says once."""
    try:
        loaded = load_library(SOURCES)
        for name, problem in _SIZES.items():
            size = getattr(loaded, f"rfa_{name}_size")
            size.restype = _integer
            if size() != ctypes.sizeof(problem):
                raise BuildError(f"{loaded._name} is of another version of rfa; remove it")
    except BuildError as error:
        warnings.warn(
            f"rfa: the compiled filters cannot run, PyTorch takes 40 to 500 times as long: {error}", stacklevel=4
        )
        return None
    return loaded


def can_run(*tensors: Tensor | None) -> bool:
    """Whether the compiled filter can take these tensors: on the CPU, outside `torch.func`, with a compiler here."""
    given = [x for x in tensors if x is not None]
    plain = all(type(x) is Tensor and x.device.type == "cpu" for x in given)
    return plain and not transformed() and not torch.compiler.is_compiling() and library() is not None


def threads_for(parts: int, steps: int, states: int) -> int:
    """The threads for independent parts of so many steps: one where all take less than 10 ms."""
    nanoseconds = parts * steps * (100 + 10 * states**2)
    return min(torch.get_num_threads(), parts) if nanoseconds > _WORTH_THREADS else 1


def set_pointers(problem: ctypes.Structure, **arrays: Tensor | np.ndarray | None) -> None:
    """Set fields to arrays, which must be contiguous, in float64 or int64."""
    for name, given in arrays.items():
        if given is not None:
            array = given.detach().numpy() if isinstance(given, Tensor) else given
            assert array.flags.c_contiguous, name
            assert array.itemsize == 8, name
            setattr(problem, name, array.ctypes.data)


def run(entry: str, problem: LagsProblem | LikelihoodProblem, **tensors: Tensor | None) -> None:
    """Run `rfa_<entry>`."""
    set_pointers(problem, **tensors)
    if getattr(library(), f"rfa_{entry}")(ctypes.byref(problem)):
        raise MemoryError(f"rfa: no memory for the {entry} on the CPU")


def discretize(sde: LinearSDE, lags: Float[Tensor, " lags"]) -> tuple[Tensor, Tensor]:
    """Phi and V of each lag, `(models, lags, n, n)`, of models in one batch dimension or none.

    They may overflow, and have no gradient.
    """
    n, dynamics = sde.state_size, sde.dynamics
    closed_form = not bool((dynamics - torch.diag_embed(dynamics.diagonal(dim1=-2, dim2=-1))).any())
    if closed_form or not can_run():
        shape = *sde.batch_shape, len(lags), n, n
        found = (of(lags).expand(shape) for of in (sde.transition, sde.covariance))
        transition, variance = (x.reshape(sde.batch_shape.numel(), *shape[-3:]) for x in found)
        return transition, variance
    matrices = torch.broadcast_tensors(dynamics.detach(), sde.diffusion.detach())
    dynamics, diffusion = (x.reshape(-1, n, n).contiguous() for x in matrices)
    b = len(dynamics)
    transition, variance = (lags.new_zeros(b, len(lags), n, n) for _ in range(2))
    given = {"dynamics": dynamics, "diffusion": diffusion, "lags": lags.contiguous()}
    problem = LagsProblem(b, len(lags), n, threads_for(b, len(lags), n))
    run("transitions", problem, **given, transition=transition, variance=variance)
    return transition, variance
