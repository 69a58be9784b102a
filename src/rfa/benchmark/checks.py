"""The correctness check that comes before every measurement: errors against the reference in float64."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """Of an error's norm, as a share of the norm of what is expected."""

    estimate: float
    states: float  # gradients, sums over keys that cancel the more the longer the sequence
    parameters: float  # gradients, sums over all pairs


# Half precisions round states, weights and the estimate to 11 or 8 bits.
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-3, 1e-3),
    torch.float16: Tolerance(2e-3, 5e-3, 5e-2),
    torch.bfloat16: Tolerance(2e-2, 4e-2, 2e-1),
}

Pairs = Sequence[tuple[Tensor, Tensor]]


def judge(groups: Mapping[str, tuple[Pairs, float]]) -> dict[str, Any]:
    """The largest relative error of each group of `(actual, expected)`, and whether all are within their tolerances.

    An error that is not a finite number is None, for JSON has no other word for it, and does not pass.
    """
    errors = {name: [relative_error(*pair) for pair in pairs] for name, (pairs, _) in groups.items()}
    tolerances = {name: tolerance for name, (_, tolerance) in groups.items()}
    return {
        "passed": all(error <= tolerances[name] for name, each in errors.items() for error in each),
        "tolerances": tolerances,
        "errors": {name: max(each) if all(map(math.isfinite, each)) else None for name, each in errors.items()},
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|`, in float64; the plain error where nothing but zeros is expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale or 1.0)
