"""Series as users have them, tensors, NumPy arrays, pandas objects or lists, as tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rfa.checks import as_array, require

# (times, values), or a mapping with these entries and others
SeriesExample = tuple[Any, Any] | Mapping[str, Any]


def times_and_values(
    example: SeriesExample,
) -> tuple[Shaped[Tensor, " length"], Float[Tensor, "length channels"]]:
    """Times as they are, lists of numbers in float64, and values in a floating-point dtype.

    Args:
        example: times `(length,)`, in order; values `(length, channels)`, or `(length,)` for one channel, with NaN
            where nothing was read.

    Raises:
        ValueError: naming the entry, for other shapes, something that is no number, or infinite values.
    """
    if isinstance(example, Mapping):
        for name in ("times", "values"):
            require(name in example, "series", sorted(map(str, example)), f"an entry {name!r}")
        given = example["times"], example["values"]
    else:
        pair = isinstance(example, tuple | list) and len(example) == 2
        require(pair, "series", type(example).__name__, "(times, values), or a mapping with these entries")
        given = example[0], example[1]
    times, values = (numbers(name, each) for name, each in zip(("times", "values"), given, strict=True))
    values = values[:, None] if values.dim() == 1 else values
    values = values if values.is_floating_point() else values.to(torch.float64)
    for name, each, dimensions in (("times", times, 1), ("values", values, 2)):
        require(each.dim() == dimensions, name, tuple(each.shape), f"{dimensions} dimensions")
    require(len(times) == len(values), "values", tuple(values.shape), f"one row for each of {len(times)} times")
    require(not bool(values.isinf().any()), "values", "infinite values", "finite values, or NaN where nothing was read")
    return times, values


def numbers(name: str, given: Any) -> Shaped[Tensor, "*shape"]:
    """Numbers as a tensor, NaN where something is missing.

    Lists become float64: in float32 a clock of seconds since 1970 would lose its minutes.

    Raises:
        ValueError: for text, dates, nothing, or lists of different lengths.
    """
    if isinstance(given, Tensor):
        found = given
    else:
        try:
            array = as_array(given)
            found = torch.as_tensor(array if array.dtype != object else array.astype(np.float64))
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{name}: got {type(given).__name__} ({reason}), expected numbers") from None
    require(not found.is_complex() and found.dtype != torch.bool, name, found.dtype, "real numbers")
    return found
