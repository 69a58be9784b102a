"""`rfa bench` from end to end, in miniature: what it prints, appends, refuses and keeps."""

import json

import pytest
import torch
from cover import slow, some
from scripts import ROOT, script
from training.runs import messages

from rfa.models import PRESETS, RFAForCausalLM
from rfa.ops import choose_backend
from rfa_lab.bench import Setting, cases, read
from rfa_lab.bench.measurement import StateShape, compare_with_tolerances
from rfa_lab.bench.models import TrainingStepCase
from rfa_lab.bench.operator import OperatorProblem, filter_layer, trained_layers

TINY = ["--batch", "1", "--heads", "2", "--channels", "8", "--repeats", "2", "--backend", "reference"]
TRAINED = ROOT / "results" / "context" / "results" / "x2-riccati-alibi-no-innovation-seed0.json"
MODEL = ["--set", "vocab_size=11", "num_hidden_layers=1"]


def test_operator(rfa, tmp_path):
    status, out, _ = rfa("bench", "operator", "--lengths", "16", "70", *TINY, "--out", "new/bench.jsonl")
    assert status == 0
    lines = read(tmp_path / "new" / "bench.jsonl")
    assert [(line["length"], line["pass"]) for line in lines] == [
        (16, "forward"),
        (16, "forward_backward"),
        (70, "forward"),
        (70, "forward_backward"),
    ]
    for line in lines:
        assert f"{line['ratio']['median']:.3f}" in out
        assert line["check"]["passed"]
        assert len(line["ratios"]) == len(line["seconds"]["peer"]) == line["repeats"] == 2
        where = {"preset": "rfa", "peer": "sdpa", "backend": "reference", "device": "cpu", "dtype": "float32"}
        where |= {"batch": 1, "heads": 2, "channels": 8, "threads": torch.get_num_threads()}
        assert {name: line[name] for name in where} == where
        assert {"rfa", "commit", "python", "torch", "machine"} <= line["environment"].keys()
        assert line["processor"]
        assert line["bound"]["rfa"]["seconds"] > line["bound"]["peer"]["seconds"] > 0
    assert "gradients" not in lines[0]
    assert {"query", "key", "value", "decay", "raw_process_noise", "raw_robustness"} <= set(lines[1]["gradients"])
    status, _, _ = rfa("bench", "operator", "--lengths", "16", *TINY, "--out", "new/bench.jsonl")
    assert read(tmp_path / "new" / "bench.jsonl")[:4] == lines


def test_certified(rfa, tmp_path):
    """Beside SDPA and beside all keys, with the dynamics of each layer of a trained model."""
    status, out, _ = rfa("bench", "operator", "--certified", "--lengths", "70", *TINY)
    assert status == 0
    assert "rfa (reference, certified)" in " ".join(out.split())
    heads = ["--heads", "8", "--repeats", "1"]
    status, out, _ = rfa("bench", "decode", "--certified", "--trained", TRAINED, "--lengths", "30", *TINY, *heads)
    assert status == 0
    assert "cache of layer 3 after 30 tokens: " in out
    lines = read(tmp_path / "rfa-bench.jsonl")
    assert [(line["benchmark"], line["peer"]) for line in lines[:4]] == [
        ("operator", "sdpa"),
        ("operator", "all-keys"),
        ("operator", "sdpa"),
        ("operator", "all-keys"),
    ]
    assert all(line["certified"] == 2**-24 and "bound" not in line for line in lines)
    assert [line["trained"]["layer"] for line in lines[4:]] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_page_has_the_numbers_of_the_results():
    page = (ROOT / "docs" / "long-sequences.md").read_text(encoding="utf-8")
    assert script("docs/long_sequences.py").written(page) == page


