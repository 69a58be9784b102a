"""`rfa report`: from result files to a folder of tables, figures and a page; what is missing is named."""

import json
import math
import random
import string

import pytest
from cover import cover, slow
from experiments.recipes import TRAINING, write_recipe
from training.runs import MODEL, contents, messages

from rfa_lab.data.corpora import load_documents
from rfa_lab.recipes import load_recipe, run_recipe
from rfa_lab.report import write
from rfa_lab.results import read_result, read_results

from .results import whole_result, write_results

TABLES = ["table1-blocks", "differences-blocks", "table1-matched", "differences-matched", "paper-table1"]
TABLES += ["probe-passkey", "probe-repeat", "probe-accuracy", "attention", "runs"]
FIGURES = ["length-blocks", "differences-blocks", "length-matched", "differences-matched"]
FIGURES += ["training", "position", "retrieval", "attention", "attention-near"]
RUNS = [whole_result("m2-sc-rfa", maps=True), whole_result("b1-rope")]


@pytest.fixture
def out(tmp_path):
    return write_results(tmp_path / "out", RUNS)


def only(monkeypatch, *names):
    """Of the figures these, where it is not all of them that are tested."""
    drawn = write.listed_figures
    monkeypatch.setattr(write, "listed_figures", lambda runs: [each for each in drawn(runs) if each.name in names])


@pytest.fixture
def one_figure(monkeypatch):
    only(monkeypatch, "training")


def test_the_same_results_are_the_same_bytes(rfa, out, tmp_path, monkeypatch):
    """Of the folder of result files itself, and elsewhere, too; lines and an image."""
    only(monkeypatch, "training", "attention")
    assert rfa("report", "out")[0] == 0
    assert rfa("report", "out/results", "--out", "elsewhere")[0] == 0
    assert contents(tmp_path / "elsewhere") == contents(out / "report")


def fails(rfa, tmp_path, *arguments):
    before = contents(tmp_path)
    status, said, err = rfa("report", *arguments)
    assert (status, said, len(messages(err))) == (2, "", 1)
    assert contents(tmp_path) == before
    return err


