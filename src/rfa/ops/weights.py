"""The attention weights of a forward pass. While they are recorded, operators run as dense code and note them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class WeightedRows(NamedTuple):
    """The weights of some query rows, in the order in which they were computed.

    Fields:
        weights: `(batch, heads, rows, keys)` after the softmax, before decay and dropout.
        log_sum: `log sum_j exp(score_ij)`, `(batch, heads, rows)`.
        first_key: the index of the first of these keys.
    """

    weights: Tensor
    log_sum: Tensor
    first_key: int


_note: ContextVar[Callable[[WeightedRows], None] | None] = ContextVar("rfa_weights", default=None)


@contextmanager
def recorded_weights(note: Callable[[WeightedRows], None] | None = None) -> Iterator[list[WeightedRows]]:
    """Within it, operators take the reference backend and add their rows to the list, or hand them to `note`."""
    rows: list[WeightedRows] = []
    token = _note.set(rows.append if note is None else note)
    try:
        yield rows
    finally:
        _note.reset(token)


def recording() -> bool:
    """Whether weights are recorded. A compiled program never records them."""
    return not torch.compiler.is_compiling() and _note.get() is not None


def record(score: Tensor, first_key: int = 0) -> None:
    """Note the weights of rows with these scores in nats, -inf where a key is not seen, where they are recorded."""
    if recording() and (note := _note.get()) is not None:
        note(WeightedRows(score.softmax(-1), score.logsumexp(-1), first_key))


def joined(rows: list[WeightedRows], visible: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and log sums of all rows of one operator.

    Args:
        rows: as recorded.
        visible: `(b, queries, keys)`, True where a query sees a key.

    Returns:
        `(batch, heads, queries, keys)` and `(batch, heads, queries)`: 0 for a key that is not seen, -inf for a query
        that sees no key.
    """
    keys = visible.shape[-1]
    padded = [F.pad(w, (first, keys - first - w.shape[-1])) for w, _, first in rows]
    unseen = ~visible[:, None]
    log_sum = torch.cat([part.log_sum for part in rows], dim=2)
    return torch.cat(padded, dim=2).masked_fill(unseen, 0.0), log_sum.masked_fill(unseen.all(-1), -torch.inf)
