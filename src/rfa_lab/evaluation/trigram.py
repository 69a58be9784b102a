"""A 3-gram by modified Kneser-Ney, trained on the tokens of a run: it says how much a model gains from longer context.

Source: Chen and Goodman, An empirical study of smoothing techniques for language modeling, 1999, sections 3 and 4.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Int

from rfa_lab.data import document_of_token

from .perplexity import LossByDocument, LossByPosition, Window, score_windows
from .probes import TRIALS, ProbeKind, planned_trials, probe_layout

ORDER = 3
_AT_ONCE = 2**20  # targets
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
        if not vocabulary >= 1 or vocabulary**ORDER > _LARGEST:
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
        return np.minimum(found, 1.0)  # a sum of float64 may be a little above


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


def trigram_losses(
    trigram: Trigram, stream: Int[np.ndarray, " tokens"], chosen: Sequence[Window]
) -> Iterator[Float[np.ndarray, "windows targets"]]:
    """The losses of the targets of windows, in nats, in order: arrays `(windows, targets)`.

    A token sees the tokens of its window only: of the second token of a window the context is one token.
    """
    for targets, group in itertools.groupby(chosen, lambda window: window.targets):
        limits = np.array([(window.start, window.stop) for window in group])
        for some in np.array_split(limits, -(-len(limits) * targets // _AT_ONCE)):
            at = some[:, 1:] + np.arange(-targets, 0)
            second = at == some[:, :1] + 1
            found = np.empty(at.shape)
            found[~second] = trigram.probability(*(stream[at[~second] - back] for back in (2, 1, 0)))
            found[second] = trigram.probability(None, *(stream[at[second] - back] for back in (1, 0)))
            yield -np.log(found)


def evaluate_trigram(
    trigram: Trigram,
    stream: Int[np.ndarray, " tokens"],
    names: Sequence[str],
    tokenizer: Any,
    *,
    train_length: int,
    lengths: Sequence[int],
    protocols: Mapping[str, int | None],
    by_position: bool = False,
    passkey: bool = False,
) -> dict[str, Any]:
    """The evaluation of `full_evaluation` with a trigram in place of a model: the same targets of the same text.

    Args:
        trigram: trained.
        stream: token ids of the test split.
        names: of its documents.
        tokenizer: of the stream.
        train_length: of the models, in tokens.
        lengths, protocols, by_position: as for `full_evaluation`.
        passkey: also the loss of the keys of the probes where they stand for the second time. No trigram sees their
            first copy.

    Returns:
        `evaluations` and `by_position` as of `full_evaluation`, and `passkey`: for each probe `trials`, `seed`,
        `key_tokens` and `rows` with `distance` and `loss_by_token`. An entry that was not asked for is None.

    Raises:
        ValueError: as `perplexities` and `probe`.
    """
    longest, documents = max(lengths), document_of_token(stream, tokenizer.eos_token_id)
    positions, evaluations = LossByPosition(longest), {}

    def score(chosen: Sequence[Window]) -> Iterator[np.ndarray]:
        return trigram_losses(trigram, stream, chosen)

    for protocol, scored in protocols.items():
        books = LossByDocument(names, documents)
        rows = score_windows(score, len(stream), lengths, protocol, scored=scored, observe=books)
        evaluations[protocol] = {"rows": rows, "books": books.totals()}
    by = None
    if by_position:
        score_windows(score, len(stream), [longest], scored=protocols.get("blocks"), observe=positions)
        by = {"protocol": "blocks", "length": longest, "loss": positions.means(), "windows": positions.windows}
    probes = None
    if passkey:
        given = (stream, train_length, longest, tokenizer)
        probes = {kind: _key_losses(trigram, kind, *given) for kind in get_args(ProbeKind)}
    return {"evaluations": evaluations, "by_position": by, "passkey": probes}


def _key_losses(
    trigram: Trigram, kind: ProbeKind, stream: np.ndarray, train_length: int, longest: int, tokenizer: Any
) -> dict[str, Any]:
    layout, distances = probe_layout(kind, stream, train_length, longest, tokenizer)
    rows = []
    for distance in distances:
        ids = np.stack([trial.ids for trial in planned_trials(layout, stream, distance)])
        places = np.arange(ids.shape[1] - layout.key, ids.shape[1])
        found = trigram.probability(*(ids[:, places - back] for back in (2, 1, 0)))
        rows.append({"distance": distance, "loss_by_token": (-np.log(found)).mean(0).tolist()})
    return {"trials": TRIALS, "seed": 0, "key_tokens": layout.key, "rows": rows}