def test_what_is_no_record_is_refused(rfa, tmp_path):
    (tmp_path / "a").write_text("file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"format": 1}')
    (tmp_path / "empty" / "results").mkdir(parents=True)
    faults = {"nowhere": "not there", "a": "no folder", "run": "a run of `rfa train`", "empty": "without results"}
    for folder, says in faults.items():
        err = fails(rfa, tmp_path, folder)
        assert says in err
        assert "expected result files as `rfa experiment RECIPE --out DIR` leaves them" in err


def test_without_results_what_the_paper_says_is_left(tmp_path):
    written = write.write_report([], tmp_path / "report")
    assert (len(written.tables), len(written.figures)) == (3, 0)
    made = {f"tables/paper-table{k}.{form}" for k in (1, 2, 3) for form in ("md", "tex", "csv")}
    written = contents(tmp_path / "report")
    assert set(written) == made | {"index.html", ".rfa-output"}
    assert b"28.48" in written["tables/paper-table1.md"]  # the paper's RoPE
    for lacking in ("figure length-blocks</b>: no run has evaluations by blocks", "explorer", "No results"):
        assert lacking.encode() in written["index.html"]


def test_a_report_is_no_text_to_learn_from(rfa, out, tmp_path, one_figure):
    """Its tables are Markdown. A folder of text that holds results, or a report alone."""
    (out / "own.md").write_text("My text.\n" * 100)
    assert rfa("report", "out")[0] == 0
    assert (out / "report" / "tables" / "runs.md").is_file()
    assert [each.name for each in load_documents(str(out))] == ["own.md"]
    with pytest.raises(ValueError, match="which a command of rfa wrote, expected text to learn from"):
        load_documents(str(out / "report"))


def _probes(whole, **changes):
    probe = whole["passkey"]["passkey"]
    return {"passkey": {**probe, "rows": [{**probe["rows"][0], **changes}]}}


def test_partial(rfa, out, one_figure):
    results = out / "results"
    (results / "cut.json").write_text((results / "b1-rope-seed0.json").read_text()[:99])
    (results / "foreign.json").write_text('{"name": "something"}')
    (results / "newer.json").write_text(json.dumps({**RUNS[0], "maps": None, "format": 99}))
    (results / "m2-sc-rfa-seed0.attention.npz").write_bytes(b"PK\x03\x04 cut")
    whole = json.loads((results / "b1-rope-seed0.json").read_text())
    row = {**whole["evaluations"]["blocks"]["rows"][1], "loss": None}
    courses = {"alpha": [[1.0], [1.0, 2.0]], "decay": [[1.0], [1.0]], "process_noise": [[1.0], [1.0]]}
    heads = {"steps": [1, 2], "tokens": [1, 2], "layers": {"0": courses}}
    for name, fault in {
        "row": {"evaluations": {"blocks": {"rows": [row], "books": {}}}},
        "number": {"training": {**whole["training"], "valid_perplexity": math.nan}},
        "heads": {"dynamics": heads, "passkey": 3},
        "tokens": {"dynamics": {**heads, "tokens": [1, 2, 3]}},
        "accuracy": {"passkey": _probes(whole, accuracy=None)},
        "config": {"config": {}, "by_position": {"loss": [1.0], "stderr": ["a"]}},
    }.items():
        (results / f"{name}.json").write_text(json.dumps({**whole, **fault}))
    (results / "deep.json").write_text(99_999 * "[")
    (out / "recipe.json").write_text(
        json.dumps({"name": "tiny", "title": "", "runs": ["b1-rope-seed0", "x1-riccati-seed0", "c1-nope-seed0"]})
    )
    for name in ("x1-riccati-seed0", "b1-rope-seed0"):
        (out / "runs" / name).mkdir(parents=True)
        (out / "runs" / name / "run.json").touch()
    status, said, err = rfa("report", "out")
    assert status == 1
    page = (out / "report" / "index.html").read_text()
    for name, reason in {
        "cut.json": "cut.json is damaged",
        "foreign.json": "foreign.json is damaged",
        "newer.json": "newer.json has format 99, expected 1",
        "m2-sc-rfa-seed0.attention.npz": "is damaged",
        "row.json": "is damaged (evaluations.blocks.rows.0.loss: Input should be a valid number)",
        "number.json": "is damaged (training.valid_perplexity: Input should be a finite number)",
        "heads.json": "layer 0: expected 2 steps of one number a head, and 1 more faults)",
        "tokens.json": "tokens: expected one for each of 2 steps)",
        "accuracy.json": "passkey: expected its chance, and an accuracy at every distance)",
        "config.json": "config.json is damaged (config.prior: Field required, and 5 more faults)",
        "deep.json": "deep.json is damaged",
    }.items():
        (line,) = [line for line in messages(err) if line.startswith(f"rfa: missing: {name}: ")]
        assert reason in line
        assert f"<b>{name}</b>: " in page
    assert "missing: x1-riccati-seed0: begun, no result yet" in said
    assert "<b>x1-riccati-seed0</b>: begun, no result yet" in page
    assert "missing: 1 run: not begun: c1-nope-seed0" in said
    assert "missing: b1-rope-seed0" not in said
    assert "runs: 2, tables: 10, figures: 1" in said


TRIGRAM = {"format": 1, "recipe": "tiny", "train_length": 16, "tokens": 192, "vocabulary": 257, "seed": 0}
TRIGRAM |= {"data": RUNS[0]["data"], "fingerprint": "test", "valid_perplexity": 60.0, "by_position": None}
TRIGRAM |= {"passkey": None, "evaluations": {"blocks": RUNS[0]["evaluations"]["blocks"]}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"fingerprint": "other"}, "it is of another recipe, text or training length than"),
        ({"recipe": "other"}, "it is of another recipe, text or training length than"),
        ({"format": 99}, "has format 99, expected 1"),
        ({"valid_perplexity": -1.0}, "is damaged (valid_perplexity: Input should be greater than 0)"),
        ({"passkey": {"repeat": {"rows": [{"distance": 8, "loss_by_token": [-1.0]}]}}}, "is damaged (passkey.repeat"),
    ],
)
def test_the_trigram_or_what_is_wrong_with_its_file(rfa, out, monkeypatch, changes, reason):
    only(monkeypatch)
    (out / "results" / "trigram.json").write_text(json.dumps({**TRIGRAM, **changes}))
    status, _, err = rfa("report", "out")
    table = (out / "report" / "tables" / "table1-blocks.md").read_text()
    assert ("| trigram |" in table) == (reason is None)
    assert status == (0 if reason is None else 1)
    if reason is not None:
        assert "missing: trigram.json: " in err
        assert reason in err


