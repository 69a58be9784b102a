import datasets
import huggingface_hub
import pytest

from rfa_lab.data import load_corpus, load_documents, load_tokenizer

WIKITEXT = [
    "",
    " = Ann Lee = \n",
    "",
    " She was = a woman . \n",
    " = = Life = = \n",
    " Long . \n",
    "",
    " = Bee = \n",
    " = 1\n",
]


def dataset(**splits):
    return datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()})


def serve(monkeypatch, result):
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append(args) or result)
    return calls


def test_wikitext_documents_are_articles(monkeypatch):
    calls = serve(monkeypatch, dataset(train=WIKITEXT * 20, validation=WIKITEXT, test=WIKITEXT[1:]))
    corpus = load_corpus("wikitext-103")
    assert calls == [("Salesforce/wikitext", "wikitext-103-raw-v1")]
    texts = [document.read() for document in corpus.documents("test")]
    assert texts == [
        " = Ann Lee = \n\n She was = a woman . \n = = Life = = \n Long . \n\n",
        " = Bee = \n = 1\n",
    ]
    for split in corpus.splits:
        assert all(document.size == len(document.read().encode()) for document in corpus.documents(split))
    joined = "".join(d.read() for d in corpus.documents("train"))
    assert joined == "".join(row if row.endswith("\n") else row + "\n" for row in WIKITEXT * 20)
    assert len(load_documents("wikitext-103")) == sum(len(part) for part in corpus.splits.values())


def test_missing_splits_are_taken_from_train(monkeypatch):
    rows = [f"line é {i}" for i in range(25_500)]
    serve(monkeypatch, dataset(train=rows))
    corpus = load_corpus("babylm-2025")
    assert {split: len(part) for split, part in corpus.splits.items()} == {"train": 24, "valid": 1, "test": 1}
    assert corpus.split_note == "valid and test taken from train, by hash"
    lines = [line for part in corpus.splits.values() for d in part for line in d.read().splitlines()]
    assert sorted(lines) == sorted(rows)
    serve(monkeypatch, dataset(train=rows, dev=["a development line"]))
    corpus = load_corpus("babylm-2025")
    assert [d.read() for d in corpus.documents("valid")] == ["a development line\n"]
    assert corpus.split_note == "test taken from train, by hash"


def test_no_hub_says_what_was_tried_and_what_else_there_is(monkeypatch, tmp_path):
    """As of a text in `tests/test_cli.py`."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    said = r"tried 'openai-community/gpt2' at [^\n]* got [^\n]*; without the hub, use gpt2:FOLDER, bpe:N or bytes$"
    with pytest.raises(ValueError, match=said):
        load_tokenizer("gpt2")
