"""Losses by document and by position against sums by hand."""

import numpy as np
import pytest
import torch
from cover import cover

from rfa_lab.data import document_of_token, load_tokenizer, text_document, token_stream
from rfa_lab.evaluation import LossByDocument, perplexities, windows

from .test_perplexity import full_losses, tiny

NAMES = ("long", "one token", "short", "cut off")
END = 10


@pytest.fixture
def stream():
    """Of 61, 1, 7 and 31 tokens; the last has no end."""
    ids = np.random.default_rng(0).integers(0, END, 100).astype(np.uint16)
    ids[[60, 61, 68]] = END
    return ids


def test_document_of_token(stream, tmp_path):
    assert document_of_token(stream, END).tolist() == [0] * 61 + [1] + [2] * 7 + [3] * 31
    texts = ["It's one.\n", "é 字 🙂", "<|endoftext|> in a text", "x"]
    documents = [text_document(str(place), text) for place, text in enumerate(texts)]
    tokenizer = load_tokenizer("bytes")
    places = document_of_token(token_stream(documents, tokenizer, tmp_path), tokenizer.eos_token_id)
    assert places.tolist() == [place for place, text in enumerate(texts) for _ in range(len(text.encode()) + 1)]


@cover(1, protocol=["blocks", "matched", "strided"], batch_tokens=[1, 4096])
def test_documents_add_up_to_the_row(monkeypatch, stream, protocol, batch_tokens):
    monkeypatch.setattr("rfa_lab.evaluation.perplexity.batch_tokens", lambda device: batch_tokens)
    books = LossByDocument(NAMES, document_of_token(stream, END))
    lengths, seen = [6, 24], []
    rows = perplexities(
        tiny(), stream, lengths, protocol, observe=lambda *batch: (books(*batch), seen.append(batch[1].ravel()))
    )
    assert rows == perplexities(tiny(), stream, lengths, protocol)
    totals = books.totals()
    for row in rows:
        parts = [book[str(row["length"])] for book in totals.values() if str(row["length"]) in book]
        assert sum(targets for _, targets in parts) == row["targets"]
        assert sum(loss for loss, _ in parts) / row["targets"] == pytest.approx(row["loss"], rel=1e-12)
    expected = [w.stop - w.targets + i for n in lengths for w in plan(protocol, n, lengths) for i in range(w.targets)]
    assert np.concatenate(seen).tolist() == expected


def plan(protocol, length, lengths):
    return windows(protocol, 100, length, lengths)


def test_each_documents_sum_by_hand(stream):
    books = LossByDocument(NAMES, document_of_token(stream, END))
    model = tiny()
    perplexities(model, stream, [10], observe=books)
    ids = torch.from_numpy(stream.astype("int64")).view(10, 10)
    losses = full_losses(model, ids).numpy()
    owner = document_of_token(stream, END).reshape(10, 10)[:, 1:]
    for place, name in enumerate(NAMES):
        mine = losses[owner == place]
        assert books.totals()[name]["10"] == [pytest.approx(float(mine.sum()), abs=1e-4), mine.size]  # float32 logits


def test_a_document_without_targets_is_left_out(stream):
    books = LossByDocument(NAMES, document_of_token(stream, END))
    perplexities(tiny(), stream[:50], [10], observe=books)
    assert list(books.totals()) == ["long"]
