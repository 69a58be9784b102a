"""Tables and bars on a terminal."""

import io

import pandas as pd
import pytest
from rich.console import Console

from rfa.cli import app
from rfa.cli.app import progress_bars
from rfa_lab.cli.console import comparison_table, evaluation_table


def printed(table):
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def row(length, perplexity, stderr=0.01):
    fixed = {"protocol": "matched", "targets": 12345, "loss": 4.5}
    return {**fixed, "length": length, "stderr": stderr, "perplexity": perplexity}


def test_comparison_table():
    columns = {"model": ["b1-rope", "m2-sc-rfa"], 16: [90.123, 88.0], 32: [123.456, 87.5], "parameters": 1234567}
    lines = printed(comparison_table(pd.DataFrame({**columns, "tokens/s": [4321.4, None]}))).splitlines()
    (head,) = [line for line in lines if "model" in line]
    words = [word for word in head.split() if word.isalnum() or "/" in word]
    assert words == ["model", "16", "32", "parameters", "tokens/s"]
    for name, figures in {"b1-rope": ["90.12", "123.46"], "m2-sc-rfa": ["88.00", "87.50"]}.items():
        (line,) = [line for line in lines if name in line]
        assert [word for word in line.split() if word not in "│|"] == [
            name,
            *figures,
            "1,234,567",
            "4,321" if name == "b1-rope" else "?",
        ]


def test_evaluation_table():
    result = {"preset": "b1-rope", "run": "runs/a", "data": "stdlib", "rows": [row(16, 90.0), row(32, 95.0, None)]}
    result |= {"finished": True, "weights": "model"}
    text = printed(evaluation_table(result))
    assert not {word for word in ("None", "not finished") if word in text}
    text = printed(evaluation_table({**result, "finished": False, "weights": "checkpoints/checkpoint-500"}))
    assert "not finished: checkpoints/checkpoint-500" in text


def test_progress_is_on_standard_error(capsys, monkeypatch):
    """In a pipe a line, on a terminal a bar for each key."""
    with progress_bars() as bar:
        bar("reading", 1, 4)
    assert capsys.readouterr() == ("", "reading: 1/4\n")
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes it for a terminal
    with progress_bars() as bar:
        bar("reading", 4, 4)
        bar("training, loss 4.2", 2, 2, key="train")
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading" in err
    assert "4/4" in err


@pytest.mark.parametrize(("every", "lines"), [(0.0, ["a: 1/3", "b: 2/3", "b: 3/3"]), (10.0, ["a: 1/3"])])
def test_a_pipe_has_a_line_now_and_then(capsys, monkeypatch, every, lines):
    assert app.LINE_SECONDS >= 10
    monkeypatch.setattr(app, "LINE_SECONDS", every)
    with progress_bars() as bar:
        for step, description in enumerate("abb", 1):
            bar(description, step, 3)
    assert capsys.readouterr().err.splitlines() == lines
