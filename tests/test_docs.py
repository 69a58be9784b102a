"""Documents that people read: their examples run, their links lead somewhere, their tables are the record's."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import ROOT

from rfa_lab.record import read_rows
from rfa_lab.report.statistics import differences, half_interval

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
MARKDOWN = [*PAGES, *sorted(path for path in ROOT.glob("*.md") if path != README)]
MARKDOWN += [ROOT / folder / "README.md" for folder in ("results", "tests")]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
HAND_WRITTEN = [page for page in PAGES[1:] if page.parent.name != "notebooks"]  # test_notebooks.py runs the others
LONGEST_LINE = 160
LONGEST_SENTENCE = 35  # words


def name(path):
    return path.relative_to(ROOT).as_posix()


def rows_of(page: Path, columns: int) -> dict[str, list[str]]:
    """The rows of a page's tables with so many columns, by their first cell."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.read_text("utf-8").splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == columns}


@pytest.mark.parametrize(("name", "columns", "text"), [("code", 6, "context"), ("novels", 5, "novels-small")])
def test_the_tables_of_the_record_are_those_of_its_file(name, columns, text):
    """Losses of code over length; perplexities of novels at both ends, by both protocols."""
    record, shown = read_rows(ROOT / "results" / f"{text}.parquet"), rows_of(DOCS / "record" / f"{name}.md", columns)
    if name == "code":
        values = record.values("loss matched")
        tables, digits = [values[length] for length in values], 3
    else:
        both = [np.exp(record.values(f"loss {protocol}")) for protocol in ("blocks", "matched")]
        tables, digits = [values[length] for values in both for length in (128, 1024)], 1
    checked = 0
    for label in record.labels():
        for cell, table in zip(shown.get(label, [])[-4:], tables, strict=False):
            of = table.loc[label].dropna().to_numpy()
            half = half_interval(of)
            assert cell == f"{of.mean():.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}"), label
            checked += 1
    assert checked >= 40


def test_the_answers_on_text_are_those_of_the_record():
    """In the README and in the page of evidence: mean over seeds and half of the 95 % t interval, by `matched`."""
    code, novels = (read_rows(ROOT / "results" / f"{name}.parquet") for name in ("context", "novels-small"))
    pairs = [
        (code, "x2-riccati-alibi no-innovation", "c4-fox rope-normalised", 256, "matched"),
        (code, "x2-riccati-alibi no-innovation", "c4-fox rope-normalised", 2048, "matched"),
        (code, "x2-riccati-alibi no-innovation", "b2-alibi normalised", 2048, "matched"),
        (novels, "m2-sc-rfa", "b1-rope", 128, "blocks"),
    ]
    for record, label, baseline, length, protocol in pairs:
        found = differences(record, baseline, protocol)[label][length]
        said = f"{found.value:+.3f} ± {found.half:.3f} nats".replace("-", "\N{MINUS SIGN}")
        for page in (README, DOCS / "evidence.md"):
            assert f"| {said} |" in page.read_text("utf-8"), (page, said)
    assert len((DOCS / "evidence.md").read_text("utf-8").split()) <= 900


@pytest.mark.parametrize("block", BLOCK.findall(README.read_text("utf-8")))
def test_the_examples_of_the_readme_run(block):
    exec(compile(block, str(README), "exec"), {})


