"""`rfa bench` in miniature: what it prints, appends and refuses; nothing wrong is timed; what a decoding run does."""

import json

import pytest
import torch
from training.runs import messages

from rfa.nn import cache_layer
from rfa.ops.backends import missing
from rfa_lab import bench
from rfa_lab.bench import RUN, Case, CaseInputs, FilterRun, compare_with_tolerances, dot_product_run

TINY = ["--batch", "1", "--heads", "2", "--channels", "8", "--repeats", "2", "--backend", "reference"]
DECODING = Case("decode", "m2-sc-rfa", (2, 2, 20, 8), backend="reference")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(bench, "TURN", 1e-4)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_operator(rfa, tmp_path):
    assert rfa("bench", "decode", "--lengths", "20", *TINY, "--out", "new/bench.jsonl")[0] == 0
    status, out, _ = rfa("bench", "operator", "--lengths", "16", "70", *TINY, "--out", "new/bench.jsonl")
    assert status == 0
    first, *lines = lines_of(tmp_path / "new" / "bench.jsonl")
    assert (first["benchmark"], first["pass"], first["cache_bytes"]["rfa"] > 0) == ("decode", "one token", True)
    passes = [(16, "forward"), (16, "forward_backward"), (70, "forward"), (70, "forward_backward")]
    assert [(line["length"], line["pass"]) for line in lines] == passes
    where = {"preset": "rfa", "peer": "sdpa", "backend": "reference", "device": "cpu", "dtype": "float32"}
    where |= {"batch": 1, "heads": 2, "channels": 8, "repeats": 2, "threads": torch.get_num_threads()}
    for line in lines:
        assert f"{line['ratio']['median']:.3f}" in out
        assert line["check"]["passed"]
        named = {name.split(",")[0] for name in line["check"]["errors"]}
        assert named == {"estimate", "gradients of states", "gradients of parameters"}
        assert len(line["ratios"]) == len(line["seconds"]["peer"]) == 2
        assert {name: line[name] for name in where} == where
        assert {"rfa", "commit", "python", "torch", "machine"} <= line["environment"].keys()


def test_certified(rfa, tmp_path):
    """Beside SDPA and beside all keys."""
    for what in bench.WHAT:
        assert rfa("bench", what, "--certified", "--lengths", "70", *TINY)[0] == 0
    lines = lines_of(tmp_path / "rfa-bench.jsonl")
    assert [line["peer"] for line in lines] == ["sdpa", "all-keys"] * 3
    assert all(line["certified"] == 2**-24 for line in lines)


@pytest.mark.parametrize("what", bench.WHAT)
def test_nothing_is_timed_that_is_wrong(rfa, tmp_path, monkeypatch, what):
    def wrong(groups):
        return compare_with_tolerances(
            {name: ([(a + a.detach(), e) for a, e in pairs], t) for name, (pairs, t) in groups.items()}
        )

    monkeypatch.setattr(bench, "compare_with_tolerances", wrong)
    monkeypatch.setattr(bench, "in_turns", lambda *_: pytest.fail("it was timed"))
    status, out, _ = rfa("bench", what, "--lengths", "16", *TINY)
    assert status == 1
    assert "check failed:" in out
    (line,) = lines_of(tmp_path / "rfa-bench.jsonl")
    assert not line["check"]["passed"]
    assert "ratio" not in line


def test_what_a_check_says():
    exact, off = torch.ones(4, dtype=torch.float64), torch.full((4,), 1.01)
    found = compare_with_tolerances({"a": ([(off, exact)], 0.02), "b": ([(exact, exact), (off, exact)], 1e-3)})
    assert not found["passed"]
    assert found["errors"] == {"a": pytest.approx(0.01, rel=1e-5), "b": pytest.approx(0.01, rel=1e-5)}
    assert compare_with_tolerances({"a": ([(off, exact)], 0.02)})["passed"]
    for broken in (torch.nan, torch.inf):
        found = compare_with_tolerances({"a": ([(off * broken, exact), (exact, exact)], 0.02)})
        assert (found["passed"], found["errors"]) == (False, {"a": None})


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_run_makes_its_phases_once(monkeypatch, backend):
    """Also where the run before had the same places; the estimates are those of the whole sequence."""
    made, turns = [], cache_layer.turns
    monkeypatch.setattr(cache_layer, "turns", lambda *given: (made.append(given[1].shape[-1]), turns(*given))[1])
    problem = CaseInputs(Case("decode", "m2-sc-rfa", (2, 2, 20, 8), backend=backend))
    with torch.no_grad():
        expected = problem.estimate()[:, :, -RUN:]
        run = FilterRun(problem)
        for call in (1, 2, 3):
            torch.testing.assert_close(torch.cat(run(), dim=2), expected, rtol=1e-4, atol=1e-5)
            assert made == [RUN] * call


@pytest.mark.skipif(missing("cpu") is not None, reason="the dense backend keeps all keys")
def test_a_certified_run_drops_keys():
    """Steep heads need few of them; the estimates are those of all keys."""
    problem = CaseInputs(Case("decode", "x2-riccati-alibi", (2, 2, 200, 8), certified=True))
    problem.layer.dynamics.raw_process_noise.data.fill_(7.0)  # softplus keeps such numbers
    with torch.no_grad():
        expected = problem.with_all_keys().estimate()[:, :, -RUN:]
        run, full = FilterRun(problem), FilterRun(problem.with_all_keys())
        for call in (run, full, run):
            torch.testing.assert_close(torch.cat(call(), dim=2), expected, rtol=1e-4, atol=1e-5)
    assert run.cache.uncertified == 0
    assert run.cache_bytes() < full.cache_bytes() / 2


def test_the_dot_product_goes_the_same_way():
    problem = CaseInputs(DECODING)
    states = [state.detach() for state in problem.states]
    expected = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True)[:, :, -RUN:]
    run = dot_product_run(problem)
    for _ in range(2):
        torch.testing.assert_close(torch.cat(run(), dim=2), expected, rtol=1e-4, atol=1e-5)


def test_bad_input(rfa, tmp_path):
    for arguments, says in (
        (["everything"], ["bench: got 'everything'", "operator, decode"]),
        (["--lengths", "0"], ["lengths: got 0"]),
        (["--presets", "m9"], ["presets: got 'm9'", "m2-sc-rfa"]),
        (["operator", "--presets", "b2-alibi"], ["b2-alibi", "a filter"]),
        (["--presets", "m2-sc-rfa", "--certified"], ["--certified: got 'm2-sc-rfa'", "riccati"]),
        (["--out", "."], ["--out: got '.', expected the path of a file"]),
    ):
        status, _, err = rfa("bench", *arguments)
        assert (status, len(messages(err))) == (2, 1), err
        assert all(words in err for words in says)
        assert list(tmp_path.iterdir()) == []
