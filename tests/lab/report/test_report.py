"""Tables against means and intervals computed by hand; figures and the page as files."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from training.runs import command

from rfa_lab.recipes import load_recipe
from rfa_lab.report import findings, write_report
from rfa_lab.report.figures import attention_figure, main_labels, read_maps, record_figures
from rfa_lab.report.tables import (
    damping_by_label,
    damping_table,
    difference_table,
    models_table,
    published_results,
    published_table,
    record_tables,
)

from .records import record, run

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def small(tmp_path):
    """Two models, one of them with two seeds."""
    return record(
        tmp_path, run("b1-rope", 0, (2.0, 3.0)), run("b1-rope", 1, (2.2, 3.4)), run("m2-sc-rfa", 0, (1.9, 2.0))
    )


def test_the_table_of_models(small):
    table = models_table(small, "blocks")
    paper = list(published_results()["wikitext-103"])
    assert table.text["model"].tolist() == paper  # those without a run too
    rows = table.text.set_index("model")
    mean = np.exp([2.0, 2.2]).mean()
    assert rows.loc["b1-rope", "L = 16"].startswith(f"{mean:.2f} ± ")
    assert rows.loc["m2-sc-rfa", "L = 16"] == f"**{np.exp(1.9):.2f}**"  # one seed has no interval
    assert rows.loc["m3-sc-rfa"].tolist() == ["0", "\N{EN DASH}", "\N{EN DASH}"]
    assert table.numbers.set_index("model").loc["b1-rope", "L = 16"] == pytest.approx(mean)
    assert any(note.startswith("Not run here: b2-alibi, b3") for note in table.notes)
    assert f"| b1-rope | 2 | {mean:.2f} ± " in table.markdown()
    assert r"\toprule" in table.latex()
    assert "**" not in table.latex() + table.html()


def swept(b):
    attention = {"attention": {"decay": {"damping": b}}}
    return run(
        f"m2-sc-rfa b={b:g}",
        0,
        (2.0 + b, 3.0),
        "m2-sc-rfa",
        config={"num_hidden_layers": 2, "hidden_size": 8, **attention},
    )


def test_the_table_of_damping_has_every_row_of_the_paper(tmp_path):
    found = record(tmp_path, run("b1-rope"), *map(swept, (0.0005, 0.05, 5.0)))
    assert list(damping_by_label(found).values()) == [0.0005, 0.05, 5.0]
    table = damping_table(found, "blocks")
    names = [f"b = {b}" for b in ("0.0005", "0.005", "0.05", "0.5", "5")]
    assert table.text["model"].tolist() == ["b1-rope", "b2-alibi", *names]
    assert table.text.set_index("model").loc["b = 0.05", "L = 16"] == f"{np.exp(2.05):.2f}"
    assert damping_by_label(record(tmp_path, run("b1-rope"), run("m2-sc-rfa"), run("m3-sc-rfa"))) == {}


PAPER = published_results()
PAPERS_ROWS = {
    "table1-wikitext103": [*PAPER["wikitext-103"], "b1-rope-as-released"],
    "table2-damping": ["b1-rope", "b2-alibi", *(f"b = {float(b):g}" for b in PAPER["wikitext-103-damping"])],
    "table3-babylm": [*PAPER["babylm-2025-strict"]],
}


@pytest.mark.parametrize("name", PAPERS_ROWS)
def test_each_row_of_a_table_of_the_paper(name, tmp_path):
    """Of the first seed of each run of its recipe."""
    planned = load_recipe(RECIPES / f"{name}.yaml")
    assert planned.evaluation.lengths == PAPER["lengths"]
    made = [
        run(each.label, preset=each.spec.preset, spec=each.spec.to_dict(), config=each.spec.model_config(9).to_dict())
        for each in planned.runs
        if each.spec.seed == 0
    ]
    tables = {table.name: table for table in record_tables(record(tmp_path, *made))}
    rows = tables[f"{name[:6]}-blocks"].numbers.set_index("model")
    assert rows.index.tolist() == PAPERS_ROWS[name]
    assert (rows["seeds"] == "1").all()
    assert f"paper-{name[:6]}" in tables
    assert len(tables["differences-blocks"].text) == 2 * (len(rows) - 1)  # of all others, to B1 and to B2


def test_the_table_of_differences(small):
    table = difference_table(small, "blocks")
    assert table.text.iloc[0].tolist()[:3] == ["m2-sc-rfa", "b1-rope", "1"]
    assert table.text.iloc[0]["L = 16"].startswith("\N{MINUS SIGN}0.100 [")
    assert table.numbers.iloc[0]["L = 64 value"] == pytest.approx(-1.0)


def test_published_numbers_are_the_papers():
    rows = published_table("table2").text.set_index("model")
    assert rows.loc["b1-rope"].tolist() == ["28.48", "30.94", "44.21", "72.69"]
    assert rows.loc["b = 0.05", "L = 512"] == "**27.54**"


def test_the_report(tmp_path, small, monkeypatch, capsys):
    maps = {"weights": np.tril(np.full((2, 8, 8), 0.1, dtype=np.float16))}
    (tmp_path / "record").mkdir()
    np.savez(tmp_path / "record" / "m2-sc-rfa-seed0.npz", **maps)
    status, said, _ = command(monkeypatch, capsys, "report", tmp_path / "record.parquet", "--out", tmp_path / "report")
    assert (status, said.splitlines()[-1]) == (0, f"page: {tmp_path / 'report' / 'index.html'}")
    page = (tmp_path / "report" / "index.html").read_text()
    names = ["length-blocks", "differences-blocks", "training", "attention"]
    assert re.findall('id="figure-([^"]*)"', page) == names
    assert {path.stem for path in (tmp_path / "report" / "figures").iterdir()} == set(names)
    assert not re.search(r'(src|href)="(?!data:)', page)  # it loads nothing else
    assert page.index(findings(small)[1]) < page.index("Figures")
    with (tmp_path / "report" / "tables" / "table1-blocks.csv").open() as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert float(rows["m2-sc-rfa"]["L = 64"]) == pytest.approx(np.exp(2.0))
    again = write_report(tmp_path / "record.parquet", tmp_path / "again")
    assert again.page.read_text() == page


def test_findings_name_the_best_and_its_lead(small):
    assert findings(small)[1] == (
        f"blocks, 16 tokens: m2-sc-rfa has the lowest perplexity, {np.exp(1.9):.2f}; \N{MINUS SIGN}0.100 nats against "
        "b1-rope (one seed)."
    )


def test_at_most_six_lines(tmp_path):
    labels = [f"c{k}" for k in range(8)]
    found = record(
        tmp_path, run("b1-rope"), *(run(label, seed) for label in labels for seed in range(1 + (label == "c7")))
    )
    assert "c7" in main_labels(found)  # two seeds
    assert len(main_labels(found)) == 6
    assert all(drawing.draw() for drawing in record_figures(found, {}))
    assert [table.name for table in record_tables(found)][-1] == "runs"


def test_maps_that_are_none(tmp_path):
    path = tmp_path / "a.npz"
    for arrays in ({"weights": np.ones((2, 3, 4))}, {"weights": np.full((2, 3, 3), 7.0)}, {"others": np.ones(3)}):
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match="maps"):
            read_maps(path)
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match="is damaged"):
        read_maps(path)
    figure = attention_figure({"a": np.eye(4)[None], "b": np.eye(4)[None].repeat(2, 0)}, 64, 8)
    assert len(figure.axes) == 5  # two rows of two, and the scale
