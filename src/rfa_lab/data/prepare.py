"""Prepare a corpus for training: load it, load its tokenizer, and tokenise its splits."""

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
        corpus: name of the corpus.
        split_note: description of how its splits were made.
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
        """The fingerprint of all prepared splits together."""
        return self.fingerprint_of(*self.fingerprints)

    def fingerprint_of(self, *splits: str) -> str:
        """The fingerprint of some of the prepared splits, as if only these had been prepared."""
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
    """Load a corpus and its tokenizer, and tokenise its splits. Streams in the cache are used again.

    Args:
        data: as for `load_corpus`.
        tokenizer: a tokenizer, or a name as for `load_tokenizer`. `bpe:N` is trained on the training split.
        split_by: as for `load_corpus`.
        splits: the splits to prepare, of `train`, `valid` and `test`.
        cache_dir: default as in `cache_folder`.
        progress: called with the bytes done so far and their total over all these splits. Before that it is called in
            the same way for the training split, while a tokenizer is trained, and for the books of `gutenberg:LIST`.

    Raises:
        ValueError: for a corpus, tokenizer or split that is unknown, cannot be loaded or is not UTF-8 text.
        OSError: if the cache cannot be written.
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
        shifted = _shifted(progress, before, total) if progress else None
        streams[split] = token_stream(corpus.documents(split), loaded, cache_dir, shifted)
        before += sizes[split]
    fingerprints = {split: corpus.fingerprint(split) for split in splits}
    return PreparedData(corpus.name, corpus.split_note, fingerprints, loaded, streams)


def _shifted(progress: Progress, before: int, total: int) -> Progress:
    """A callback that reports the progress of one split as part of the whole."""
    return lambda done, _: progress(before + done, total)
