import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfa_lab.data import load_tokenizer, text_document
from rfa_lab.data import tokenization as module
from rfa_lab.data.tokenization import load_tokenizer as load

TEXT = "It's a truth universally acknowledged; that a single man's fortune... £1,000, 2 é 字 🙂\r\n\tx  y .\n\n" * 20
DOCUMENTS = [text_document("a", TEXT), text_document("b", TEXT[::-1])]
BYTES = load("bytes")


@given(st.text().filter(lambda text: "<|endoftext|>" not in text))
def test_bytes_are_the_ids(text):
    ids = BYTES.encode(text)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return load_tokenizer("bpe:300", DOCUMENTS, tmp_path_factory.mktemp("cache"))


def test_trained_vocabulary(trained):
    assert len(trained) == 300
    assert trained.eos_token_id == 299
    assert len(trained.encode(TEXT)) < len(TEXT.encode()) / 1.5


@given(text=st.text())
def test_trained_round_trip(trained, text):
    assert trained.decode(trained.encode(text)) == text


def test_training_is_repeatable_and_cached(trained, tmp_path, monkeypatch):
    again = load_tokenizer("bpe:300", DOCUMENTS, tmp_path)
    assert again.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()
    monkeypatch.setattr(module, "_sample", None)  # would fail if called
    cached = load_tokenizer("bpe:300", DOCUMENTS, tmp_path)
    assert cached.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()
    with pytest.raises(TypeError):
        load_tokenizer("bpe:301", DOCUMENTS, tmp_path)
    with pytest.raises(TypeError):
        load_tokenizer("bpe:300", DOCUMENTS[:1], tmp_path)


def test_unknown():
    for spec in ("words", "bpe:", "bpe:-3", "gpt2:", ""):
        with pytest.raises(ValueError, match=f"got '{spec}', expected gpt2, gpt2:FOLDER, bpe:N or bytes"):
            load_tokenizer(spec, DOCUMENTS)


def test_training_needs_room_and_text():
    with pytest.raises(ValueError, match="got bpe:256, expected at least bpe:257"):
        load_tokenizer("bpe:256", DOCUMENTS)
    with pytest.raises(ValueError, match="got bpe:99999999999999999999999, expected at most bpe:10000000"):
        load_tokenizer("bpe:99999999999999999999999", DOCUMENTS)
    with pytest.raises(ValueError, match="without text to train on"):
        load_tokenizer("bpe:300")


def test_gpt2_files_missing_or_damaged(tmp_path):
    with pytest.raises(ValueError, match=r"no file '.*encoder\.json'"):
        load_tokenizer(f"gpt2:{tmp_path}")
    (tmp_path / "encoder.json").write_text("{")
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=r"unreadable '.*encoder\.json'"):
        load_tokenizer(f"gpt2:{tmp_path}")
    vocabulary = {symbol: id for symbol, id in load_tokenizer("bytes").get_vocab().items() if id < 256}
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    assert load_tokenizer(f"gpt2:{tmp_path}").encode("aé") == [97, 0xC3, 0xA9]
    del vocabulary["e"]  # each e of a text would vanish
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ValueError, match="no entry for 1 of the 256 bytes"):
        load_tokenizer(f"gpt2:{tmp_path}")
