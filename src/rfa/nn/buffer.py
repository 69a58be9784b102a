"""A tensor that grows token by token without being copied each time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_SPARE = 64  # entries that a growing buffer leaves room for at least


class Buffer:
    """A tensor that grows along one dimension, with spare room behind its entries.

    How many entries it has is the owner's to know, who may have several buffers that grow together. So entries are
    written first and counted last, and a call that is broken off in between has changed nothing.

    The room grows by half at a time, so that all writes together copy each entry a constant number of times. Tensors
    that are given are copied, never kept. Storage is written in place only if it was made here without gradients.
    With gradients a graph may hold the earlier entries, so every write makes a new tensor.

    Args:
        dim: the dimension that grows, counted from the front.
        room: the most entries, for which room is made at the first write; None for no limit.
    """

    def __init__(self, dim: int, room: int | None = None):
        self.dim, self.room = dim, room
        self._storage: Tensor | None = None
        self._owned = False

    def first(self, length: int) -> Tensor | None:
        """A view of the first `length` entries; None before the first write."""
        return None if self._storage is None else self._storage.narrow(self.dim, 0, length)

    def fits(self, new: Tensor) -> bool:
        """Whether there are entries, and `new` differs from them in nothing but their number."""
        held, dim = self._storage, self.dim
        if held is None:
            return False
        shape = [*held.shape]
        shape[dim] = new.shape[dim]
        return shape == [*new.shape] and held.dtype == new.dtype and held.device == new.device

    def write(self, length: int, new: Tensor) -> Tensor:
        """Write `new` behind the first `length` entries, and return all of them; at first that is `new` itself.

        Raises:
            ValueError: for more entries than there is room for.
        """
        added = new.shape[self.dim]
        if torch.is_grad_enabled():
            self._check_room(length + added)
            earlier = self.first(length) if length else None
            both = [new.narrow(self.dim, 0, 0) if earlier is None else earlier, new]
            self._storage, self._owned = torch.cat(both, dim=self.dim), False
            return self._storage
        storage = self.reserve(length, new.shape, new)
        storage.narrow(self.dim, length, added).copy_(new)
        return storage.narrow(self.dim, 0, length + added) if length else new

    def reserve(self, length: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """All of the storage, with room behind the first `length` entries for new ones of this shape.

        The caller writes them, without gradients. They are of `like`'s dtype or another.

        Raises:
            ValueError: for more entries than there is room for.
        """
        needed = length + shape[self.dim]
        self._check_room(needed)
        storage = self._storage
        if storage is None or length == 0:
            empty = (*shape[: self.dim], 0, *shape[self.dim + 1 :])
            storage, self._owned = like.new_empty(empty, dtype=dtype), False
        # a compiler can ask neither, and a compiled function keeps to one mode
        same_mode = torch.compiler.is_compiling() or storage.is_inference() == torch.is_inference_mode_enabled()
        if not (self._owned and same_mode and needed <= storage.shape[self.dim]):
            storage = self._with_room(storage.narrow(self.dim, 0, length), needed)
            self._storage, self._owned = storage, True
        return storage

    def _check_room(self, length: int) -> None:
        if self.room is not None and length > self.room:
            raise ValueError(f"past_key_values: got {length} tokens, expected at most {self.room}, its max_length")

    def _with_room(self, written: Tensor, needed: int) -> Tensor:
        shape = list(written.shape)
        shape[self.dim] = needed + max(_SPARE, needed // 2) if self.room is None else self.room
        storage = written.new_empty(shape)
        storage.narrow(self.dim, 0, written.shape[self.dim]).copy_(written)
        return storage

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor, its room included, by a function of it that keeps the growing dimension."""
        if self._storage is not None:
            self._storage = function(self._storage)
