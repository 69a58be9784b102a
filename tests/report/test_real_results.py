"""Results as `rfa experiment` makes them, trained and evaluated in seconds, through to the report."""

import random
import string

from cover import slow
from experiments.recipes import TRAINING, write_recipe
from training.runs import MODEL

from rfa.experiments import load_recipe, run_recipe
from rfa.report.write import write_report
from rfa.results import read_results

EVALUATION = {"lengths": [16, 128], "protocols": {"blocks": 300, "matched": 128}, "by_position": True, "passkey": True}


@slow
def test_a_tiny_experiment_is_reported_whole(tmp_path, one_of_theory):
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
    written = one_of_theory(write_report, found.runs, tmp_path / "report", found.missing)
    assert written.missing == {}
    tables = {"table1", "differences"}
    assert {f"{name}-{protocol}" for name in tables for protocol in ("blocks", "matched")} < set(written.tables)
    assert {"probe-passkey", "probe-repeat", "probe-accuracy", "runs"} < set(written.tables)
    assert "m2-sc-rfa b=0.5" in (tmp_path / "report" / "tables" / "table1-blocks.md").read_text()