@pytest.mark.parametrize("page", [page for page in HAND_WRITTEN if BLOCK.search(page.read_text("utf-8"))], ids=name)
def test_the_examples_of_the_documents_run(page, monkeypatch, tmp_path):
    """The blocks of a page one after the other, beside the examples, as one program."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": "page"}
    for block in BLOCK.findall(page.read_text("utf-8")):
        exec(compile(block, str(page), "exec"), names)


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 120
    for target in re.findall(r"\]\(([^)#:]+)", text):
        assert (README.parent / target).exists(), target


def test_lines_are_short():
    lines = [
        (name(path), k, line) for path in MARKDOWN for k, line in enumerate(path.read_text("utf-8").splitlines(), 1)
    ]
    assert [(path, k) for path, k, line in lines if len(line) > LONGEST_LINE] == []


def test_sentences_are_short():
    """Outside tables, code, formulas and headings; a link counts by its words."""
    long = []
    for path in MARKDOWN:
        text = re.sub(
            r"^ *```.*?^ *```|<!--.*?-->|^\$\$$.*?^\$\$",
            "\n\n",
            path.read_text("utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        )
        text = re.sub(r"^(\||#|:::|!\[|--8<).*$", "\n", text, flags=re.MULTILINE)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`|\$[^$\n]*\$", "code", text))
        for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
            sentences = re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))
            long += [(name(path), sentence) for sentence in sentences if len(sentence.split()) > LONGEST_SENTENCE]
    assert long == []


def test_the_files_that_developers_are_told_of_exist():
    """Paths in code marks, below the repository, `src/rfa`, `tests` or the folder named before on the same line."""
    pages = ["tests/README.md", "CONTRIBUTING.md", "docs/develop/layout.md"]
    for line in "\n".join((ROOT / page).read_text("utf-8") for page in pages).splitlines():
        folders = [
            ROOT,
            *(ROOT / "src" / x for x in ("", "rfa", "rfa_lab")),
            *(ROOT / "tests" / x for x in ("", "rfa", "lab")),
        ]
        for mark in re.findall(r"`([\w./{},-]+)`", line):
            alternatives = re.search(r"\{(.*?)\}", mark)
            marks = [mark.replace(alternatives[0], x) for x in alternatives[1].split(",")] if alternatives else [mark]
            for written in marks:
                if written.endswith((".py", ".h", ".md", "/")) and "NAME" not in written:
                    found = [folder / written for folder in folders if (folder / written).exists()]
                    assert found, f"{written} in {line}"
                    folders += [place if place.is_dir() else place.parent for place in found]


def test_the_variant_of_the_documents_can_be_applied(tmp_path):
    """The commit of docs/develop/variant.md, on a copy of the sources: its own test passes."""
    for folder in ("src/rfa", "tests/rfa/models"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    diffs = re.findall(r"```diff\n(.*?)```", (DOCS / "develop" / "variant.md").read_text("utf-8"), re.DOTALL)
    subprocess.run(["git", "apply", "-"], input="".join(diffs), text=True, cwd=tmp_path, check=True)
    program = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--rootdir=.', sys.argv[1]]))"
    command = [sys.executable, "-c", program, "tests/rfa/models/test_equal_slopes.py"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_site_builds_without_warnings_or_network(tmp_path):
    """A page that is built asks no other server for anything, and neither does the building."""
    program = (
        "import socket, sys\n"
        "def refuse(*_): raise OSError('no network in this test')\n"
        "socket.socket.connect = refuse\n"
        "from mkdocs.__main__ import cli\n"
        "cli(['build', '--quiet', '--strict', '--config-file', sys.argv[1], '--site-dir', sys.argv[2]])\n"
    )
    site = tmp_path / "site"
    command = [sys.executable, "-c", program, str(ROOT / "mkdocs.yml"), str(site)]
    done = subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page, formulas in (("theory", 7), ("api/operator", 1), ("extensions", 7)):
        text = (site / page / "index.html").read_text("utf-8")
        assert (text.count('<math display="block"'), "$$" in text) == (formulas, False)
    for page in pages:
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?(?:https?:)?//', page.read_text("utf-8"))


@pytest.mark.slow
def test_zensical_builds_the_site_too(tmp_path):
    """The successor of Material for MkDocs reads the same mkdocs.yml. It writes beside it, so a copy is built."""
    pytest.importorskip("zensical")
    for name_of in ("docs", "src", "examples"):
        shutil.copytree(ROOT / name_of, tmp_path / name_of, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    for file in ("mkdocs.yml", "CONTRIBUTING.md", "tests/README.md"):
        shutil.copy(ROOT / file, tmp_path / file)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "api" / "operator" / "index.html").read_text("utf-8")
    assert "robust_filter_attention" in page
    assert "</math>" in page


def test_nothing_reads_a_folder_beside_the_repository():
    beside = re.compile(r"\.\./shared|[\"']shared[\"'] */|/ *[\"']shared")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    for file in (Path(file) for file in files if not file.startswith("results/")):
        if (ROOT / file).is_file() and (ROOT / file).suffix in {".md", ".py", ".yaml", ".yml", ".toml", ""}:
            assert file.name == "test_docs.py" or not beside.search((ROOT / file).read_text("utf-8")), file
