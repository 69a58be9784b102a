"""Checks of what a layer is built from: each message names the argument, what was given and what was expected."""

import torch
from torch import Tensor, nn

from rfa.checks import require
from rfa.ops import problem
from rfa.ops.backends import BACKENDS
from rfa.ops.transforms import readable, values_at_hand

_MULTIPLIED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_certified(certified: object, missing: str | None) -> None:
    """Raise `ValueError` for what is neither "auto", None nor an eps, and for an eps where a bound is missing."""
    if certified != "auto":
        problem.check_certified(certified, missing)


def check_backend(name: str) -> None:
    """Raise `ValueError` for a name that no backend has; whether it serves is known with the states."""
    require(name in ("auto", *BACKENDS), "backend", name, f"'auto' or one of {list(BACKENDS)}")


def check_states(name: str, given: Tensor, size: int, projection: nn.Module) -> torch.Size:
    """The shape of tokens; `ValueError` unless they are `(batch, length, size)` in the dtype of what projects them.

    Under autocast every dtype is allowed but float64, which autocast does not change.
    """
    require(isinstance(given, Tensor), name, type(given).__name__, "a tensor")
    weight = getattr(projection.weight, "dtype", None)  # a layer of torch.ao has a method there
    fits = given.dim() == 3 and given.shape[-1] == size and given.is_floating_point()
    if fits and given.dtype != weight and weight in _MULTIPLIED:  # others are quantised, whose layers know their input
        cast_to_each_other = torch.float64 not in (given.dtype, weight)
        fits = cast_to_each_other and torch.is_autocast_enabled(given.device.type)
    if not fits:  # making the message costs more than the check
        expected = f"floating-point (batch, length, {size}) in {weight}, the weights' dtype"
        require(False, name, f"{given.dtype} {tuple(given.shape)}", expected)
    return given.shape


def check_ids(name: str, ids: Tensor, vocabulary: int, ignored: int | None = None) -> None:
    """Raise `ValueError` for ids outside the vocabulary, except the `ignored` one, where values are at hand."""
    if not values_at_hand(ids) or not ids.numel():
        return
    least, most = (int(x) for x in ids.aminmax())
    if least < 0 and ignored is not None:
        least = int(ids.masked_fill(ids == ignored, 0).min())
    expected = f"ids from 0 to {vocabulary - 1}" + ("" if ignored is None else f", or {ignored}")
    require(least >= 0 and most < vocabulary, name, least if least < 0 else most, expected)


def check_dropout(share: float, backend: str) -> None:
    """Raise `ValueError` for a dropout outside [0, 1), or one that the backend does not have."""
    require(0 <= share < 1, "dropout", share, "a share from 0 to below 1")
    served = not share or backend in ("auto", "reference")
    require(served, "backend", backend, "'auto' or 'reference' with dropout: a fused backend has no weights to drop")


def check_sizes(hidden_size: int, num_heads: int) -> None:
    """Raise `ValueError` unless the heads share the model's size evenly."""
    fits = num_heads >= 1 and hidden_size >= 1 and hidden_size % num_heads == 0
    require(fits, "hidden_size", hidden_size, f"a multiple of the number of heads, {num_heads}")


def check_rates(name: str, given: Tensor, heads: int) -> None:
    """Raise `ValueError` unless there is one finite number >= 0 a head."""
    require(tuple(given.shape) == (heads,), name, tuple(given.shape), f"shape {(heads,)}, one number a head")
    if readable(given):  # as transformers builds a model whose weights it will load
        legal = bool((given.isfinite() & (given >= 0)).all())
        require(legal, name, given.tolist(), "finite numbers >= 0")


def check_frequencies(name: str, given: Tensor, heads: int, modes: int) -> None:
    """Raise `ValueError` unless there is one finite frequency a head and mode."""
    expected = (heads, modes)
    require(tuple(given.shape) == expected, name, tuple(given.shape), f"shape {expected}, (heads, modes)")
    if readable(given):
        require(bool(given.isfinite().all()), name, given.tolist(), "finite numbers")


def paired(frequency: Tensor) -> bool:
    """Whether the modes of each head come in conjugate pairs `(w, -w)`."""
    even = frequency.shape[-1] % 2 == 0
    return even and (not readable(frequency) or bool((frequency[:, ::2] == -frequency[:, 1::2]).all()))
