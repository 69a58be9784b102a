"""The peers of the operator: each is checked before it is timed, and one that cannot run is named with its reason."""

import sys
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cover import slow, some
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import rfa_lab.bench.peers as peers_module
from rfa.ops.backends import BACKENDS
from rfa_lab.bench import PEERS, Setting, cases, read
from rfa_lab.bench.decode import FilterRun
from rfa_lab.bench.measurement import StateShape
from rfa_lab.bench.operator import OperatorProblem
from rfa_lab.bench.peers import peers

SHAPE = StateShape(1, 2, 70, 16)
PRESETS = ("m2-sc-rfa", "x1-riccati", "m2.1-exponential", "m2.4-no-value-rotation", "m2.3-no-gate", "m2-released-bias")


def found(names, preset="m2-sc-rfa", backward=False, **setting):
    made = Setting(backend="reference", **setting)
    problem = OperatorProblem(SHAPE, preset, made)
    return peers(names, problem.layer, problem.states, problem.grad, made, backward)


@pytest.fixture
def gradients_of_flex(monkeypatch):
    """Flex attention has gradients on the CPU, but refuses them."""
    module = sys.modules[flex_attention.__module__]  # `torch.nn.attention` has a function of this name
    monkeypatch.setattr(module, "_validate_device", lambda *states: None)


@pytest.mark.parametrize("preset", some(PRESETS, 2))
def test_flex_attention_has_the_filters_score(preset):
    """The estimates are those of the reference, in float64, to float32's last digits."""
    made = found(["flex", "flex-score"], preset)
    assert (list(made.calls), made.filters, made.refused) == (["flex", "flex-score"], ["flex", "flex-score"], {})
    assert all(check["errors"]["estimate"] < 1e-6 for check in made.checks.values())


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=slow), pytest.param("float16", marks=slow)]
)
def test_gradients_of_flex_attention(gradients_of_flex, dtype):
    """Of states and of all dynamics: norms, tables and the decay pass them on."""
    made = found(["flex", "flex-score"], backward=True, dtype=dtype)
    assert made.refused == {}
    for name, check in made.checks.items():
        assert {"gradients of states", "gradients of parameters"} < check["errors"].keys(), name
        if dtype == "float32":
            assert check["errors"]["gradients of states"] < 1e-5
    assert all(isinstance(gradient, Tensor) for gradient in made.calls["flex"]())
    assert len(made.calls["flex"]()) == len(OperatorProblem(SHAPE, "m2-sc-rfa", Setting()).wanted)


def test_a_wrong_gradient_is_refused(gradients_of_flex, monkeypatch):
    turn = peers_module.turn
    monkeypatch.setattr(peers_module, "turn", lambda x, *phases: turn(2 * x - x.detach(), *phases))
    reason = found(["flex"], backward=True).refused["flex"]
    assert "its numbers are off" in reason


def test_flex_attention_is_compiled_on_a_gpu(gradients_of_flex, monkeypatch):
    """Traced whole and differentiated as on a GPU, where gradients of captured views would be lost."""
    compiled = []

    def by_dynamo(function, **given):
        compiled.append(given)
        return torch_compile(function, **given, backend="aot_eager")

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", by_dynamo)
    monkeypatch.setattr(peers_module, "_flex_attention", partial(_on_a_gpu, peers_module._flex_attention))
    assert found(["flex"], backward=True).refused == {}
    assert compiled == [{"dynamic": False, "fullgraph": True}]


def _on_a_gpu(function, states, setting):
    return function(states, types.SimpleNamespace(device="cuda", dtype=setting.dtype))


def test_flash_attention_where_it_is_installed(monkeypatch):
    """A stand-in with the package's layout: (batch, length, heads, channels)."""

    def flash_attn_func(query, key, value, causal):
        assert causal
        assert query.shape == (1, SHAPE.length, SHAPE.heads, SHAPE.channels)
        states = (state.transpose(1, 2) for state in (query, key, value))
        return F.scaled_dot_product_attention(*states, is_causal=True).transpose(1, 2)

    package = types.ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(peers_module, "installed", lambda name: name == "flash_attn")
    assert found(["flash-attn"]).refused == {"flash-attn": "it needs a GPU: got the device cpu"}
    made_for = peers_module._flash_attention
    cuda = types.SimpleNamespace(device="cuda", dtype="float32")
    with pytest.raises(peers_module.Refusal, match="got float32, expected bfloat16 or float16"):
        made_for(cuda)
    cuda.dtype = "bfloat16"
    monkeypatch.setattr(peers_module, "_flash_attention", lambda setting: made_for(cuda))
    for backward in (False, True):
        made = found(["flash-attn"], backward=backward, dtype="bfloat16")
        assert (list(made.calls), made.filters) == (["flash-attn"], [])


