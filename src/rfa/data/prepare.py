"""From what the user names to what a trainer reads: tokenizer and token streams."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from rfa.progress import Progress

from .corpora import load_corpus
from .splits import SPLITS
from .stream import token_stream
from .tokenization import load_tokenizer


@dataclass(frozen=True)
class PreparedData:
    """A corpus ready for training.

    Args:
        corpus: its name.
        split_note: how its splits were made, in words.
        fingerprints: sha256 of the content of each prepared split.
        tokenizer: the tokenizer of the streams.
        streams: token ids of each prepared split.
    """

    corpus: str
    split_note: str
    fingerprints: dict[str, str]
    tokenizer: PreTrainedTokenizerFast
    streams: dict[str, np.memmap]

    @property
    def fingerprint(self) -> str:
        """Of all prepared splits."""
        return self.fingerprint_of(*self.fingerprints)

    def fingerprint_of(self, *splits: str) -> str:
        """Of some of the prepared splits, as preparing these alone gives it."""
        return hashlib.sha256("".join(self.fingerprints[split] for split in splits).encode()).hexdigest()


def prepare(
    data: str,
    tokenizer: str | PreTrainedTokenizerFast,
    split_by: str = "file",
    *,
    splits: Sequence[str] = SPLITS,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> PreparedData:
    """Load a corpus and its tokenizer, and tokenise its splits, from the cache where that was done before.

    Args:
        data: as for `load_corpus`.
        tokenizer: a tokenizer, or as for `load_tokenizer`; `bpe:N` is trained on the training split.
        split_by: as for `load_corpus`.
        splits: those of `train`, `valid` and `test` that are wanted.
        cache_dir: default as in `cache_folder`.
        progress: called with bytes done and bytes in total over all these splits. Before that it is called in the
            same way of the training split, where a tokenizer is trained on it, and of the books of `gutenberg:LIST`.

    Raises:
        ValueError: a corpus, tokenizer or split that is unknown, cannot be had or is not UTF-8 text.
        OSError: the cache cannot be written.
    """
    corpus = load_corpus(data, split_by, progress)
    loaded = tokenizer
    if isinstance(loaded, str):
        loaded = load_tokenizer(loaded, corpus.documents("train"), cache_dir, progress)
    sizes = {split: sum(document.size for document in corpus.documents(split)) for split in splits}
    total = sum(sizes.values())
    before = 0
    streams: dict[str, np.memmap] = {}
    for split in splits:
        shifted = _shift(progress, before, total) if progress else None
        streams[split] = token_stream(corpus.documents(split), loaded, cache_dir, shifted)
        before += sizes[split]
    fingerprints = {split: corpus.fingerprint(split) for split in splits}
    return PreparedData(corpus.name, corpus.split_note, fingerprints, loaded, streams)


def _shift(progress: Progress, before: int, total: int) -> Progress:
    """Report one split's progress as part of the whole."""
    return lambda done, _: progress(before + done, total)
