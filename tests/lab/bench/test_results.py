"""Result files only grow, ratios are summed up as they are defined, and pages are drawn from the lines."""

import io
import json
import re
import statistics

import pytest
from rich.console import Console
from scripts import ROOT, script
from speed_tables import markdown_tables, speed_over_length

from rfa_lab.bench import append, read
from rfa_lab.bench.bound import Peaks, attention_work, bound, decoding_work
from rfa_lab.bench.measurement import StateShape, compare, in_turns, summary
from rfa_lab.bench.results import fraction_of_bound
from rfa_lab.cli.console import speed_tables

PLACE = {"processor": "a CPU", "threads": 2, "environment": {"torch": "2.0", "commit": "abcdef0123456789"}}


def line(length=512, median=0.5, time="2026-01-01T00:00:00+00:00", **changes):
    return {
        **{"benchmark": "operator", "pass": "forward", "preset": "m2-sc-rfa", "peer": "sdpa", "backend": "cpu"},
        **{"batch": 1, "heads": 8, "length": length, "channels": 64, "dtype": "float32", "device": "cpu"},
        "check": {"passed": True, "errors": {"estimate": 1e-7}},
        "ratio": {"median": median, "q1": median - 0.01, "q3": median + 0.01, "low": 0.1, "high": 0.9},
        "ratios": [median] * 3,
        "seconds": {"rfa": [0.2, 0.1, 0.3], "peer": [0.4, 0.4, 0.4]},
        "bound": {"rfa": {"seconds": 0.05}, "peer": {"seconds": 0.04}},
        "time": time,
        **PLACE,
        **changes,
    }


