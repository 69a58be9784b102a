"""A tensor that grows token by token without being copied each time."""

from collections.abc import Callable

import torch
from torch import Tensor

_SPARE = 64  # entries that a growing buffer leaves room for at least


class Buffer:
    """A tensor that grows along one dimension into room kept behind what is written.

    Room grows by half at a time, so that all appends together copy each entry a constant number of times. Nothing
    given is kept, and nothing is written in place but into storage that was made here without gradients: where they
    are on, a graph may hold what was written before, and every append makes a new tensor.

    Args:
        dim: the dimension that grows, counted from the front.
    """

    def __init__(self, dim: int):
        self.dim, self.length = dim, 0
        self._storage: Tensor | None = None
        self._owned = False

    @property
    def filled(self) -> Tensor | None:
        """What is written, a view; None before the first append."""
        return None if self._storage is None else self._storage.narrow(self.dim, 0, self.length)

    def append(self, new: Tensor) -> Tensor:
        """Write `new` behind the rest, and return everything; at first that is `new` itself."""
        start, length = self.length, self.length + new.shape[self.dim]
        storage = self._storage
        if storage is None or start == 0:
            storage, self._owned = new.narrow(self.dim, 0, 0), False
        past = storage.narrow(self.dim, 0, start)
        if torch.is_grad_enabled():
            storage, self._owned = torch.cat([past, new], dim=self.dim), False
        else:
            same_mode = storage.is_inference() == torch.is_inference_mode_enabled()
            if not (self._owned and same_mode and length <= storage.shape[self.dim]):
                storage, self._owned = self._roomy(past, length), True
            storage.narrow(self.dim, start, length - start).copy_(new)
        self._storage, self.length = storage, length
        return storage.narrow(self.dim, 0, length) if start else new

    def _roomy(self, past: Tensor, needed: int) -> Tensor:
        shape = list(past.shape)
        shape[self.dim] = needed + max(_SPARE, needed // 2)
        storage = past.new_empty(shape)
        storage.narrow(self.dim, 0, past.shape[self.dim]).copy_(past)
        return storage

    def crop(self, length: int) -> None:
        """Forget what stands behind the first `length` entries; their room stays."""
        self.length = min(self.length, length)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor, its room included, by a function of it that keeps the growing dimension."""
        if self._storage is not None:
            self._storage = function(self._storage)
