"""A corpus as token streams: flat memory-mapped arrays of ids, made once; and the blocks of such a stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Int64, UInt
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from rfa.checks import require
from rfa.files import cache_folder, cached_file
from rfa.progress import Progress

from .corpora import load_corpus
from .documents import SPLITS, Document, fingerprint, text_fragments
from .tokenization import load_tokenizer

BATCH_BYTES = 1 << 22  # size of the text that is tokenised at once; it may be larger by one fragment


def token_stream(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerFast,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> np.memmap:
    """Return the documents' token ids, joined, each document followed by the end-of-text id.

    Special tokens that are spelled out in a text count as text. Only ends of documents have the end-of-text id. The
    stream is stored in the cache folder under the sha256 of content and tokenizer. Memory stays bounded: text is read,
    tokenised on all cores and written a few megabytes at a time.

    Args:
        documents: texts, in order.
        tokenizer: a byte-level tokenizer, from `load_tokenizer` or a run folder.
        cache_dir: default as in `cache_folder`.
        progress: called with the bytes done so far and their total, during the work and once at the end.

    Returns:
        Ids of shape `(tokens,)`, read-only. They are uint16 for a vocabulary of at most 65,536 entries, else uint32.

    Raises:
        ValueError: if a document is not UTF-8 or has a word of more than a million characters, or if the tokenizer has
            no end-of-text token.
        OSError: if the cache cannot be written, for example because the disk is full. No partial file is left.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError(f"tokenizer: got {tokenizer.name_or_path!r} without an end-of-text token, expected one")
    backend = _plain_backend(tokenizer)
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    total = sum(document.size for document in documents)
    report = progress or (lambda done, total: None)

    def write(file: BinaryIO) -> None:
        for ids in _encode(documents, backend, end, lambda done: report(done, total)):
            file.write(np.asarray(ids, dtype).data)

    key = hashlib.sha256(f"{fingerprint(documents)} {end} {backend.to_str()}".encode())
    path = cached_file(cache_folder(cache_dir) / "tokens" / f"{key.hexdigest()}.{dtype.name}", write)
    report(total, total)
    return np.memmap(path, dtype, mode="r")


def document_of_token(stream: np.ndarray, end: int) -> np.ndarray:
    """Return the index of the document of each token of a stream, `(tokens,)`, counted from 0.

    A text never has the end-of-text id, so this id marks the ends of documents. It belongs to the document it ends.

    Args:
        stream: from `token_stream`, or the first part of such a stream.
        end: the tokenizer's end-of-text id.
    """
    ends = np.asarray(stream) == end
    return np.cumsum(ends, dtype=np.int32) - ends


def _plain_backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a copy of the Rust tokenizer that does not truncate, pad, or recognise special tokens in a text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _encode(
    documents: Sequence[Document], backend: Tokenizer, end: int, report: Callable[[int], None]
) -> Iterator[list[int]]:
    """Yield the ids of all documents, in order, one fragment at a time."""
    model = json.loads(backend.to_str())["model"]
    anywhere = model.get("type") == "BPE" and not model.get("merges")  # without merges each token is one byte
    work = (fragment for document in documents for fragment in text_fragments(document, anywhere))
    done = 0
    for batch, size in _batches(work):
        encodings = backend.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for encoding, (_, is_last) in zip(encodings, batch, strict=True):
            yield [*encoding.ids, end] if is_last else encoding.ids
        done += size
        report(done)


def _batches(work: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[tuple[str, bool]], int]]:
    """Yield lists of fragments with about `BATCH_BYTES` in all, and their number of bytes."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for fragment in work:
        batch.append(fragment)
        size += len(fragment[0].encode())
        if size >= BATCH_BYTES:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """The non-overlapping blocks of a token stream, in order. An incomplete block at the end is left out.

    Args:
        stream: token ids.
        length: tokens of a block, at least 2, because a model predicts all but the first.
        name: name of the stream in error messages.

    Raises:
        ValueError: if blocks are too short, or the stream is shorter than one block.
    """

    def __init__(self, stream: UInt[np.ndarray, " tokens"], length: int, name: str = "text"):
        require(length >= 2, "length", length, "at least 2 tokens a block")
        if len(stream) < length:
            raise ValueError(f"{name}: got {len(stream)} tokens, expected at least {length}, the length of one block")
        self.stream = stream
        self.length = length

    def __len__(self) -> int:
        return len(self.stream) // self.length

    def __getitem__(self, index: int) -> dict[str, Int64[Tensor, " length"]]:
        """Return block `index` as `input_ids` and as `labels`. Both are equal, because the model shifts the labels."""
        if not 0 <= index < len(self):
            raise IndexError(f"block: got {index}, expected 0 to {len(self) - 1}")
        block = self.stream[index * self.length : (index + 1) * self.length]
        ids = torch.from_numpy(block.astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


def evenly_spaced(total: int, count: int) -> list[int]:
    """`count` of the numbers 0 .. total - 1, each in the middle of one of `count` equal parts.

    The result has at least one and at most all of the numbers.
    """
    count = min(max(count, 1), total)
    return [(2 * part + 1) * total // (2 * count) for part in range(count)]


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
            the same way for the training split, while a tokenizer is trained.

    Raises:
        ValueError: for a corpus, tokenizer or split that is unknown, cannot be loaded or is not UTF-8 text.
        OSError: if the cache cannot be written.
    """
    corpus = load_corpus(data, split_by)
    loaded = tokenizer
    if isinstance(loaded, str):
        loaded = load_tokenizer(loaded, corpus.documents("train"), cache_dir, progress)
    sizes = {split: sum(document.size for document in corpus.documents(split)) for split in splits}
    streams: dict[str, np.memmap] = {}
    for split in splits:
        before = sum(sizes[other] for other in streams)

        def report(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, sum(sizes.values()))

        streams[split] = token_stream(corpus.documents(split), loaded, cache_dir, report)
    fingerprints = {split: fingerprint(corpus.documents(split)) for split in splits}
    return PreparedData(corpus.name, corpus.split_note, fingerprints, loaded, streams)
