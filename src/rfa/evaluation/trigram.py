"""A 3-gram by modified Kneser-Ney, trained on the tokens of a run: it says how much a model gains from longer context.

Source: Chen and Goodman, An empirical study of smoothing techniques for language modeling, 1999, sections 3 and 4.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

ORDER = 3
_LARGEST = 2**63 - 1  # of the numbers that stand for three tokens


class _Level(NamedTuple):
    """The counts of one order. A number `context * vocabulary + token` stands for an n-gram.

    grams, kept: the n-grams that occur, ascending, and their counts less the discount.
    contexts, total, left: the contexts that occur, ascending, the sum of their counts, and the sum of discounts.
    """

    grams: np.ndarray
    kept: np.ndarray
    contexts: np.ndarray
    total: np.ndarray
    left: np.ndarray


class Trigram:
    r"""Interpolated modified Kneser-Ney of order 3 over token ids.

        p_3(w | u v) = (c(u v w) - D_3(c(u v w)) + g(u v) p_2(w | v)) / sum_w' c(u v w')
        p_2(w | v)   = the same with N(. v w), the number of different tokens before v w, in place of counts
        p_1(w)       = the same with N(. w), the number of different tokens before w, and 1 / vocabulary below it

    `g` is the sum of the discounts of a context, so that each distribution sums to one. `D_n(c)` is one of three
    discounts, for c = 1, c = 2 and c >= 3: `D(c) = c - (c + 1) Y n_(c+1) / n_c` with `Y = n_1 / (n_1 + 2 n_2)`, where
    n_c is the number of n-grams that occur c times. An order in which one of n_1 to n_4 is 0, or a discount is not
    positive, has the discount 1/2 (tiny texts only). In a context that never occurred p_3 is p_2, and p_2 is p_1.

    Args:
        blocks: token ids of the training text, one block a row. No n-gram reaches from one block into the next.
        vocabulary: number of token ids.

    Raises:
        ValueError: for blocks shorter than three tokens, no block, ids outside the vocabulary, or a vocabulary so large
            that three tokens have no 64-bit number.
    """

    def __init__(self, blocks: Int[np.ndarray, "blocks length"], vocabulary: int):
        if blocks.ndim != 2 or not len(blocks) or blocks.shape[1] < ORDER:
            raise ValueError(f"blocks: got shape {blocks.shape}, expected at least one block of {ORDER} tokens or more")
        if not 1 <= vocabulary or vocabulary**ORDER > _LARGEST:
            raise ValueError(f"vocabulary: got {vocabulary}, expected 1 to {int(_LARGEST ** (1 / ORDER))} tokens")
        if blocks.min() < 0 or blocks.max() >= vocabulary:
            found = f"{blocks.min()} to {blocks.max()}"
            raise ValueError(f"blocks: got ids from {found}, expected 0 to {vocabulary - 1}")
        self.vocabulary = vocabulary
        ids = blocks.astype(np.int64)
        grams = ((ids[:, :-2] * vocabulary + ids[:, 1:-1]) * vocabulary + ids[:, 2:]).ravel()
        self._levels: list[_Level] = []  # of three tokens, two and one
        for order in range(ORDER, 0, -1):
            # an n-gram of a lower order counts once for each different token before it
            grams, counts = np.unique(grams, return_counts=True)
            self._levels.append(_level(grams, counts, vocabulary))
            grams = grams % vocabulary ** (order - 1)

    def probability(
        self,
        before: Int[np.ndarray, " n"] | None,
        last: Int[np.ndarray, " n"],
        token: Int[np.ndarray, " n"],
    ) -> Float[np.ndarray, " n"]:
        """`p_3(token | before last)`, or `p_2(token | last)`.

        Args:
            before, last: the two tokens before; no `before` for a context of one token.
            token: whose probability is asked.

        Returns:
            Probabilities, above 0.
        """
        last, token = last.astype(np.int64), token.astype(np.int64)
        contexts = [np.zeros_like(last), last]
        if before is not None:
            contexts.append(before.astype(np.int64) * self.vocabulary + last)
        found = np.full(token.shape, 1 / self.vocabulary)
        for level, context in zip(reversed(self._levels), contexts, strict=False):
            total = _look_up(level.contexts, level.total, context)
            kept = _look_up(level.grams, level.kept, context * self.vocabulary + token)
            left = _look_up(level.contexts, level.left, context)
            found = np.where(total > 0, (kept + left * found) / np.maximum(total, 1), found)
        return found


def _level(grams: np.ndarray, counts: np.ndarray, vocabulary: int) -> _Level:
    discount = _discounts(counts)[np.minimum(counts, 3)]
    context = grams // vocabulary
    starts = np.flatnonzero(np.r_[True, context[1:] != context[:-1]])
    sums = (np.add.reduceat(values, starts) for values in (counts.astype(float), discount))
    return _Level(grams, counts - discount, context[starts], *sums)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """The discounts of n-grams that occur 0, 1, 2 and at least 3 times."""
    n1, n2, n3, n4 = (np.count_nonzero(counts == times) for times in (1, 2, 3, 4))
    if n1 and n2 and n3 and n4:
        y = n1 / (n1 + 2 * n2)
        found = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if (found[1:] > 0).all():
            return found
    return np.array([0, 0.5, 0.5, 0.5])


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of keys, which are ascending; 0 for a key that is not there."""
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)