def test_the_dynamics_are_those_of_the_result_file():
    name, layers = trained_layers(TRAINED)
    held = filter_layer(name, 8, 16, trained=layers[2]).dynamics()
    values = json.loads(TRAINED.read_text())["dynamics"]["layers"]["2"]
    for field in ("process_noise", "key_noise", "robustness", "inverse_temperature", "decay", "noise_floor"):
        torch.testing.assert_close(held[field].detach(), torch.tensor(values[field][-1]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("threads", [None, 1])
def test_threads_are_those_of_the_start(rfa, tmp_path, monkeypatch, threads):
    """Nothing is set in the process that is timed: that would slow down the peer."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("it was set"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    given = [] if threads is None else ["--threads", str(threads)]
    status, _, _ = rfa("bench", "decode", "--lengths", "16", *TINY, *given)
    assert status == 0
    (line,) = read(tmp_path / "rfa-bench.jsonl")
    expected = (torch.get_num_threads(), "PyTorch") if threads is None else (threads, "OMP_NUM_THREADS")
    assert (line["threads"], line["threads_from"]) == expected


def test_step_decode_and_generate(rfa, tmp_path):
    presets = ["--presets", "b2-alibi", "m2-sc-rfa"]
    status, out, _ = rfa("bench", "step", "--lengths", "12", *TINY, *presets, *MODEL)
    assert status == 0
    against = ["--presets", "x5-content-clock", "--peers", "m2-sc-rfa"]
    assert rfa("bench", "step", "--lengths", "12", *TINY, *against, *MODEL)[0] == 0
    status, _, _ = rfa("bench", "decode", "--lengths", "20", *TINY)
    assert status == 0
    status, said, _ = rfa("bench", "generate", "--lengths", "20", *TINY, *MODEL)
    assert status == 0
    assert "`generate` / llama" in said
    lines = read(tmp_path / "rfa-bench.jsonl")  # where there is no clone
    assert [(line["benchmark"], line["preset"], line["peer"]) for line in lines] == [
        ("step", "b2-alibi", "b1-rope"),
        ("step", "m2-sc-rfa", "b1-rope"),
        ("step", "x5-content-clock", "m2-sc-rfa"),
        ("decode", "rfa", "sdpa"),
        ("generate", "rfa", "llama"),
    ]
    assert lines[1]["model"]["vocab_size"] == 11
    assert lines[2]["peer_backend"] == lines[2]["backend"]
    assert "m2-sc-rfa: gradient of dynamics" in lines[2]["check"]["errors"]
    assert "gradient of dynamics" in lines[1]["check"]["errors"]
    assert "vocabulary 11" in " ".join(out.split())  # the title breaks at the width of the table


@pytest.mark.parametrize("preset", some(PRESETS, 9))
def test_a_step_names_the_backend_that_its_layers_run(monkeypatch, preset):
    """For the same states: on CUDA the choice depends on the head sizes."""
    asked = {"setting": [], "backends": []}

    def of(place):
        def choose(name, device, dtype, channels):
            chosen = choose_backend(name, device, dtype, channels)
            asked[place].append((chosen, torch.device(device).type, dtype, channels))
            return chosen

        return choose

    for place, module in (("setting", "bench.measurement"), ("backends", "ops.backends")):
        monkeypatch.setattr(f"rfa.{module}.choose_backend", of(place))
    sizes = {"vocab_size": 11, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    step = TrainingStepCase(preset, 1, 8, sizes, Setting(dtype="bfloat16"))
    config = step.config(preset)
    named = step.backend(config)
    with torch.autocast("cpu", torch.bfloat16):
        RFAForCausalLM(config)(torch.arange(8)[None])
    ran = asked["backends"]
    if preset == "x6-content-dynamics":  # autograd turns its states, in float32
        ran = [(chosen, device, torch.bfloat16, channels) for chosen, device, _, channels in ran]
    assert asked["setting"] == ran
    assert named == (ran[0][0] if ran else "none")
    plain = {"rope", "b1-rope", "b1-rope-as-released", "c1-nope", "c2-window", "c3-yarn", "c5-rope-innovation"}
    assert (named == "none") == (preset in plain)  # PyTorch's own attention
    assert all(channels == (24, 24) for *_, channels in ran)


@pytest.mark.parametrize("what", ["operator", "step", "decode", "generate", "memory"])
def test_nothing_is_timed_that_is_wrong(rfa, tmp_path, monkeypatch, what):
    def wrong(groups):
        return compare_with_tolerances(
            {name: ([(a + a.detach(), e) for a, e in pairs], t) for name, (pairs, t) in groups.items()}
        )

    module = {"memory": "operator", "step": "models", "generate": "models"}.get(what, what)
    monkeypatch.setattr(f"rfa_lab.bench.{module}.compare_with_tolerances", wrong)
    for timed in ("operator", "decode", "models"):
        monkeypatch.setattr(f"rfa_lab.bench.{timed}.in_turns", lambda *_: pytest.fail("it was timed"))
    monkeypatch.setattr("rfa_lab.bench.memory.MemoryCase._in_a_process", lambda *_: pytest.fail("it was measured"))
    model = MODEL if what in ("step", "generate") else []
    status, out, _ = rfa("bench", what, "--lengths", "16", *TINY, *model, "--out", "bench.jsonl")
    assert status == 1
    assert "check failed" in out
    (line,) = read(tmp_path / "bench.jsonl")
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


@pytest.mark.parametrize("wrong", ["estimate", "gradients of states", "gradients of parameters"])
def test_each_kind_of_error_is_found(monkeypatch, wrong):
    """An operator that is a hundredth off in one place, at rows that a long sequence is sampled at."""
    from rfa_lab.bench import operator

    class Skewed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.01

    def skewed(layer, states, backend, **where):
        if states[0].dtype == torch.float64:
            return exact(layer, states, backend, **where)
        if wrong == "gradients of states":
            states = [*states[:2], Skewed.apply(states[2])]
        estimate = exact(layer, states, backend, **where)
        return estimate * 1.01 if wrong == "estimate" else estimate

    exact = operator.call_operator
    monkeypatch.setattr(operator, "call_operator", skewed)
    problem = OperatorProblem(StateShape(1, 2, 80, 8), "m2-sc-rfa", Setting(backend="reference"))
    if wrong == "gradients of parameters":
        problem.layer.dynamics.raw_robustness.register_hook(lambda grad: grad * 1.01)
        monkeypatch.setattr("copy.deepcopy", _without_hooks)
    check = problem.check()
    assert not check["passed"]
    found = {name for name, error in check["errors"].items() if error > check["tolerances"][name]}
    assert {name.split(",")[0] for name in found} >= {wrong}


def _without_hooks(layer):
    from rfa_lab.bench.operator import filter_layer

    return filter_layer("m2-sc-rfa", layer.num_heads, 2 * layer.modes)


def test_ctrl_c_keeps_what_is_done(rfa, tmp_path, monkeypatch):
    from rfa_lab.bench import operator

    turns = operator.in_turns

    def stopped(contestants, *rest):
        if len(read(tmp_path / "bench.jsonl")) == 1:
            raise KeyboardInterrupt
        return turns(contestants, *rest)

    monkeypatch.setattr(operator, "in_turns", stopped)
    status, out, err = rfa("bench", "operator", "--lengths", "16", *TINY, "--out", "bench.jsonl")
    assert status == 130
    assert messages(err)[-1] == "rfa: stopped"
    assert len(read(tmp_path / "bench.jsonl")) == 1
    assert "operator, forward" in out


@slow
def test_memory(monkeypatch):
    (case,) = cases("memory", Setting(backend="reference"), lengths=[512], heads=2, channels=8)
    grown = case._in_a_process("rfa")
    assert grown > 2 * 512 * 512 * 4  # at least the scores of a dense operator, in float32
    monkeypatch.setattr(type(case), "_in_a_process", lambda self, contestant: {"rfa": grown, "sdpa": 1000}[contestant])
    (line,) = case.lines(lambda: None)
    assert line["bytes"] == {"rfa": grown, "peer": 1000}
    assert line["ratio"]["median"] == grown / 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["everything"], ["bench: got 'everything'", "operator, step, decode, generate, memory, all"]),
        (["step", "--lengths", "1"], "lengths: got 1"),
        (["--threads", "0"], "threads: got 0"),
        (["--presets", "m9"], ["presets: got 'm9'", "m2-sc-rfa"]),
        (["operator", "--presets", "b2-alibi"], ["b2-alibi", "a filter"]),
        (["step", "--set", "colour=red"], "colour"),
        (["--out", "."], "--out: got '.', expected the path of a file"),
    ],
)
def test_bad_input(rfa, tmp_path, arguments, says):
    status, out, err = rfa("bench", *arguments)
    assert (status, out) == (2, "")
    assert len(messages(err)) == 1, err
    assert all(words in err for words in ([says] if isinstance(says, str) else says))
    assert list(tmp_path.iterdir()) == []
