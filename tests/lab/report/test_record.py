"""The table of a record: what is written is read, and what is no record is refused."""

import json

import pandas as pd
import pytest

from rfa_lab.record import read_record, read_rows, write_rows

from .records import record, run


def test_what_is_written_is_read(tmp_path):
    found = record(tmp_path, run("b1-rope", 1), run("b1-rope", 0), run("m2-sc-rfa", losses=(1.5, 1.25)))
    assert found.labels() == ["b1-rope", "m2-sc-rfa"]
    assert [each["spec"]["seed"] for each in found.of("b1-rope")] == [0, 1]
    assert found.values("loss blocks").loc[("m2-sc-rfa", 0)].to_dict() == {16: 1.5, 64: 1.25}
    assert found.books("blocks")[16.0].loc[("b1-rope", 1)].to_dict() == pytest.approx({"A.txt": 23.0, "B.txt": 57.0})
    assert found.protocols() == ["blocks"]
    assert found.only(["m2-sc-rfa"]).settings.keys() == {"m2-sc-rfa-seed0"}


def test_a_folder_of_a_recipe(tmp_path):
    for seed in (0, 1):
        write_rows(tmp_path / "results" / f"b1-rope-seed{seed}.parquet", run("b1-rope", seed))
    (tmp_path / "results" / "cut.parquet").write_bytes(b"PAR1")
    planned = {"name": "tiny", "title": "Tiny", "runs": ["b1-rope-seed0", "b1-rope-seed1", "b2-alibi-seed0"]}
    (tmp_path / "recipe.json").write_text(json.dumps(planned))
    found, missing = read_record(tmp_path)
    assert len(found.settings) == 2
    assert missing["1 runs"] == "no result yet: b2-alibi-seed0"
    assert "is damaged or no record" in missing["cut.parquet"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.drop(columns="x"), "without x"),
        (lambda rows: rows.assign(label="<b>"), r"\['<b>'\].* expected names of letters"),
        (lambda rows: rows.assign(value=float("nan")), "NaN"),
        (lambda rows: rows.assign(settings="{"), "is damaged or no record"),
    ],
)
def test_no_record(tmp_path, change, said):
    change(run("b1-rope")).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=said):
        read_rows(tmp_path / "a.parquet")


def test_runs_that_do_not_belong_together(tmp_path):
    with pytest.raises(ValueError, match="no results"):
        read_record(tmp_path)
    other = run("b1-rope", fingerprint="g").assign(run="b1-rope-again")
    write_rows(tmp_path / "a.parquet", pd.concat([run("b1-rope"), other]))
    with pytest.raises(ValueError, match="of a label and seed that another run has"):
        read_record(tmp_path / "a.parquet")
    write_rows(tmp_path / "a.parquet", pd.concat([run("b1-rope"), run("b2-alibi", fingerprint="g")]))
    with pytest.raises(ValueError, match="runs on 2 texts"):
        read_record(tmp_path / "a.parquet")
