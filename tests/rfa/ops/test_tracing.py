"""A recorded program serves other numbers than it was recorded with: what is fast for ordinary ones is not in it."""

import os
import warnings

import pytest
import torch
from cover import slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rfa.ops import robust_filter_attention

from .cpu.compiled import python
from .problems import problem


def traced(function, *given):
    """By `torch.jit.trace`, which warns of branches that shapes decide, and that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(function, given, check_trace=False)


def operator(names, **options):
    """The reference of inputs in this order."""

    def call(*given):
        return robust_filter_attention(**dict(zip(names, given, strict=True)), backend="reference", **options)

    return call


def extreme(inputs):
    """The same with a far query and hardly any noise: quotients beyond float32."""
    small = {n: x * 1e-25 for n, x in inputs.items() if n in ("process_noise", "key_noise", "query_noise")}
    return {**inputs, **small, "noise_floor": inputs["noise_floor"] * 1e-25, "query": inputs["query"] * 1e12}


def recorded(**how):
    return lambda function, *given: make_fx(function, **how)(*given)


RECORDERS = {
    "jit": traced,
    "fx, symbolic": recorded(tracing_mode="symbolic"),
    "fx, before dispatch": recorded(pre_dispatch=True),
}


@pytest.mark.parametrize("recorder", RECORDERS)
def test_the_reference_recorded(recorder):
    """By ordinary numbers, and by a state that is not finite."""
    inputs = problem(0, dtype=torch.float32)
    call = operator(inputs)
    found = RECORDERS[recorder](call, *inputs.values())
    infinite = {**inputs, "query": inputs["query"].index_fill(2, torch.tensor([2]), torch.inf)}
    for given in (inputs, extreme(inputs), infinite):
        torch.testing.assert_close(found(*given.values()), call(*given.values()), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_fake_and_meta_tensors():
    given = problem(0, dtype=torch.float32)
    call = operator(given)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in given.values()]
        assert call(*fake).shape == given["query"].shape
    assert call(*(x.to("meta") for x in given.values())).shape == given["query"].shape


ONNX = """
import onnxruntime
import torch
from torch.export import Dim
from ops.problems import STATES, problem
from rfa.ops import robust_filter_attention


class Operator(torch.nn.Module):
    def __init__(self, parameters):
        super().__init__()
        self.options = {**parameters, "prior": "riccati"}

    def forward(self, query, key, value):
        return robust_filter_attention(query, key, value, **self.options)


def split(seed, keys):
    given = problem(seed, keys=keys, dtype=torch.float32)
    return {name: given.pop(name) for name in STATES}, given


states, parameters = split(0, 9)
lengths = {name: {2: Dim("length")} for name in STATES}
program = torch.onnx.export(Operator(parameters), (), kwargs=states, dynamic_shapes=lengths, dynamo=True, verbose=False)
program.save(sys.argv[1])
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
states, _ = split(1, 25)
(found,) = session.run(None, {name: x.numpy() for name, x in states.items()})
torch.testing.assert_close(torch.from_numpy(found), Operator(parameters)(**states), rtol=0, atol=1e-5)
"""


@slow
def test_to_onnx_by_the_reference(tmp_path):
    """Which "auto" takes, whatever runs here: ONNX has no fused kernels. `test_backends.py` asks for one by name."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    done = python(ONNX.replace("sys.argv[1]", repr(str(tmp_path / "operator.onnx"))), os.environ["RFA_CACHE"])
    assert done.returncode == 0, done.stderr
