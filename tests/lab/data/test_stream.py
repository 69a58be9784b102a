"""Token streams against the ids of whole texts, blocks of them, and corpora that are prepared."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rfa_lab.data import TokenBlocks, load_documents, load_tokenizer, prepare, stream, text_document, token_stream

TEXTS = ["It's one.\n\n  Two  words, 3rd line\n", "é 字 🙂" * 50, "<|endoftext|> in a text"]

DOCUMENTS = [text_document(str(i), text) for i, text in enumerate(TEXTS)]

BYTES = load_tokenizer("bytes")


def test_bytes_stream_is_the_bytes(tmp_path):
    ids = token_stream(DOCUMENTS, BYTES, tmp_path)
    assert isinstance(ids, np.memmap)
    assert ids.dtype == np.uint16
    expected = [id for text in TEXTS for id in [*text.encode(), 256]]
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize("text", ["字典、人一。", "ab1,a's!"])
def test_text_without_spaces_has_the_ids_of_the_whole(tmp_path, monkeypatch, text):
    """Cut in fragments all the same, tokenised a few at a time."""
    monkeypatch.setattr("rfa_lab.data.documents.SLICE", 700)
    monkeypatch.setattr(stream, "BATCH_BYTES", 2000)
    tokenizer = load_tokenizer("bpe:300", [text_document("t", f"{text} {text}")], tmp_path)
    ids = token_stream([text_document("d", 40 * text), text_document("e", "")], tokenizer, tmp_path)
    np.testing.assert_array_equal(ids, [*tokenizer.encode(40 * text), *2 * [tokenizer.eos_token_id]])


def test_a_tokenizer_set_to_truncate_loses_nothing(tmp_path):
    tokenizer = load_tokenizer("bytes")
    tokenizer(TEXTS[0], truncation=True, max_length=2)
    assert len(token_stream(DOCUMENTS, tokenizer, tmp_path)) == sum(len(t.encode()) + 1 for t in TEXTS)
    assert len(list(tmp_path.rglob("*.uint16"))) == 1
    token_stream(DOCUMENTS, BYTES, tmp_path)
    assert len(list(tmp_path.rglob("*.uint16"))) == 1  # the same content, the same tokenizer


def test_bad_text_leaves_no_file(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good text " * 10_000 + b"\xe9")
    with pytest.raises(ValueError, match=r"'bad\.txt' with byte 0xe9 at offset 100000"):
        token_stream(load_documents(str(tmp_path / "bad.txt")), BYTES, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*uint16*") if path.suffix != ".lock"] == []


@given(st.integers(2, 200), st.integers(2, 50))
def test_blocks_are_the_stream_in_order(tokens, length):
    stream = np.arange(tokens, dtype=np.uint16)
    if tokens < length:
        with pytest.raises(ValueError, match=f"got {tokens} tokens, expected at least {length}"):
            TokenBlocks(stream, length)
        return
    blocks = TokenBlocks(stream, length)
    assert len(blocks) == tokens // length
    joined = torch.cat([block["input_ids"] for block in blocks])
    assert joined.tolist() == list(range(len(blocks) * length))


def test_ids_are_long_whole_and_their_own():
    dtype = np.uint32
    stream = np.full(4, np.iinfo(dtype).max, dtype)
    stream.flags.writeable = False
    block = TokenBlocks(stream, 2)[1]
    assert block["input_ids"].tolist() == [np.iinfo(dtype).max] * 2
    assert block["input_ids"].dtype == block["labels"].dtype == torch.int64
    block["labels"][0] = -100
    assert block["input_ids"][0] == np.iinfo(dtype).max


@pytest.fixture
def books(tmp_path):
    for index in range(5):
        (tmp_path / f"A{index}_book.txt").write_text(f"text {index} of this corpus\n" * 50)
    return tmp_path


def test_prepare(books, tmp_path):
    seen = []
    data = prepare(
        str(books), "bpe:270", "author:test=A1;valid=A3", cache_dir=tmp_path / "c", progress=lambda *a: seen.append(a)
    )
    assert data.corpus == str(books)
    assert len(data.tokenizer) == 270
    assert data.tokenizer.decode(data.streams["test"]) == "text 1 of this corpus\n" * 50 + "<|endoftext|>"
    assert data.tokenizer.decode(data.streams["valid"]).startswith("text 3")
    assert (data.streams["train"] == 269).sum() == 3
    total = sum(path.stat().st_size for path in books.glob("*.txt"))
    trained_on = total - sum((books / f"A{index}_book.txt").stat().st_size for index in (1, 3))
    first = seen.index((trained_on, trained_on))  # the end of the tokenizer's training; then comes the reading
    for part, size in ((seen[: first + 1], trained_on), (seen[first + 1 :], total)):
        assert part[-1] == (size, size)
        assert [done for done, _ in part] == sorted(done for done, _ in part)

    again = prepare(str(books), "bpe:270", "author:test=A1;valid=A3", cache_dir=tmp_path / "c")
    assert again.fingerprint == data.fingerprint
    assert all(np.array_equal(again.streams[split], stream) for split, stream in data.streams.items())
    (books / "A1_book.txt").write_text("other text\n")
    other = prepare(str(books), "bpe:270", "author:test=A1;valid=A3", cache_dir=tmp_path / "c")
    assert other.fingerprint != data.fingerprint


def test_only_the_splits_asked_for(books, tmp_path):
    data = prepare(str(books), "bytes", splits=("test",), cache_dir=tmp_path / "c")
    assert list(data.streams) == ["test"]
    assert len(list((tmp_path / "c").rglob("*.uint16"))) == 1
    with pytest.raises(ValueError, match="got 'dev'"):
        prepare(str(books), "bytes", splits=("dev",), cache_dir=tmp_path / "c")