def test_what_runs_lack_is_named_and_the_rest_drawn(rfa, tmp_path):
    bare = {"curve": [], "by_position": None, "passkey": None}
    second = {**whole_result("m2-sc-rfa"), **bare}
    second["evaluations"] = {"blocks": second["evaluations"]["blocks"]}
    out = write_results(tmp_path / "out", [{**whole_result("b1-rope"), **bare}, second])
    status, said, _ = rfa("report", "out")
    assert status == 0  # nothing is damaged
    missing = dict(line.removeprefix("rfa: missing: ").split(": ", 1) for line in said.splitlines()[:-2])
    assert missing["figure training"] == "no run has validations"
    assert missing["figure position"] == "no run has losses by position"
    assert missing["figure retrieval"] == "no run has retrieval probes"
    assert {*missing} == {
        "figure training",
        "figure position",
        "figure retrieval",
        *(f"table {name}" for name in TABLES if "probe" in name),
    }
    assert "got none with the probe passkey" in missing["table probe-passkey"]
    page = (out / "report" / "index.html").read_text()
    for name in missing:
        assert f"<b>{name}</b>" in page
    assert "Without evaluations by matched: m2-sc-rfa-seed0." in page
    drawn = {path.stem for path in (out / "report" / "figures").iterdir()}
    without = {"training", "position", "retrieval", "attention", "attention-near"}
    assert drawn == set(FIGURES) - without


def test_several_recipes_or_one_run_twice(rfa, out, tmp_path):
    other = out / "results" / "other.json"
    run = json.loads((out / "results" / "b1-rope-seed0.json").read_text())
    other.write_text(json.dumps({**run, "recipe": "another"}))
    assert "got results of the recipes another, tiny, expected those of one" in fails(rfa, tmp_path, "out")
    other.write_text(json.dumps({**run, "seed": 1, "fingerprint": "another"}))
    assert "got results on 2 texts, those of b1-rope-seed0.json and other.json among them" in fails(
        rfa, tmp_path, "out"
    )
    other.write_text(json.dumps(run))
    assert "got b1-rope-seed0.json and other.json of the same label and seed" in fails(rfa, tmp_path, "out")


@pytest.mark.parametrize(("fault", "status"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left"), 2)])
def test_stopped_midway_files_are_whole(rfa, out, one_figure, monkeypatch, fault, status):
    """What was there stays or is replaced whole; the page comes last."""
    assert rfa("report", "out")[0] == 0
    before = contents(out / "report")
    write_results(out, [whole_result("b1-rope", loss=5.0)])

    def half(figure, path, **_):
        path.write_bytes(b"half")
        raise fault

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    found, _, err = rfa("report", "out")
    assert found == status
    assert len(messages(err)) == 1
    after = contents(out / "report")
    assert set(after) == set(before)  # no file under a temporary name
    assert after["index.html"] == before["index.html"]
    assert after["figures/training.pdf"] == before["figures/training.pdf"]
    assert after["tables/table1-blocks.md"] != before["tables/table1-blocks.md"]


EVALUATION = {"lengths": [16, 128], "protocols": {"blocks": 300, "matched": 128}, "by_position": True, "passkey": True}


@slow
def test_a_tiny_experiment_is_reported_whole(tmp_path):
    letters = random.Random(0)
    for split in ("train", "valid", "test"):
        (tmp_path / "corpus" / split).mkdir(parents=True)
        text = "".join(letters.choices(string.ascii_lowercase + " ", k=800))
        (tmp_path / "corpus" / split / "a.txt").write_text(text)
    path = write_recipe(
        tmp_path,
        training={**TRAINING, "length": 16, "data": "corpus", "model": MODEL},
        evaluation={**EVALUATION, "attention": ["m2-sc-rfa"]},
    )
    assert run_recipe(load_recipe(path), tmp_path / "out").failed == {}
    found = read_results(tmp_path / "out")
    assert found.missing == {}
    assert [run["maps"] is None for run in found.runs] == [True, False, True]
    written = write.write_report(found.runs, tmp_path / "report", found.missing)
    assert written.missing == {}
    tables = {"table1", "differences"}
    assert {f"{name}-{protocol}" for name in tables for protocol in ("blocks", "matched")} < set(written.tables)
    assert {"probe-passkey", "probe-repeat", "probe-accuracy", "runs"} < set(written.tables)
    assert "m2-sc-rfa b=0.5" in (tmp_path / "report" / "tables" / "table1-blocks.md").read_text()


@cover(1, field=["label", "run", "preset", "recipe"], name=["", "../a", "a\nb", "$a$", "a\x1b[31m", "-a", "a" * 251])
def test_names(field, name, tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(whole_result("b1-rope")))
    assert read_result(file)["label"] == "b1-rope"
    file.write_text(json.dumps({**whole_result("b1-rope"), field: name}))
    with pytest.raises(ValueError, match=rf"is damaged \({field}: String should match pattern"):
        read_result(file)


def test_a_terminal_obeys_no_file_name(rfa, tmp_path, monkeypatch):
    only(monkeypatch, "training")
    out = write_results(tmp_path / "out", [whole_result("b1-rope")])
    (out / "results" / "a\x1b[2J\nb.json").write_text("{}")
    status, _, err = rfa("report", "out")
    assert (status, len(messages(err))) == (1, 1)
    assert "\x1b" not in err
    assert messages(err)[0].startswith("rfa: missing: a [2J b.json: ")
