"""Compiled and exported models: one graph without breaks, any length, and what other runtimes compute from it.

In processes of their own: the shape checks of the test run cannot be traced, and users do not have them.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from cover import slow

STRICT = """
import torch
from torch.export import Dim
from models.small import assert_same, small, tokens

model, ids = small("m2-sc-rfa", num_hidden_layers=1), tokens()
lengths = {"input_ids": {0: Dim("batch"), 1: Dim("length")}, "use_cache": None}
exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=lengths, strict=True)
longer = tokens(3, 25)
assert_same(exported.module()(input_ids=longer, use_cache=False).logits, model(longer).logits)
"""

EXPORTED = """
import torch
from torch.export import Dim
from models.small import assert_same, small, tokens

names = ["b1-rope", "b2-alibi", "b3-decayed-rope", "c2-window", "c3-yarn", "c4-fox", "x1-riccati"]
for name in [*names, "x4-content-riccati", "x5-content-clock"]:
    for backend in ("reference", "auto"):
        model, ids = small(name, backend=backend, num_hidden_layers=1), tokens()
        lengths = {"input_ids": {0: Dim("batch"), 1: Dim("length", min=3)}, "use_cache": None}
        given = {"input_ids": ids, "use_cache": False}
        exported = torch.export.export(model, (), given, dynamic_shapes=lengths, strict=True)
        longer = tokens(3, 25)
        assert_same(exported.module()(input_ids=longer, use_cache=False).logits, model(longer).logits)
"""

COMPILED = """
import time
import torch
from torch._dynamo.utils import counters
from models.small import assert_same, small, tokens

model, ids = small("m2-sc-rfa", num_hidden_layers=1), tokens()
expected = model.generate(ids, max_new_tokens=150, do_sample=False)
given = {"labels": ids, "use_cache": False}
loss = model(ids, **given).loss
loss.backward()
gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
model.zero_grad()
begun = time.process_time()
model.compile(fullgraph=True)
compiled = model(ids, **given).loss
compiled.backward()
print(f"train step: {time.process_time() - begun:.0f} s")
assert_same(compiled, loss)
for key, parameter in model.named_parameters():
    assert_same(parameter.grad, gradients[key])
torch._dynamo.reset()
counters.clear()
begun = time.process_time()
model.compile(fullgraph=True, dynamic=True)
assert torch.equal(model.generate(ids, max_new_tokens=150, do_sample=False), expected)
# the prompt, a step, and steps where the cache or its tables grow or are full: not one for each token or size
assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= 5
print(f"generate: {time.process_time() - begun:.0f} s")
"""

ONNX = """
import sys
import onnxruntime
import torch
from torch.export import Dim
from models.small import small, tokens

for name in ("m2-sc-rfa", "b1-rope", "c2-window", "x4-content-riccati"):
    model, file = small(name, backend="reference"), f"{sys.argv[1]}/{name}.onnx"
    lengths = {"input_ids": {0: Dim("batch"), 1: Dim("length", min=3)}, "use_cache": None}
    given = {"input_ids": tokens(), "use_cache": False}
    program = torch.onnx.export(model, (), kwargs=given, dynamo=True, dynamic_shapes=lengths, verbose=False)
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for shape in ((2, 9), (3, 25), (1, 3)):
        ids = tokens(*shape)
        (logits,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(ids).logits.detach(), rtol=0, atol=1e-4)
"""


REFUSED = """
import torch
from torch.export import Dim
from models.small import small, tokens

model = small("x6-content-dynamics", num_hidden_layers=1)
lengths = {"input_ids": {0: Dim("batch"), 1: Dim("length", min=3)}, "use_cache": None}
given = {"input_ids": tokens(), "use_cache": False}
for strict in (False, True):
    try:
        torch.export.export(model, (), given, dynamic_shapes=lengths, strict=strict)
    except Exception as error:
        print("export: got a scan, expected none" in str(error))
"""


def run(program, *arguments):
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exported_with_any_length():
    """Strict, so that a program is not tied to the values of the example."""
    run(STRICT)


@slow
def test_exported_variants():
    """Strict export of every way through the code that has one: 50 s. The example is within the window."""
    run(EXPORTED)


@slow
def test_a_scan_is_not_exported():
    """It would be wrong at another length, without an error: 5 s."""
    assert run(REFUSED).split() == ["True", "True"]


@slow
def test_compiled_by_inductor():
    """A training step and 150 tokens of `generate` without graph breaks: 35 s of processor time to compile."""
    print(run(COMPILED))


@slow
def test_onnx(tmp_path):
    """The reference backend in onnxruntime, at lengths other than the exported one: 50 s."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run(ONNX, tmp_path)
