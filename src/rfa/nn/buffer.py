"""A tensor that grows token by token without being copied each time."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

_SPARE = 64  # entries that a growing buffer leaves room for at least


class Buffer:
    """A tensor that grows along one dimension, with spare room behind its entries.

    The room grows by half at a time, so that all appends together copy each entry a constant number of times. Tensors
    that are given are copied, never kept. Storage is written in place only if it was made here without gradients.
    With gradients a graph may hold the earlier entries, so every append makes a new tensor.

    Args:
        dim: the dimension that grows, counted from the front.
        room: the most entries, for which room is made at the first append; None for no limit.
    """

    def __init__(self, dim: int, room: int | None = None):
        self.dim, self.room, self.length = dim, room, 0
        self._storage: Tensor | None = None
        self._owned = False

    @property
    def filled(self) -> Tensor | None:
        """A view of all entries; None before the first append."""
        return None if self._storage is None else self._storage.narrow(self.dim, 0, self.length)

    def fits(self, new: Tensor) -> bool:
        """Whether `new` differs from the entries so far, if there are any, in nothing but their number."""
        held, dim = self._storage, self.dim
        if held is None or not self.length:
            return True
        shape = [*held.shape]
        shape[dim] = new.shape[dim]
        return shape == [*new.shape] and held.dtype == new.dtype and held.device == new.device

    def append(self, new: Tensor) -> Tensor:
        """Write `new` behind the other entries, and return all of them; at first that is `new` itself.

        Raises:
            ValueError: for more entries than there is room for.
        """
        start = self.length
        if torch.is_grad_enabled():
            self._check_room(start + new.shape[self.dim])
            earlier = cast(Tensor, self.filled) if start else new.narrow(self.dim, 0, 0)
            self._storage, self._owned = torch.cat([earlier, new], dim=self.dim), False
            self.length = self._storage.shape[self.dim]
            return self._storage
        self.extend(new.shape, new).copy_(new)
        return cast(Tensor, self.filled) if start else new

    def extend(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Room behind the other entries for new ones of this shape, which the caller writes, without gradients.

        They are of `like`'s dtype or another.

        Raises:
            ValueError: for more entries than there is room for.
        """
        start = self.length
        return self.lengthen(shape, like, dtype).narrow(self.dim, start, shape[self.dim])

    def lengthen(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As `extend`, but all of the storage: entries, the new ones to be written behind them, and spare room."""
        start, length = self.length, self.length + shape[self.dim]
        self._check_room(length)
        storage = self._storage
        if storage is None or start == 0:
            empty = (*shape[: self.dim], 0, *shape[self.dim + 1 :])
            storage, self._owned = like.new_empty(empty, dtype=dtype), False
        # a compiler can ask neither, and a compiled function keeps to one mode
        same_mode = torch.compiler.is_compiling() or storage.is_inference() == torch.is_inference_mode_enabled()
        if not (self._owned and same_mode and length <= storage.shape[self.dim]):
            storage, self._owned = self._with_room(storage.narrow(self.dim, 0, start), length), True
        self._storage, self.length = storage, length
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

    def crop(self, length: int) -> None:
        """Remove all entries behind the first `length`; their room stays."""
        self.length = min(self.length, length)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor, its room included, by a function of it that keeps the growing dimension."""
        if self._storage is not None:
            self._storage = function(self._storage)
