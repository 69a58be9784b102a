"""Documents that people read: their examples run, their links lead somewhere, their tables are the record's."""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import ROOT, script

from rfa_lab.recipes import load_recipe
from rfa_lab.recipes.rates import needed_rates, possible_rates
from rfa_lab.report.records import write_recall_report, write_series_report
from rfa_lab.results import read_record

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


def test_the_replications_tables_are_those_of_the_record():
    module = script("docs/record/replication_tables.py")
    page = module.PAGE.read_text(encoding="utf-8")
    for table in ("perplexities", "differences"):
        assert f"<!-- {table}: docs/record/replication_tables.py -->" in page
    assert module.written(page) == page, "run python docs/record/replication_tables.py"
    short = module.SHORT.read_text(encoding="utf-8")
    assert module.written_short(short) == short, "run python docs/record/replication_tables.py"


def test_the_tables_of_series_are_those_of_the_record():
    module = script("docs/record/series_record.py")
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.written(page) == page, "run python docs/record/series_record.py"
    assert "SUMMARY" not in page


@pytest.mark.parametrize(("name", "left"), [("series-etth1", ""), ("series-oscillator", "GRU-D")])
def test_rates_of_series_were_looked_for_beyond_the_ends(name, left):
    """But for one network, of which results/README.md says that it is left."""
    runs = [run for run in read_record(ROOT / "results" / name, "series") if "learning_rate" in run]
    runs = [run for run in runs if run["label"] != left]
    first = {run["label"]: run for run in runs if run["seed"] == 0}
    assert len(first) > 10
    for run in runs:
        assert run["learning_rate"] == first[run["label"]]["learning_rate"], run["run"]
    for run in first.values():
        losses = {float(rate): math.inf if loss is None else loss for rate, loss in run["trials"].items()}
        rates = run["spec"]["training"]["learning_rate"]
        assert {*needed_rates(possible_rates(rates), rates, losses)} == losses.keys(), run["run"]
        assert run["learning_rate"] == min(losses, key=losses.__getitem__), run["run"]


def test_the_tables_of_recall_are_those_of_the_record(tmp_path):
    """Of the record, where there is one; and a page has the marks of every table of a recipe's tasks."""
    module = script("docs/record/recall_record.py")
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.written(page) == page, "run python docs/record/recall_record.py"
    score = {"accuracy": 0.5, "loss": 1.0}
    entries = {"kind": "recall", "recipe": "r", "title": "t", "label": "b1", "seed": 0, "chance": 0.5, "fault": None}
    entries |= {"environment": {"commit": None, "machine": "a"}}
    entries |= {"tests": {"64": score, "512": score}, "curve": [{"step": 300, "tokens": 600, **score}]}
    tasks = {run.task.label for run in load_recipe(ROOT / "recipes" / "recall.yaml").runs}
    for task in tasks:
        (tmp_path / f"{task}.json").write_text(json.dumps({**entries, "task": task}))
    filled = module.written(page, tmp_path)
    assert filled.count("| b1 |") == 2 + 2 * len(tasks)
    assert f"Runs by commit: not recorded {len(tasks)}.\nBy machine: a {len(tasks)}." in filled
    assert module.written(filled, tmp_path) == filled


def test_the_differences_of_weights_are_of_the_same_seeds():
    """By hand: 0.5 and 0.6 less 0.4 and 0.3 is 0.2 +- 12.706 * 0.1; a seed of one weight alone has no difference."""
    module = script("docs/record/recall_record.py")
    shares = {"student-t": (0.5, 0.6, 0.9), "exponential": (0.4, 0.3)}
    rows = module.weights(
        [
            {"task": "heavy tails", "label": label, "seed": seed, "tests": {"48": {"accuracy": share}}}
            for label, of in shares.items()
            for seed, share in enumerate(of)
        ]
    ).rows
    cells = next(row for row in rows if row[0] == "heavy tails")
    assert [each and round(each.value, 6) for each in cells[2:]] == [0.666667, 0.35, None, 0.2, None, None]
    assert cells[5].error == pytest.approx(1.2706, abs=1e-4)
    assert not cells[5].best


def test_the_stored_reports_of_small_networks_are_of_their_results(tmp_path):
    write = {"recall.md": write_recall_report, "series.md": write_series_report}
    pages = sorted((ROOT / "results").glob("*/report/*.md"))
    assert {page.name for page in pages} == write.keys()
    for page in pages:
        record = page.parents[1]
        made = write[page.name](record, tmp_path / record.name).page
        assert made.read_text("utf-8") == page.read_text("utf-8"), f"run rfa report {name(record)}"


def test_the_tables_of_scaling_are_computed():
    module = script("docs/scaling_table.py")
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.written(page) == page, "run python docs/scaling_table.py"


def test_losses_during_training_are_those_of_whole_trainings():
    module = script("docs/record/context_record.py")

    def run(label, seed, steps, loss):
        curve = [{"step": step, "tokens": step, "valid_loss": loss + 1 / step} for step in (500, *module.STEPS)]
        names = {"label": label, "preset": "b1-rope", "seed": seed, "run": f"{label}-{seed}"}
        return {**names, "spec": {"max_steps": steps}, "curve": [point for point in curve if point["step"] <= steps]}

    whole = [run("whole", seed, 5000, loss) for seed, loss in enumerate((2.0, 2.2, 2.4))]
    (row,) = module.learning([*whole, run("quarter", 0, 1250, 9.0)]).rows
    assert row[:2] == ("whole", "3")
    assert [cell.value for cell in row[2:]] == pytest.approx([2.2 + 1 / step for step in module.STEPS])
    assert row[-1].error == pytest.approx(4.302653 * 0.2 / 3**0.5, rel=1e-6)  # t of 2 degrees of freedom


