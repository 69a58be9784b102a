"""Tokenizers: GPT-2's vocabulary, byte pairs trained on the text, or bytes.

All are byte-level, so decoding gives back the exact text. All end a document with `<|endoftext|>`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rfa.files import cache_folder, cached_file
from rfa.progress import Progress

from .documents import Document, fingerprint, text_fragments
from .sources import hub_files

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # 256 bytes and the end of text
LARGEST_VOCABULARY = 10_000_000
TRAINING_BYTES = 32_000_000
GPT2_REPOSITORY = "openai-community/gpt2"
GPT2_FILES = ("vocab.json", "merges.txt")
GPT2_FOLDER_FILES = ("encoder.json", "vocab.bpe")
_FORMS = "gpt2, gpt2:FOLDER, bpe:N or bytes"


def load_tokenizer(
    spec: str,
    train_documents: Sequence[Document] | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `spec` names.

    Args:
        spec: `gpt2` (vocabulary from the Hugging Face hub), `gpt2:FOLDER` (from `encoder.json` and `vocab.bpe` in that
            folder), `bpe:N` (byte-level byte pairs trained on `train_documents`, at most `N` entries), or `bytes` (the
            id is the byte).
        train_documents: training text of `bpe:N`. Up to 32 MB all of it is used, otherwise every k-th fragment.
        cache_dir: folder of trained tokenizers; default as in `cache_folder`.
        progress: called with the bytes read so far and their total while a tokenizer is trained.

    Returns:
        A tokenizer with `eos_token` `<|endoftext|>`, whose id is the last one. `decode(encode(text)) == text`.

    Raises:
        ValueError: for an unknown tokenizer, a vocabulary that is too small, no text to train on, missing or damaged
            files, or no access to the hub.
    """
    check_tokenizer(spec)
    kind, _, argument = spec.partition(":")
    if spec == "bytes":
        backend = _byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[]), use_regex=False)
    elif spec == "gpt2":
        vocabulary, merges = hub_files(GPT2_REPOSITORY, GPT2_FILES, "gpt2:FOLDER, bpe:N or bytes")
        backend = _gpt2(vocabulary, merges)
    elif kind == "gpt2":
        backend = _gpt2(*(Path(argument, name) for name in GPT2_FOLDER_FILES))
    else:
        backend = _train_tokenizer(int(argument), train_documents, cache_folder(cache_dir), progress)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)


def check_tokenizer(spec: str) -> None:
    """Raise `ValueError` for a name that `load_tokenizer` does not know. Nothing is read."""
    kind, _, argument = spec.partition(":")
    sized = kind == "bpe" and argument.isascii() and argument.isdecimal()
    if not (spec in ("bytes", "gpt2") or (kind == "gpt2" and argument) or sized):
        raise ValueError(f"tokenizer: got {spec!r}, expected {_FORMS}")
    if sized and int(argument) < SMALLEST_VOCABULARY:
        raise ValueError(f"tokenizer: got {spec}, expected at least bpe:{SMALLEST_VOCABULARY} (256 bytes, end of text)")
    if sized and int(argument) > LARGEST_VOCABULARY:
        raise ValueError(f"tokenizer: got {spec}, expected at most bpe:{LARGEST_VOCABULARY}")


def _byte_level(model: models.BPE, use_regex: bool = True) -> Tokenizer:
    """Return a byte-level tokenizer of a model, with GPT-2's pre-tokenisation if `use_regex`."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """Return GPT-2's printable character for each byte: the byte itself if printable, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 0x100 + others.index(byte)): byte for byte in range(256)}


def _gpt2(vocabulary: Path, merges: Path) -> Tokenizer:
    for path in (vocabulary, merges):
        if not path.is_file():
            raise ValueError(f"tokenizer: got no file {str(path)!r}, expected GPT-2's vocabulary there")
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
        if lost := [symbol for symbol in _byte_vocabulary() if model.token_to_id(symbol) is None]:
            raise ValueError(f"no entry for {len(lost)} of the 256 bytes, whose text would be dropped")
        return _byte_level(model)
    except Exception as error:  # tokenizers raises plain `Exception`
        raise ValueError(
            f"tokenizer: got unreadable {str(vocabulary)!r} or {str(merges)!r} ({error}), expected GPT-2's vocabulary"
        ) from error


def _train_tokenizer(
    size: int, documents: Sequence[Document] | None, cache: Path, progress: Progress | None
) -> Tokenizer:
    """Return a tokenizer trained on the documents. It is read from the cache if it was trained before."""
    if not documents:
        raise ValueError(f"tokenizer: got bpe:{size} without text to train on, expected training documents")
    recipe = f"{fingerprint(documents)} {size} {TRAINING_BYTES}"
    path = cache / "tokenizers" / f"{hashlib.sha256(recipe.encode()).hexdigest()}.json"

    def train(file: BinaryIO) -> None:
        alphabet, tokenizer = pre_tokenizers.ByteLevel.alphabet(), _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(_sample(documents, progress), trainer)  # the end of text comes last
        file.write(tokenizer.to_str().encode())

    return Tokenizer.from_file(str(cached_file(path, train)))


def _sample(documents: Sequence[Document], progress: Progress | None = None) -> Iterator[str]:
    """Yield every k-th fragment, with the smallest k for which they have at most about `TRAINING_BYTES`."""
    size = sum(document.size for document in documents)
    step = -(-size // TRAINING_BYTES)
    texts = (text for document in documents for text, _ in text_fragments(document))
    done = 0
    for index, text in enumerate(texts):
        if index % step == 0:
            yield text
        if progress is not None:
            done += len(text.encode())
            progress(done, size)
