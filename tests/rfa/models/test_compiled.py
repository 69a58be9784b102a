"""Compiled and exported models: one graph without breaks, any length, and what other runtimes compute from it.

In processes of their own: the shape checks of the test run cannot be traced, and users do not have them.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cover import slow
from integrations.hosts import NAMES as HOSTS
from scripts import with_tests

from .small import NAMES

EXPORTED = '''
import json
import re
import sys
import warnings
import torch
from torch._dynamo.exc import Unsupported
from torch.export import Dim
from integrations.hosts import host
from models.small import assert_same, small, tokens
from rfa.integrations import replace_attention


def padded(batch, length):
    """A mask of padding on the left of the first row, and on the right of the second."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, : length // 3] = 0
    mask[1:, length - length // 4 :] = 0
    return mask


def serve(model, *shapes, strict=True, mask=False):
    given, free = {"input_ids": tokens(vocabulary=50), "use_cache": False}, {0: Dim("batch"), 1: Dim("length")}
    lengths = {"input_ids": free, "use_cache": None}
    if mask:
        given["attention_mask"] = padded(2, 9)
        lengths["attention_mask"] = free
    program = torch.export.export(model, (), given, dynamic_shapes=lengths, strict=strict).module()
    for shape in shapes:
        ids, masked = tokens(*shape, vocabulary=50), {"attention_mask": padded(*shape)} if mask else {}
        found, expected = (run(input_ids=ids, use_cache=False, **masked).logits for run in (program, model))
        counts = padded(*shape).bool() if mask else slice(None)
        assert_same(found[counts], expected[counts])


def refuse(types, message, *given, **options):
    try:
        serve(*given, **options)
    except types as error:
        assert re.search(message, str(error)), error
    else:
        raise AssertionError(f"got a program, expected {types}")


warnings.filterwarnings("error", "Dynamo detected")  # a cache of results, whose wrapper it leaves out
SCAN = "export: got a scan, expected none"
for kind, name, backend in json.loads(sys.argv[1]):
    if kind == "replaced":
        serve(replace_attention(host(name), backend=backend), (2, 2), (3, 3), (3, 25), mask=True)
        continue
    model = small(name, backend=backend, num_hidden_layers=1)
    if kind == "refused":
        refuse(ValueError, SCAN, model, strict=False)
        refuse(Unsupported, SCAN, model)
        continue
    if kind != "padded":
        serve(model, (1, 1), (2, 2), (3, 25))
    if kind == "any length, no mask":
        refuse(Unsupported, SCAN, model, mask=True)
    elif name != "b1-rope-as-released":  # which refuses padding
        serve(model, (2, 2), (3, 3), (3, 25), mask=True)
'''

COMPILED = """
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
model.compile(fullgraph=True)
compiled = model(ids, **given).loss
compiled.backward()
assert_same(compiled, loss)
for key, parameter in model.named_parameters():
    assert_same(parameter.grad, gradients[key])
torch._dynamo.reset()
counters.clear()
model.compile(fullgraph=True, dynamic=True)
assert torch.equal(model.generate(ids, max_new_tokens=150, do_sample=False), expected)
# the prompt, a step, and steps where the cache or its tables grow or are full: not one for each token or size
assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= 5
"""

ONNX = """
import sys
import onnxruntime
import torch
from torch.export import Dim
from models.small import small, tokens

folder, kind, said, *names = sys.argv[1:]
for name in names:
    model, file = small(name, backend="reference", num_hidden_layers=1), f"{folder}/{name}.onnx"
    lengths = {"input_ids": {0: Dim("batch"), 1: Dim("length")}, "use_cache": None}
    given = {"input_ids": tokens(), "use_cache": False}
    if kind == "from 3 tokens on":
        lengths["input_ids"][1] = Dim("length", min=3)
    try:
        program = torch.onnx.export(model, (), kwargs=given, dynamo=True, dynamic_shapes=lengths, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        assert {"no stable sort": "aten.sort", "refused": "export: got a scan, expected none"}[said] in str(error)
        continue
    assert said == "yes"
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for shape in ((1, 1), (2, 2), (2, 9), (3, 25)):
        ids = tokens(*shape)
        (logits,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(ids).logits.detach(), rtol=0, atol=1e-4)
"""


def run(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=with_tests(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def rows():
    """The table of docs/ecosystem.md: presets, what `torch.export` makes of them, what ONNX does."""
    page = (Path(__file__).parents[3] / "docs" / "ecosystem.md").read_text("utf-8")
    _, _, table = page.partition("| presets | `torch.export` | ONNX |\n| --- | --- | --- |\n")
    lines = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()]
    return [(re.findall(r"`(.+?)`", names), kind, onnx) for names, kind, onnx in lines]


def test_the_page_says_of_every_preset_how_it_is_exported():
    assert sorted(name for names, _, _ in rows() for name in names) == sorted(NAMES)
    assert {kind for _, kind, _ in rows()} == {"any length", "any length, no mask", "refused"}


def test_exported_as_the_page_says():
    """A preset that is exported, and one that is refused. Strict: no program is tied to the values of the example."""
    run(EXPORTED, json.dumps([("padded", "rfa", "auto"), ("refused", "x6-content-dynamics", "auto")]))


@slow
@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][0])
def test_every_row_of_the_page(row):
    """Every preset with both backends: 3 minutes in all. The example is within the window."""
    names, kind, _ = row
    run(EXPORTED, json.dumps([(kind, name, backend) for name in names for backend in ("reference", "auto")]))


@slow
@pytest.mark.parametrize("name", HOSTS)
def test_replaced_models_are_exported(name):
    run(EXPORTED, json.dumps([("replaced", name, backend) for backend in ("reference", "auto")]))


@slow
def test_compiled_by_inductor():
    """A training step and 150 tokens of `generate` without graph breaks: 35 s of processor time to compile."""
    run(COMPILED)


@slow
@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][0])
def test_onnx(row, tmp_path):
    """The reference backend in onnxruntime, at lengths other than the exported one: 3 minutes in all."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    names, kind, said = row
    run(ONNX, tmp_path, kind, said, *names)
