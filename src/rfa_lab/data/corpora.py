"""Corpora: from what the user names to documents in three splits."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from rfa.checks import require
from rfa.files import OUTPUT

from .documents import (
    SPLITS,
    Document,
    Splits,
    by_author,
    by_file,
    by_position,
    check_split,
    file_document,
)
from .sources import CODE, HUB_DATASETS, code_splits, hub_splits

SUFFIXES = (".txt", ".md", ".py", ".text", ".tokens", ".raw")
LOCAL_CORPORA = "`stdlib` or the path of a file or folder of UTF-8 text"
NAMED_CORPORA = ("stdlib", CODE, *HUB_DATASETS)  # these names win over a file or folder of the same name
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """A text in three splits.

    Args:
        name: what it was asked for by.
        splits: the documents of `train`, `valid` and `test`, in order.
        split_note: how the splits were made, in words.
    """

    name: str
    splits: Splits
    split_note: str

    def documents(self, split: str) -> tuple[Document, ...]:
        """The documents of a split. Raises `ValueError` for another split."""
        require(split in self.splits, "split", split, f"one of {', '.join(self.splits)}")
        return self.splits[split]


def is_path(spec: str) -> bool:
    """Whether a corpus is named by the path of a file or folder. A known name and empty text are no paths."""
    return bool(spec) and spec not in NAMED_CORPORA


def load_corpus(spec: str, split_by: str = "file") -> Corpus:
    """Return the corpus that `spec` names.

    Args:
        spec: `stdlib` (the `.py` text of the running Python's standard library), `code:python` (its packages too, see
            `code_splits`), `wikitext-103` or `babylm-2025` (from the Hugging Face hub), a file, or a folder of UTF-8
            text; reports and models in it are left out. A folder that holds `train/`, `valid/` and `test/` is split so,
            code by package; any other by `split_by`.
        split_by: `file`: about 90/5/5 by the hash of each file's relative path; fewer than three files are
            cut 90/5/5 by position, at ends of lines. `author`: by the part of the file name before the first
            `_`, whole authors to one split, by hash; `author:test=Name,Name;valid=Name` names the held-out
            authors.

    Returns:
        The corpus; its documents are read only when asked for.

    Raises:
        ValueError: unknown corpus or split, no text there, an empty split, unknown author, no access to the hub.
        OSError: a folder that cannot be read.
    """
    check_split(split_by)
    kind, _, assignment = split_by.partition(":")
    given = spec in HUB_DATASETS or (is_path(spec) and (Path(spec) / "train").is_dir())
    if kind == "author" and (given or spec in ("stdlib", CODE)):
        raise ValueError(f"split_by: got {split_by!r} for {spec!r}, which has no authors to split by; expected file")
    if spec in HUB_DATASETS:
        splits, note = _hub_splits(spec)
    elif spec == CODE:
        splits, note = code_splits(), "by package"
    elif given:
        splits, note = _folder_splits(Path(spec)), "as the folder gives them"
    elif kind == "author":
        splits, note = by_author(_local_documents(spec), assignment), f"by author, {assignment or 'by hash'}"
    elif len(documents := _local_documents(spec)) < len(SPLITS):
        splits, note = by_position(documents), "by position, 90/5/5"
    else:
        splits, note = by_file(documents), "by file, by hash, 90/5/5"
    empty = [split for split in SPLITS if not splits.get(split)]
    require(not empty, "data", f"{spec} without text in {', '.join(empty)}", f"text in {', '.join(SPLITS)}")
    return Corpus(spec, splits, note)


def load_documents(spec: str) -> tuple[Document, ...]:
    """Return all documents of the corpus that `spec` names, unsplit: a text to evaluate on.

    Args:
        spec: as for `load_corpus`.

    Raises:
        ValueError: unknown corpus, no text there, no hub access.
        OSError: a folder that cannot be read.
    """
    if spec in HUB_DATASETS:
        splits = hub_splits(HUB_DATASETS[spec], LOCAL_CORPORA)
        return tuple(document for documents in splits.values() for document in documents)
    if spec == CODE:
        return tuple(sorted((each for part in code_splits().values() for each in part), key=lambda each: each.name))
    return _local_documents(spec)


def _hub_splits(spec: str) -> tuple[Splits, str]:
    """Return a hub data set's splits; those it lacks are taken from its training documents."""
    splits = hub_splits(HUB_DATASETS[spec], LOCAL_CORPORA)
    missing = [split for split in SPLITS[1:] if not splits.get(split)]
    if not missing:
        return splits, "as the data set gives them"
    return {**splits, **by_file(splits.get("train", ()), missing)}, f"{' and '.join(missing)} taken from train, by hash"


def _folder_splits(folder: Path) -> Splits:
    """The documents of `train/`, `valid/` and `test/`; `ValueError` where one is missing or holds no text."""
    missing = [split for split in SPLITS if not (folder / split).is_dir()]
    expected = "all of train/, valid/, test/ or none"
    require(not missing, "data", f"{folder} with train/ but without {'/ and '.join(missing)}/", expected)
    return {split: _local_documents(str(folder / split)) for split in SPLITS}


def _local_documents(spec: str) -> tuple[Document, ...]:
    """The documents of `stdlib`, a file or a folder, by name; `ValueError` where there is no text."""
    path = Path(spec)
    if not spec:  # an unset variable of a shell; as a path it would be the working folder
        raise ValueError("data: got an empty name, expected " + LOCAL_CORPORA)
    if spec == "stdlib":
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = _text_files(folder, (".py",), _NOT_STDLIB)
    elif path.is_dir():
        if _is_output(path):
            raise ValueError(f"data: got {spec!r}, which a command of rfa wrote, expected text to learn from")
        folder, files = path, _text_files(path, SUFFIXES, set())
    elif path.is_file():
        folder, files = path.parent, [path]
    else:
        raise ValueError(
            f"data: got {spec!r}, expected {', '.join(NAMED_CORPORA)} or the path of an existing file or folder"
        )
    if not files:
        raise ValueError(f"data: got {spec!r}, which holds no text, expected files {', '.join(SUFFIXES)}")
    documents = tuple(file_document(file, file.relative_to(folder).as_posix()) for file in files)
    if not any(document.size for document in documents):
        raise ValueError(f"data: got {spec!r}, which is empty, expected text")
    return tuple(document for document in documents if document.size)


def _is_output(folder: Path) -> bool:
    """Whether a folder holds a report of rfa, or a model as transformers saves it."""
    is_model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return is_model or (folder / OUTPUT).is_file()


def _text_files(folder: Path, suffixes: tuple[str, ...], left_out: set[str]) -> list[Path]:
    """Return the files below `folder` that end so; hidden ones and folders named in `left_out` are skipped.

    Folders that a command wrote, reports and models, are skipped too: their text is no part of the user's.

    A folder or file that links lead to as well is read once, under the name that comes first: twice, its text could
    stand in two splits that are drawn. A folder that holds `folder` is not read. Raises `OSError`: a folder there
    cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    root = folder.resolve()
    files: list[Path] = []
    read: set[Path] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = Path(parent).resolve()
        if real in read or (real != root and (root.is_relative_to(real) or _is_output(real))):
            folders.clear()
            continue
        read.add(real)
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        files += [Path(parent, name) for name in names if not name.startswith(".") and name.endswith(suffixes)]
    once = {file.resolve(): file for file in sorted(files, reverse=True) if file.is_file()}
    return sorted(once.values())
