"""Losses against the model's own full logits and against models whose loss is known; their sums by document."""

import math

import numpy as np
import pytest
import torch
from cover import cover
from torch.utils._python_dispatch import TorchDispatchMode

from rfa.models import RFAForCausalLM, preset
from rfa_lab.data import document_of_token, load_tokenizer, text_document, token_stream
from rfa_lab.evaluation import LossByDocument, perplexities, windows
from rfa_lab.evaluation import perplexity as loss_module
from rfa_lab.evaluation.perplexity import token_losses

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 11}


def tiny(name="m2-sc-rfa", **changes):
    torch.manual_seed(0)
    model = RFAForCausalLM(preset(name, **{**SIZES, "train_length": 8, **changes}))
    return model.eval()


@pytest.fixture
def stream():
    return np.random.default_rng(0).integers(0, 11, 100).astype(np.uint16)


def full_losses(model, ids):
    """Cross entropy of all tokens but the first, from all logits at once, in float64."""
    with torch.no_grad():
        logits = model(ids).logits.double()
    return -logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


@cover(1, name=["b1-rope", "b2-alibi", "m2-sc-rfa"], held=[2**25, 40, 1], targets=[19, 7, 1])
def test_token_losses(monkeypatch, name, held, targets):
    """All rows of logits at once, three, one."""
    monkeypatch.setattr(loss_module, "LOGITS_HELD", held)
    model, ids = tiny(name), torch.randint(11, (3, 20))
    found = token_losses(model, ids, targets)
    assert found.shape == (3, targets)
    expected = full_losses(model, ids)[:, -targets:]
    assert torch.allclose(found.double(), expected, atol=1e-5, rtol=0)  # float32 logits of order 1
    assert float(model(ids, labels=ids).loss.detach()) == pytest.approx(float(full_losses(model, ids).mean()), abs=1e-5)


@cover(1, protocol=["blocks", "matched", "strided"], batch_tokens=[1, 30, 4096])
def test_perplexities_by_hand(monkeypatch, stream, protocol, batch_tokens):
    monkeypatch.setattr("rfa_lab.evaluation.perplexity.batch_tokens", lambda device: batch_tokens)
    model, lengths = tiny(), [6, 11, 24]
    rows = perplexities(model, stream, [24, 6, 11, 6], protocol)
    assert [row["length"] for row in rows] == lengths
    for row in rows:
        each = [
            full_losses(model, torch.from_numpy(stream[w.start : w.stop].astype("int64"))[None])[0, -w.targets :]
            for w in windows(protocol, 100, row["length"], lengths)
        ]
        every = torch.cat(each)
        assert row["protocol"] == protocol
        assert row["targets"] == len(every)
        assert row["loss"] == pytest.approx(float(every.mean()), abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]), rel=1e-12)
        if protocol != "strided":  # windows of one size: the standard error of a mean of means
            means = np.array([float(losses.mean()) for losses in each])
            assert row["stderr"] == pytest.approx(means.std(ddof=1) / len(means) ** 0.5, rel=1e-3)


def test_standard_error_of_equal_windows_is_zero_and_of_one_is_unknown(stream):
    rows = perplexities(tiny(), np.tile(stream[:10], 6), [10, 60])
    assert rows[0]["stderr"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["stderr"] is None


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return result


def test_memory_does_not_grow_with_length_times_vocabulary():
    length, vocabulary = 4096, 50257
    model = tiny("b1-rope", vocab_size=vocabulary)
    with torch.no_grad(), Largest() as full:
        model.lm_head(torch.zeros(64, 16))
    assert full.bytes == 64 * vocabulary * 4  # the instrument sees logits
    with Largest() as sliced:
        token_losses(model, torch.randint(vocabulary, (1, length)), length - 1)
    assert sliced.bytes <= 2**25 * 4
    assert sliced.bytes < length * vocabulary * 4 / 5


def test_losses_that_are_no_numbers_are_no_result(stream):
    model = tiny()
    with torch.no_grad():
        model.lm_head.bias[3] = torch.nan
    with pytest.raises(ValueError, match="model: got losses that are not finite at a context of 8 tokens"):
        perplexities(model, stream, [8, 16])


@pytest.mark.parametrize("protocol", ["blocks", "matched"])
def test_scored_tokens_are_those_of_the_spread(stream, protocol):
    model, seen = tiny(), {}
    rows = perplexities(model, stream, [8, 32], protocol, scored=40, observe=lambda *of: seen.update({of[0]: of[1]}))
    assert [row["targets"] for row in rows] == [28, 31] if protocol == "blocks" else [32, 32]
    assert {token // 32 for token in np.concatenate([each.ravel() for each in seen.values()])} == {1}  # the middle
    with pytest.raises(ValueError, match=r"scored \(\w+\): got 31, expected at least 32"):
        perplexities(model, stream, [8, 32], protocol, scored=31)


NAMES = ("long", "one token", "short", "cut off")

END = 10


@pytest.fixture
def documents_stream():
    """Of 61, 1, 7 and 31 tokens; the last has no end."""
    ids = np.random.default_rng(0).integers(0, END, 100).astype(np.uint16)
    ids[[60, 61, 68]] = END
    return ids


def test_document_of_token(documents_stream, tmp_path):
    assert document_of_token(documents_stream, END).tolist() == [0] * 61 + [1] + [2] * 7 + [3] * 31
    texts = ["It's one.\n", "é 字 🙂", "<|endoftext|> in a text", "x"]
    documents = [text_document(str(place), text) for place, text in enumerate(texts)]
    tokenizer = load_tokenizer("bytes")
    places = document_of_token(token_stream(documents, tokenizer, tmp_path), tokenizer.eos_token_id)
    assert places.tolist() == [place for place, text in enumerate(texts) for _ in range(len(text.encode()) + 1)]


def test_each_documents_sum_by_hand(documents_stream):
    books = LossByDocument(NAMES, document_of_token(documents_stream, END))
    model = tiny()
    perplexities(model, documents_stream, [10], observe=books)
    ids = torch.from_numpy(documents_stream.astype("int64")).view(10, 10)
    losses = full_losses(model, ids).numpy()
    owner = document_of_token(documents_stream, END).reshape(10, 10)[:, 1:]
    for place, name in enumerate(NAMES):
        mine = losses[owner == place]
        assert books.totals()[name]["10"] == [pytest.approx(float(mine.sum()), abs=1e-4), mine.size]  # float32 logits