def test_old_lines_stay(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    for number in range(3):
        append(path, {"number": number, "name": "µs"})
    assert read(path) == [{"number": number, "name": "µs"} for number in range(3)]
    path.write_bytes(path.read_bytes() + b'{"by": "hand"}')  # without an end of line
    append(path, {"number": 3})
    assert [each.get("number") for each in read(path)] == [0, 1, 2, None, 3]


def test_a_line_is_whole_or_absent(tmp_path):
    path = tmp_path / "results.jsonl"
    append(path, {"number": 0})
    before = path.read_bytes()
    for unwritable in ({"ratio": float("nan")}, {"ratio": object()}):
        with pytest.raises((ValueError, TypeError)):
            append(path, unwritable)
    assert path.read_bytes() == before
    path.write_bytes(before + b'{"number": 1, "ra\n')
    with pytest.raises(ValueError, match="line 2 is no JSON object"):
        read(path)


def test_ratios():
    found = compare({"rfa": [1.0, 3.0, 2.0, 8.0], "sdpa": [2.0, 2.0, 4.0, 2.0]}, "sdpa")
    assert found["ratios"] == [0.5, 1.5, 0.5, 4.0]
    ratios = sorted(found["ratios"])
    assert found["ratio"]["median"] == statistics.median(ratios)
    assert (found["ratio"]["low"], found["ratio"]["high"]) == (0.5, 4.0)
    assert (found["ratio"]["q1"], found["ratio"]["q3"]) == (0.5, 2.125)  # linear between the order statistics
    assert found["seconds"] == {"rfa": [1.0, 3.0, 2.0, 8.0], "peer": [2.0, 2.0, 4.0, 2.0]}
    assert set(summary([7.0]).values()) == {7.0}


def test_turns_alternate(monkeypatch):
    monkeypatch.setattr("rfa_lab.bench.measurement.TURN", 0)
    order, ticks = [], []
    contestants = {name: lambda name=name: order.append(name) for name in "AB"}
    seconds = in_turns(contestants, 3, tick=lambda: ticks.append(1))
    assert order == ["A", "A", "B", "B", *"AB", *"BA", *"AB"]  # the warm-up first
    assert {name: len(each) for name, each in seconds.items()} == {"A": 3, "B": 3}
    assert len(ticks) == 3


def test_work_is_counted_pair_by_pair():
    shape = StateShape(2, 3, 5, 4)
    pairs = 2 * 3 * sum(1 for i in range(5) for j in range(5) if j <= i)
    forward = attention_work(shape, backward=False, logarithm=True, itemsize=4)
    assert forward == (2 * 2 * 4 * pairs, pairs, pairs, 4 * 4 * 2 * 3 * 5 * 4)
    both = attention_work(shape, backward=True, logarithm=False, itemsize=2)
    assert both == (7 * 2 * 4 * pairs, 2 * pairs, 0, 12 * 2 * 2 * 3 * 5 * 4)
    assert decoding_work(shape, False, 4) == (2 * 2 * 4 * 30, 30, 0, 2 * 4 * 30 * 4)


def test_bound():
    work = attention_work(StateShape(1, 1, 3, 4), backward=False, logarithm=True, itemsize=4)
    peaks = Peaks(flops=work.flops, exponentials=work.exponentials / 2, logarithms=work.logarithms / 3, bytes=1e9)
    assert bound(work, peaks, "cpu") == pytest.approx(1 + 2 + 3)  # the same units
    assert bound(work, peaks, "cuda") == pytest.approx(3)  # units side by side
    assert bound(work, peaks._replace(logarithms=None), "cuda") == pytest.approx(2)
    assert bound(work, peaks._replace(bytes=work.bytes / 10), "cpu") == pytest.approx(10)
    assert fraction_of_bound(line()) == pytest.approx(0.05 / 0.2)
    assert fraction_of_bound(line(), "peer") == pytest.approx(0.1)


def test_a_share_above_the_bound_is_shown():
    """It cannot be, so that it must be seen: the machine's peak was measured too low."""
    bounds = {"rfa": {"seconds": 0.3}, "peer": {"seconds": 0.2}}
    shares = speed_over_length([line(bound=bounds)]).axes[1]
    assert sorted(each.get_ydata()[0] for each in shares.lines) == pytest.approx([50, 100, 150])
    assert shares.get_ylim()[1] > 150


def test_tables():
    failed = {name: value for name, value in line(length=99).items() if name not in ("ratio", "pass", "peer")}
    failed["check"] = {"passed": False, "errors": {"estimate": 1e-7, "gradients of states": None}}
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 50257, "damping": 5}
    step = {name: value for name, value in line().items() if name not in ("heads", "channels", "bound")}
    step |= {"benchmark": "step", "pass": "training step", "peer": "b1-rope", "model": sizes, "batch": 16}
    memory = {**line(), "benchmark": "memory", "ratios": [2.0], "bytes": {"rfa": 5e8, "peer": 3e8}}
    del memory["seconds"], memory["bound"]
    lines = [line(), failed, step, memory]
    out, narrow = io.StringIO(), io.StringIO()
    Console(file=out, width=250).print(speed_tables(lines))
    Console(file=narrow, width=80).print(speed_tables(lines))
    for expected in ("operator, forward / sdpa", "1 x 8 x 512 x 64", "0.500", "0.490 to 0.510", "200 ms", "25%, 10%"):
        assert expected in narrow.getvalue()  # no figure is cut or broken
    pages = markdown_tables(lines)
    for text in (out.getvalue(), pages):
        for expected in ("operator, forward", "1 x 8 x 512 x 64", "0.500", "0.490 to 0.510", "200 ms", "25%, 10%"):
            assert expected in text
        for expected in ("check failed", "gradients of states: not finite", "training step", "damping=5", "500 MB"):
            assert expected in text
    rows = [row for row in pages.splitlines() if row.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert "### a CPU, 2 threads" in pages
    assert "commit abcdef012345." in pages


def test_the_page_is_drawn_from_the_lines(tmp_path):
    performance = script("benchmarks/performance.py")
    page, results, others = tmp_path / "page.md", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    page.write_text(f"before\n{performance.BEGIN}\nold\n{performance.END}\nafter\n")
    performance.update(page, [])
    assert "Nothing has been measured" in page.read_text()
    for each in (line(), line(length=1024), line(length=1024, median=0.7, time="2027")):
        append(results, each)
    append(others, {"median_ratio": 0.9})  # of another benchmark
    counted = {"benchmark": "instructions", "contestant": "rfa", "march": "native", "instructions": 1234567}
    counted |= {"per_pair": 50.0, "products_per_pair": 16.0, "functions_per_pair": 3.75, "share": 0.395}
    append(others, {**line(), **counted})
    performance.update(page, [results, others])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "0.700" in text
    assert "1,234,567" in text
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    page.write_text("no place for it")
    with pytest.raises(ValueError, match="expected"):
        performance.update(page, [results])
    assert (ROOT / "docs" / "record" / "performance.md").read_text().count(performance.BEGIN) == 1


def test_the_tables_of_gpu_kernels_are_those_of_the_kept_file():
    performance = script("benchmarks/performance.py")
    page = (ROOT / "docs" / "record" / "performance.md").read_text("utf-8")
    assert performance.with_kernels(page) == page, "run python benchmarks/performance.py"
    kept = json.loads(performance.KERNELS.read_text())
    assert {line["name"] for line in kept} <= set(re.findall(r"^\| ([\w, ]+?) \|", page, re.MULTILINE))
