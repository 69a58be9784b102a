import os
import sysconfig
from pathlib import Path

import pytest

from rfa_lab.data import load_corpus, load_documents

TEST_AUTHORS = {"Conrad", "Forster", "Schreiner", "Woolf"}
VALID_AUTHORS = {"Ford", "Galsworthy", "Stevenson"}


@pytest.fixture
def folder(tmp_path):
    for index in range(10):
        path = tmp_path / f"part{index % 2}" / f"{index}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text {index}\n" * 10)
    (tmp_path / "image.png").write_bytes(b"\xff\xff")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


def names(corpus):
    return {split: [document.name for document in documents] for split, documents in corpus.splits.items()}


def test_stdlib():
    corpus = load_corpus("stdlib")
    files = [name for split in names(corpus).values() for name in split]
    assert {"argparse.py", "json/decoder.py"} <= set(files)
    assert len(files) == len(set(files)) > 300
    unwanted = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    assert not any(unwanted & set(name.split("/")) for name in files)
    document = next(d for documents in corpus.splits.values() for d in documents if d.name == "argparse.py")
    assert document.read() == Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes().decode()
    for documents in corpus.splits.values():
        assert all(d.read() for d in documents)  # all of it is UTF-8
    assert names(load_corpus("stdlib")) == names(corpus)


def test_folder_split_by_file(folder):
    corpus = load_corpus(str(folder))
    assert sum(len(part) for part in corpus.splits.values()) == 10
    assert all(len(names(corpus)[split]) == 1 for split in ("valid", "test"))
    assert corpus.split_note == "by file, by hash, 90/5/5"


def test_folder_with_its_own_splits(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text(split)
    corpus = load_corpus(str(tmp_path))
    assert {split: [d.read() for d in docs] for split, docs in corpus.splits.items()} == {
        split: [split] for split in ("train", "valid", "test")
    }
    with pytest.raises(ValueError, match="split_by: got 'author'"):
        load_corpus(str(tmp_path), "author")
    (tmp_path / "valid" / "a.txt").unlink()
    with pytest.raises(ValueError, match="holds no text"):
        load_corpus(str(tmp_path))
    (tmp_path / "valid").rmdir()
    with pytest.raises(ValueError, match=r"without valid/, expected all of"):
        load_corpus(str(tmp_path))


def test_single_file_is_cut_by_position(tmp_path):
    path = tmp_path / "book.anything"
    path.write_text("".join(f"line {i}\n" for i in range(1000)))
    corpus = load_corpus(str(path))
    assert "".join(corpus.documents(split)[0].read() for split in ("train", "valid", "test")) == path.read_text()
    assert all(corpus.documents(split)[0].read().endswith("\n") for split in ("train", "valid", "test"))
    assert [d.read() for d in load_documents(str(path))] == [path.read_text()]


def test_fingerprint_follows_content(folder):
    before = load_corpus(str(folder))
    first = before.documents("train")[0].name
    (folder / first).write_text("TEXT 0\n" * 10)
    after = load_corpus(str(folder))
    assert after.fingerprint("train") != before_fingerprint(before, folder, first)
    assert after.fingerprint("test") == before.fingerprint("test")


def before_fingerprint(corpus, folder, name):
    """The fingerprint of the corpus with the original text put back."""
    changed = (folder / name).read_text()
    (folder / name).write_text(f"text {Path(name).stem}\n" * 10)
    try:
        return corpus.fingerprint("train")
    finally:
        (folder / name).write_text(changed)


def test_novels_by_author(novels):
    held_out = f"author:test={','.join(TEST_AUTHORS)};valid={','.join(VALID_AUTHORS)}"
    corpus = load_corpus(str(novels), held_out)
    authors = {split: {name.split("_")[0] for name in part} for split, part in names(corpus).items()}
    assert authors["test"] == TEST_AUTHORS
    assert authors["valid"] == VALID_AUTHORS
    assert len(authors["train"]) == 34 - 7
    assert not authors["train"] & (TEST_AUTHORS | VALID_AUTHORS)
    assert sum(len(part) for part in corpus.splits.values()) == 92
    with pytest.raises(ValueError, match="no text in split 'valid'"):
        load_corpus(str(novels), "author:test=Conrad")


@pytest.mark.parametrize(
    ("spec", "split_by", "message"),
    [
        (
            "nowhere",
            "file",
            "got 'nowhere', expected stdlib, code:python, gutenberg:novels, wikitext-103, babylm-2025 or the path",
        ),
        ("stdlib", "author", "got 'author' for 'stdlib'"),
        ("stdlib", "chapter", "got 'chapter', expected file, author or author:"),
        ("stdlib", "file:x", "got 'file:x'"),
    ],
)
def test_unknown(spec, split_by, message):
    with pytest.raises(ValueError, match=message):
        load_corpus(spec, split_by)


def test_folders_behind_links(tmp_path):
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("a")
    (tmp_path / "elsewhere" / "b.txt").write_text("b")
    (tmp_path / "corpus" / "deep" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "deep" / "circle").symlink_to(tmp_path / "corpus")
    (tmp_path / "corpus" / "deep" / "above").symlink_to(tmp_path)
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "corpus" / "deep")
    (tmp_path / "corpus" / "latest").symlink_to(tmp_path / "corpus" / "deep" / "link")
    (tmp_path / "corpus" / "z.txt").symlink_to(tmp_path / "corpus" / "a.txt")
    names = [document.name for document in load_documents(str(tmp_path / "corpus"))]
    assert names == ["a.txt", "deep/link/b.txt"]  # each once: twice, it could be in two splits


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def closed(path):  # as the system has it for everybody but root
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(PermissionError, match="closed"):
        load_documents(str(tmp_path))


def test_no_text(tmp_path):
    with pytest.raises(ValueError, match=r"holds no text, expected files \.txt"):
        load_corpus(str(tmp_path))
    (tmp_path / "a.txt").touch()
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ValueError, match="is empty"):
            load_corpus(str(path))
    with pytest.raises(ValueError, match="is empty"):
        load_documents(str(tmp_path))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="no text in split"):
        load_corpus(str(tmp_path))


def test_unknown_split(folder):
    with pytest.raises(ValueError, match="got 'dev', expected one of train, valid, test"):
        load_corpus(str(folder)).documents("dev")
