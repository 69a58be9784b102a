"""`code:python` on a small tree of packages."""

import pytest

from rfa_lab.data import load_corpus
from rfa_lab.data.sources import code_splits

WORDS = "def found(given):\n    return given\n"


def module(folder, name, text=None):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or f"# {path}\n" + 20 * WORDS)
    return path


@pytest.fixture
def places(tmp_path):
    packages, stdlib = tmp_path / "site-packages", tmp_path / "lib"
    for name in ("attrs/a.py", "attrs/deep/b.py", "rich/table.py", "mypy/main.py", "mypy_extensions/c.py"):
        module(packages, name)
    for name in ("ast.py", "json/decoder.py"):
        module(stdlib, name)
    return packages, stdlib


def names(splits):
    return {split: [document.name for document in documents] for split, documents in splits.items()}


KEPT = {
    "train": ["attrs/a.py", "attrs/deep/b.py", "mypy_extensions/c.py", "stdlib/ast.py", "stdlib/json/decoder.py"],
    "valid": ["mypy/main.py"],
    "test": ["rich/table.py"],
}


def test_whole_packages_are_held_out(places):
    splits = code_splits(*places)
    assert names(splits) == KEPT
    assert splits["test"][0].read() == (places[0] / "rich/table.py").read_text()


def test_what_is_left_out(places):
    packages, stdlib = places
    module(packages, "attrs/short.py", "import attrs\n")
    module(packages, "attrs/long.py", 6000 * WORDS)
    module(packages, "attrs/table.py", "x = [" + 400 * "123, " + "]\n")
    module(packages, "attrs/letters.py", 40 * "\u00e4bc = 'd'\n" + 20 * WORDS)
    module(packages, "rich/copy.py", (packages / "attrs/a.py").read_text().replace("\n", " \n\n"))  # in another split
    module(packages, "attrs/_vendor/d.py")
    for own in ("rfa", "rfa_lab"):  # the packages of this distribution: their text would change a record
        module(packages, f"{own}/e.py")
    module(packages, "attrs-1.dist-info/f.py")
    module(packages, "attrs/notes.txt")
    for name in ("test/g.py", "site-packages/attrs/a.py", "encodings/h.py", "lib.so"):
        module(stdlib, name)
    code_splits.cache_clear()
    assert names(code_splits(*places)) == KEPT


def test_the_running_python(monkeypatch, places):
    with pytest.raises(ValueError, match="split_by: got 'author' for 'code:python'"):
        load_corpus("code:python", "author")
    code_splits.cache_clear()
    monkeypatch.setattr("sysconfig.get_paths", lambda: dict(zip(("purelib", "stdlib"), map(str, places), strict=True)))
    corpus = load_corpus("code:python")
    assert (names(corpus.splits), corpus.split_note) == (KEPT, "by package")
    code_splits.cache_clear()
