"""Corpora, their splits, and what is on this machine without a look into it."""

import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfa_lab.data import load_corpus, load_documents, text_document
from rfa_lab.data.documents import by_author, by_file, by_position


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


def names_by_split(corpus):
    return {split: [document.name for document in documents] for split, documents in corpus.splits.items()}


def test_stdlib():
    corpus = load_corpus("stdlib")
    files = [name for split in names_by_split(corpus).values() for name in split]
    assert {"argparse.py", "json/decoder.py"} <= set(files)
    assert len(files) == len(set(files)) > 300
    unwanted = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    assert not any(unwanted & set(name.split("/")) for name in files)
    document = next(d for documents in corpus.splits.values() for d in documents if d.name == "argparse.py")
    assert document.read() == Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes().decode()
    for documents in corpus.splits.values():
        assert all(d.read() for d in documents)  # all of it is UTF-8
    assert names_by_split(load_corpus("stdlib")) == names_by_split(corpus)


def test_folder_split_by_file(folder):
    corpus = load_corpus(str(folder))
    assert sum(len(part) for part in corpus.splits.values()) == 10
    assert all(len(names_by_split(corpus)[split]) == 1 for split in ("valid", "test"))
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
    with pytest.raises(ValueError, match=r"without valid/', expected all of"):
        load_corpus(str(tmp_path))


def test_single_file_is_cut_by_position(tmp_path):
    path = tmp_path / "book.anything"
    path.write_text("".join(f"line {i}\n" for i in range(1000)))
    corpus = load_corpus(str(path))
    assert "".join(corpus.documents(split)[0].read() for split in ("train", "valid", "test")) == path.read_text()
    assert all(corpus.documents(split)[0].read().endswith("\n") for split in ("train", "valid", "test"))
    assert [d.read() for d in load_documents(str(path))] == [path.read_text()]


def test_unknown():
    for spec, split_by, message in (
        ("nowhere", "file", "got 'nowhere', expected stdlib, code:python, wikitext-103, babylm-2025 or the path"),
        ("stdlib", "author", "got 'author' for 'stdlib'"),
        ("stdlib", "file:x", "got 'file:x', expected file, author or author:"),
    ):
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
    found = [document.name for document in load_documents(str(tmp_path / "corpus"))]
    assert found == ["a.txt", "deep/link/b.txt"]  # each once: twice, it could be in two splits


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
    with pytest.raises(ValueError, match="without text in"):
        load_corpus(str(tmp_path))


def named(names):
    return [text_document(name, f"text of {name}") for name in names]


def names(documents):
    return [document.name for document in documents]


@given(st.integers(3, 300))
def test_by_file_is_a_partition_in_order_with_no_empty_split(count):
    documents = named(f"{i:03}.txt" for i in range(count))
    splits = by_file(documents)
    assert sorted(name for split in splits.values() for name in names(split)) == names(documents)
    assert all(names(split) == sorted(names(split)) for split in splits.values())
    held_out = max(1, round(0.05 * count))
    assert [len(splits[split]) for split in ("valid", "test")] == [held_out, held_out]


def test_by_author_keeps_authors_together():
    documents = named(f"{author}_{book}.txt" for author in "ABCDEFG" for book in range(5))
    splits = by_author(documents)
    authors = {split: {name[0] for name in names(part)} for split, part in splits.items()}
    assert sum(len(part) for part in splits.values()) == len(documents)
    assert [len(authors[split]) for split in ("train", "valid", "test")] == [5, 1, 1]
    assert set.union(*authors.values()) == set("ABCDEFG")


def test_authors_by_name():
    documents = named(["sub/Poe_x.txt", "Woolf_y.txt", "Ford_z.txt", "Anon.txt"])
    splits = by_author(documents, "test=Woolf, Anon;valid=Ford")
    assert {split: names(part) for split, part in splits.items()} == {
        "train": ["sub/Poe_x.txt"],
        "valid": ["Ford_z.txt"],
        "test": ["Woolf_y.txt", "Anon.txt"],
    }


def test_bad_assignments():
    for assignment, message in {
        "test=Joyce": "unknown author 'Joyce', expected some of A, B, C",
        "test=A;valid=A": "author 'A' twice",
        "exam=A": "got 'exam=A'",
        "test=": "got 'test=' without a name",
    }.items():
        with pytest.raises(ValueError, match=message):
            by_author(named(["A_1.txt", "B_1.txt", "C_1.txt"]), assignment)


def test_by_position_is_near_90_5_5():
    for unit in ("a line of text\n", "words and words ", "é"):
        parts = [part[0].read() for part in by_position([text_document("a", unit * 2_000)]).values()]
        assert [len(part) / len(unit * 2_000) for part in parts] == pytest.approx([0.9, 0.05, 0.05], abs=0.01)
        assert all(part.endswith(unit[-1]) for part in parts)


@given(st.text())
def test_by_position_is_a_partition_of_any_text(text):
    splits = by_position([text_document("a", text)])
    assert "".join(part[0].read() for part in splits.values() if part) == text
