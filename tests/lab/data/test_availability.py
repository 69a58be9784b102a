"""What is on this machine, without a look into it."""

import huggingface_hub
import pytest

from rfa_lab.data.availability import find_text, find_tokenizer
from rfa_lab.data.gutenberg import books

FETCHED = "not here yet, it is fetched when the first run begins (this needs the network)"


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Empty caches, no variables, no network."""
    for name in ("RFA_GUTENBERG", "RFA_CODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RFA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_texts_of_this_python():
    assert find_text("stdlib").there
    assert find_text("code:python") == (True, "that of the running Python and its packages")


def test_a_folder_of_code(tmp_path, monkeypatch):
    monkeypatch.setenv("RFA_CODE", str(tmp_path))
    (tmp_path / "train").mkdir()
    assert find_text("code:python") == (False, f"{tmp_path} lacks valid/, test/")


def test_files_and_folders(tmp_path):
    assert find_text(str(tmp_path / "none")) == (False, f"{tmp_path / 'none'} does not exist")
    assert find_text(str(tmp_path)) == (True, str(tmp_path))
    (tmp_path / "train").mkdir()
    assert find_text(str(tmp_path)) == (False, f"{tmp_path} lacks valid/, test/")
    (tmp_path / "valid").mkdir()
    (tmp_path / "test").mkdir()
    assert find_text(str(tmp_path)).there


def test_books(tmp_path, monkeypatch):
    listed = books("gutenberg:novels")
    numbers = [book.number for book in listed if book.number]
    assert find_text("gutenberg:novels") == (True, f"0 of {len(numbers)} books in the cache; the others: {FETCHED}")
    (tmp_path / "cache" / "gutenberg").mkdir(parents=True)
    for number in numbers:
        (tmp_path / "cache" / "gutenberg" / f"{number}.txt").touch()
    assert find_text("gutenberg:novels") == (True, f"{len(numbers)} of {len(numbers)} books in the cache")
    monkeypatch.setenv("RFA_GUTENBERG", str(tmp_path))
    (tmp_path / f"{listed[0].name}.txt").touch()
    (tmp_path / f"pg{listed[-1].number}.txt").touch()
    assert find_text("gutenberg:novels") == (False, f"2 of {len(listed)} books in {tmp_path}")


def test_data_sets_of_the_hub(tmp_path):
    assert find_text("babylm-2025") == (True, FETCHED)
    cached = tmp_path / "datasets" / "BabyLM-community___baby_lm-2025-strict"  # as `datasets` names it
    cached.mkdir(parents=True)
    assert find_text("babylm-2025") == (True, f"in {cached.parent}")
    assert find_text("wikitext-103") == (True, FETCHED)


def test_tokenizers(tmp_path, monkeypatch):
    assert find_tokenizer("bytes") == (True, "needs no file")
    assert find_tokenizer("bpe:512") == (True, "trained on the text")
    assert find_tokenizer("gpt2") == (True, FETCHED)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repository, name: f"/{repository}/{name}")
    assert find_tokenizer("gpt2") == (True, "in the cache")
    (tmp_path / "vocab.bpe").touch()
    assert find_tokenizer(f"gpt2:{tmp_path}") == (False, f"{tmp_path} lacks encoder.json")
    (tmp_path / "encoder.json").touch()
    assert find_tokenizer(f"gpt2:{tmp_path}") == (True, str(tmp_path))