def test_peers_that_cannot_run_are_named(monkeypatch):
    made = found(PEERS, backward=True)
    assert list(made.calls) == ["sdpa", "sdpa-flash"]
    assert made.refused["flash-attn"] == "flash_attn is not installed"
    assert made.refused["flex"].startswith("NotImplementedError: FlexAttention does not support backward on CPU")
    assert made.refused["sdpa-cudnn"].startswith("RuntimeError: ")
    monkeypatch.setattr(peers_module, "_UNCOMPILED", 100)
    assert found(["flex"]).refused["flex"].endswith("it holds all scores: got 9,800, expected at most 100")

    def broken(states, kernel=None):
        raise OSError("the compiler crashed\nwith a long log")

    monkeypatch.setattr(peers_module, "dot_products", broken)
    assert found(["sdpa"]).refused == {"sdpa": "OSError: the compiler crashed"}


def test_the_command_names_them(rfa, tmp_path):
    tiny = ["--lengths", "16", "--batch", "1", "--heads", "2", "--channels", "8", "--repeats", "1"]
    tiny += ["--backend", "reference", "--out", "b.jsonl"]
    status, out, _ = rfa("bench", "operator", *tiny, "--peers", "sdpa", "flash-attn", "flex-score")
    assert status == 0
    assert "flash-attn, forward, float32: not timed: flash_attn is not installed" in out
    lines = read(tmp_path / "b.jsonl")
    assert [(line["pass"], line["peer"]) for line in lines] == [
        ("forward", "sdpa"),
        ("forward", "flex-score"),
        ("forward_backward", "sdpa"),
    ]
    assert all(line["peer_check"]["passed"] for line in lines)
    assert lines[1]["bound"]["peer"] == lines[1]["bound"]["rfa"]  # the same functions
    assert lines[0]["bound"]["peer"]["logarithms"] == 0
    assert set(lines[2]["refused"]) == {"flash-attn", "flex-score"}
    status, out, _ = rfa("bench", "operator", *tiny, "--peers", "flash-attn")
    assert status == 0
    assert "no peer ran" in out
    assert "ratio" not in read(tmp_path / "b.jsonl")[-1]


def test_names_of_peers(rfa):
    for arguments, says in (
        (["operator", "--peers", "sdpb"], "peers: got 'sdpb', expected 'all' or some of sdpa, sdpa-flash"),
        (["decode", "--peers", "sdpa"], "--peers: got ['sdpa'], expected the operator or a step with it"),
        (["step", "--peers", "sdpa"], "peers: got 'sdpa', expected one of rfa, sc-rfa, rope, alibi, "),
        (["step", "--peers", "rfa"], "peers: got 'rfa', expected another preset than rfa"),
        (["step", "--peers", "b1-rope", "b2-alibi"], "--peers: got ['b1-rope', 'b2-alibi'], expected one preset"),
    ):
        status, _, err = rfa("bench", *arguments)
        assert status == 2
        assert says in err
    cpu = Setting(backend="reference")
    assert {case.peers for case in cases("operator", cpu)} == {("sdpa",)}
    assert {case.peers for case in cases("operator", cpu, peers=["all"])} == {PEERS}


@pytest.mark.parametrize("preset", ["m2-sc-rfa", "x1-riccati"])
def test_all_tensors_are_on_the_device(gradients_of_flex, monkeypatch, preset):
    """The device "meta" stands for a GPU: it refuses tensors of the CPU, and a look at a value."""
    monkeypatch.setitem(BACKENDS, "triton", BACKENDS["triton"]._replace(devices=None))
    monkeypatch.setattr("rfa.ops.backends.missing", lambda name: None)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # which does not know this device
    setting = Setting(dtype="bfloat16")
    for field, value in (("device", "meta"), ("backend", "triton")):
        object.__setattr__(setting, field, value)
    problem = OperatorProblem(StateShape(2, 4, 128, 64), preset, setting)
    assert all(tensor.is_leaf for tensor in problem.wanted.values())  # the check copies them
    assert problem.estimate().is_meta
    assert all(gradient.is_meta for gradient in problem.gradients())
    assert all(estimate.is_meta for estimate in FilterRun(problem)())
    for name in PEERS:
        if name != "flash-attn":
            peer = peers_module._peer(name, problem.layer, problem.states, setting)
            call = peers_module._call(peer, problem.layer, problem.states, problem.grad, True)
            assert all(gradient.is_meta for gradient in call()), name