def test_the_tables_of_the_pilot_are_those_of_its_files(tmp_path):
    """And a file that lacks an entry is refused; the cheapest setting that meets all is that of the recipe."""
    module = script("docs/record/context_record.py")
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.written(page) == page, "run python docs/record/context_record.py"
    runs = module.read_pilot(module.PILOT)
    recipe = load_recipe(ROOT / "recipes" / "context.yaml")
    setting, spec = module.chosen(runs)["setting"], next(iter(recipe.runs)).spec
    assert (setting["length"], setting["layers"]) == (spec.length, spec.model["num_hidden_layers"])
    assert (setting["steps"], f"bpe:{setting['vocabulary']}") == (spec.max_steps, spec.tokenizer)
    damaged = runs[0] | {"measures": runs[0]["measures"] | {"loss": None}}
    (tmp_path / f"{runs[0]['run']}.json").write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match="is damaged"):
        module.read_pilot(tmp_path)


def test_the_answers_of_the_evidence_are_those_of_the_records():
    """And an answer follows from its interval: an aim inside leaves it open, without an interval nothing is tested."""
    module, answers = script("docs/record/evidence_record.py"), script("docs/record/evidence_answers.py")
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.written(page) == page, "run python docs/record/evidence.py"
    assert [answers.answer(*ends) for ends in ((-2, -1), (1, 2), (-1, 1), (None, None))] == [
        answers.HOLDS,
        answers.REFUTED,
        answers.OPEN,
        answers.NOT_TESTED,
    ]
    assert answers.answer(0.2, 0.3, aim=0.1, below=False) == answers.HOLDS
    one, three, other = {0: 0.9}, {0: 0.9, 1: 0.8, 2: 0.9}, dict.fromkeys(range(3), 0.2)
    assert answers.of_seeds(one, other, "{:.1f}", below=False) == (answers.NOT_TESTED, "0.9 against 0.2, one seed")
    assert answers.of_seeds(three, other, "{:.1f}", below=False).answer == answers.HOLDS


def test_the_six_answers_are_those_of_the_records():
    """In the README and in the short page, which stays short."""
    module = script("docs/record/evidence.py")
    assert len(module.ROWS) == len(module.FIGURES) == 6
    for path in module.PAGES:
        page = path.read_text("utf-8")
        assert module.written(page) == page, "run python docs/record/evidence.py"
        assert [sentence for sentence in module.sentences()[path.name] if sentence not in page] == []
    assert len((DOCS / "evidence.md").read_text("utf-8").split()) <= 1200


def test_the_six_answers_leave_out_runs_of_fewer_steps(monkeypatch):
    """Also when most runs of a record are such, as the plan of the runs on code has it."""
    module = script("docs/record/evidence_answers.py")

    row = {"length": 256, "perplexity": math.e}

    def run(steps):
        return {"spec": {"max_steps": steps}, "evaluations": {"matched": {"rows": [row]}}}

    groups = {"b1-rope": [run(5000)], "x2": [run(5000)]} | {f"x2 third {each}": [run(1666)] for each in range(5)}
    monkeypatch.setattr(module, "language", lambda _: groups)
    assert module.losses_by_model("context", 256, "matched") == {"b1-rope": [1.0], "x2": [1.0]}


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


@pytest.mark.parametrize("path", MARKDOWN, ids=name)
def test_lines_are_short(path):
    lines = path.read_text("utf-8").splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > LONGEST_LINE]
    assert not long, f"lines {long} have more than {LONGEST_LINE} characters"


@pytest.mark.parametrize("path", MARKDOWN, ids=name)
def test_sentences_are_short(path):
    """Outside tables, code, formulas and headings; a link counts by its words."""
    text = re.sub(
        r"^ *```.*?^ *```|<!--.*?-->|^\$\$$.*?^\$\$$", "\n\n", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"^(\||#|:::|!\[|--8<).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`|\$[^$\n]*\$", "code", text))
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())):
            words = sentence.split()
            assert len(words) <= LONGEST_SENTENCE, f"{len(words)} words: {sentence}"


@pytest.mark.parametrize("page", ["tests/README.md", "CONTRIBUTING.md", "docs/develop/layout.md"])
def test_the_files_that_developers_are_told_of_exist(page):
    """Paths in code marks, below the repository, `src/rfa`, `tests` or the folder named before on the same line."""
    for line in (ROOT / page).read_text("utf-8").splitlines():
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
    _no_formula_is_cut_off(site)
    for page in pages:
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?(?:https?:)?//', page.read_text("utf-8"))


def _no_formula_is_cut_off(site):
    """On a desk and on a telephone, neither in the text nor in a docstring."""
    for page, formulas in (("theory", 7), ("api/operator", 1), ("extensions", 7)):
        text = (site / page / "index.html").read_text("utf-8")
        assert text.count('<math display="block"') == formulas
        assert "$$" not in text
    if (chromium := shutil.which("chromium")) is None:
        return
    wide = (
        "[...document.querySelectorAll('math, .doc-contents pre code')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    )
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, page in itertools.product((1300, 500), ("theory", "api/operator", "extensions")):
            shown = browser.new_page(viewport={"width": width, "height": 800})
            shown.goto((site / page / "index.html").as_uri())
            assert shown.evaluate(f"{wide}.filter(e => e.clientWidth).map(e => e.textContent)") == [], (width, page)
        browser.close()


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
