"""What `rfa bench decode` times: a run of tokens that goes forward, as a decoder does, and makes their phases once."""

import pytest
import torch

from rfa.nn import cache_layer as phases
from rfa.ops.backends import missing
from rfa_lab.bench import Setting, cases, decode
from rfa_lab.bench.decode import RUN, FilterRun, dot_product_run
from rfa_lab.bench.measurement import StateShape
from rfa_lab.bench.operator import OperatorProblem, Trained

SHAPE = StateShape(2, 2, 20 + RUN, 8)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_run_makes_its_phases_once(monkeypatch, backend):
    """Also where the run before had the same places."""
    made, turns = [], phases.turns
    monkeypatch.setattr(phases, "turns", lambda *given: (made.append(given[1].shape[-1]), turns(*given))[1])
    problem = OperatorProblem(SHAPE, "m2-sc-rfa", Setting(backend=backend))
    with torch.no_grad():
        expected = problem.estimate()[:, :, -RUN:]
        run = FilterRun(problem)
        for call in (1, 2, 3):
            torch.testing.assert_close(torch.cat(run(), dim=2), expected, rtol=1e-4, atol=1e-5)
            assert made == [RUN] * call


@pytest.mark.skipif(missing("cpu") is not None, reason="the dense backend keeps all keys")
def test_a_certified_run_drops_keys():
    """Steep heads need few of them; the estimates are those of all keys."""
    steep, length = Trained("run", 0, {"process_noise": [5.0, 9.0]}), 200 + RUN
    problem = OperatorProblem(
        SHAPE._replace(length=length), "x2-riccati-alibi", Setting(), certified=2**-24, trained=steep
    )
    with torch.no_grad():
        expected = problem.with_all_keys().estimate()[:, :, -RUN:]
        run, full = FilterRun(problem), FilterRun(problem.with_all_keys())
        for call in (run, full, run):
            torch.testing.assert_close(torch.cat(call(), dim=2), expected, rtol=1e-4, atol=1e-5)
    assert run.cache.uncertified == 0
    assert run.cache_bytes() < full.cache_bytes() / 2


def test_the_dot_product_goes_the_same_way():
    problem = OperatorProblem(SHAPE, "m2-sc-rfa", Setting(backend="reference"))
    states = [state.detach() for state in problem.states]
    expected = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True)[:, :, -RUN:]
    run = dot_product_run(problem)
    for _ in range(2):
        torch.testing.assert_close(torch.cat(run(), dim=2), expected, rtol=1e-4, atol=1e-5)


def test_the_time_is_that_of_a_token(monkeypatch):
    monkeypatch.setattr(decode, "in_turns", lambda *_: {"rfa": [3.0 * RUN], "sdpa": [2.0 * RUN]})
    (case,) = cases("decode", Setting(backend="reference", repeats=1), lengths=[20], heads=2, channels=8, batch=1)
    (line,) = case.lines(lambda: None)
    assert line["seconds"] == {"rfa": [3.0], "peer": [2.0]}
    assert line["ratio"]["median"] == 1.5
    assert (line["pass"], line["length"]) == ("one token", 20)
    keys = 20 + RUN / 2
    assert line["bound"]["peer"]["flops"] == 4 * 8 * 2 * keys
