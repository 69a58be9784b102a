"""Blocks: a token stream cut into training examples of one length."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int64, UInt
from torch import Tensor
from torch.utils.data import Dataset


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """The non-overlapping blocks of a token stream, in order; what remains at its end is left out.

    Args:
        stream: token ids.
        length: tokens a block, at least 2 (a model predicts all but the first).
        name: what an error calls the stream.

    Raises:
        ValueError: blocks too short, or a stream shorter than one block.
    """

    def __init__(self, stream: UInt[np.ndarray, " tokens"], length: int, name: str = "text"):
        if length < 2:
            raise ValueError(f"length: got {length}, expected at least 2 tokens a block")
        if len(stream) < length:
            raise ValueError(f"{name}: got {len(stream)} tokens, expected at least {length}, the length of one block")
        self.stream = stream
        self.length = length

    def __len__(self) -> int:
        return len(self.stream) // self.length

    def __getitem__(self, index: int) -> dict[str, Int64[Tensor, " length"]]:
        """Return block `index` as `input_ids` and, equal to them, `labels`: the model shifts inside."""
        if not 0 <= index < len(self):
            raise IndexError(f"block: got {index}, expected 0 to {len(self) - 1}")
        block = self.stream[index * self.length : (index + 1) * self.length]
        ids = torch.from_numpy(block.astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


def evenly_spaced(total: int, count: int) -> list[int]:
    """`count` of the numbers 0 .. total - 1, each in the middle of an equal part; at least one, at most all."""
    count = min(max(count, 1), total)
    return [(2 * place + 1) * total // (2 * count) for place in range(count)]
