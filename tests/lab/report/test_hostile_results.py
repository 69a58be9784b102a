"""What a result file says is text: no markup, no formula, no path, and nothing that runs."""

import json
import os

import numpy as np
import pytest
from cover import cover
from training.runs import contents, messages

from .results import whole_result, write_results
from .test_report_command import only

MARKUP = "<img src=x onerror=alert(1)>[a](b)`|"


def test_markup(rfa, tmp_path, monkeypatch):
    only(monkeypatch, "training")
    runs = [whole_result("b1-rope", data=MARKUP), whole_result("c1-nope", data=MARKUP)]
    out = write_results(tmp_path / "out", runs)
    assert rfa("report", "out")[0] == 0
    written = contents(out / "report")
    pages = [name for name in written if name.endswith((".md", ".html"))]
    assert not [name for name in pages if b"<img src=x" in written[name]]
    escaped = r"&lt;img src=x onerror=alert(1)&gt;\[a\](b)\`\|"
    assert escaped.encode() in written["tables/table1-blocks.md"]


@cover(1, field=["label", "run", "preset", "recipe"], name=["", "../a", "a\nb", "$a$", "a\x1b[31m", "-a", "a" * 251])
def test_names(field, name, tmp_path):
    from rfa_lab.results import read_result

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


class Payload:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("kind", ["archive", "array", "pickle"])
def test_maps_run_nothing(rfa, tmp_path, monkeypatch, kind):
    only(monkeypatch, "attention")
    out = write_results(tmp_path / "out", [whole_result("m2-sc-rfa", maps=True)])
    file, held = out / "results" / "m2-sc-rfa-seed0.attention.npz", np.array([Payload(tmp_path / "ran")], dtype=object)
    if kind == "archive":
        np.savez(file, weights=held, near=held)
    else:
        with file.open("wb") as open_file:
            np.save(open_file, held) if kind == "array" else held.dump(open_file)
    status, _, err = rfa("report", "out")
    assert not (tmp_path / "ran").exists()
    assert (status, len(messages(err))) == (1, 1)
    assert f"rfa: missing: {file.name}: maps: out/results/{file.name} is damaged" in messages(err)[0]
