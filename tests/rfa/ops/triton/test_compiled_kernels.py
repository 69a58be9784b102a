"""Kernels compile for cards that are not here, and fit into their shared memory.

They are compiled in processes of their own: in this one triton may be interpreted.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cover import slow
from scripts import ROOT

KINDS = ("whole", "pairs", "pairs, exponential", "pairs, riccati", "pairs, dot product")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def process(*arguments):
    """The output of Python with these arguments."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


RECORDED = """
import torch, triton, triton.language as tl
from launches import launches

@triton.jit
def sum_kernel(x, y, n, m, one, half, SIZE: tl.constexpr, FLAG: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, SIZE)), 0))

def call():
    x = torch.empty(1024, dtype=torch.bfloat16)
    assert x.is_cuda
    for start in (0, 8, 16):
        grid = (torch.cuda.get_device_capability()[0],)
        sum_kernel[grid](x[start:], None, 32, 33, 1, 0.5, SIZE=64, FLAG=x.is_cuda, num_warps=2)
    with torch.cuda.device_of(x):
        sum_kernel[(1,)](x[1:], x, n=32, m=33, one=1, half=0.5, SIZE=64, FLAG=True, num_stages=4)

first, second = launches(call, 90)
assert not torch.empty(1).is_cuda
names = list(first.signature)
for launch, pointer in ((first, "constexpr"), (second, "*bf16")):
    assert launch.name == "sum"
    kinds = ["*bf16", pointer, "i32", "i32", "constexpr", "fp32", "constexpr", "constexpr"]
    assert list(launch.signature.values()) == kinds
    constants = {names[place]: value for (place,), value in launch.constants.items()}
    assert launch.constant("SIZE") == 64
    assert constants == {"one": 1, "SIZE": 64, "FLAG": True} | ({"y": None} if launch is first else {}), constants
for launch, aligned in ((first, ["x", "n"]), (second, ["y", "n"])):
    assert [names[place] for (place,), known in launch.attributes.items() if known] == aligned
assert (first.options, second.options) == ({"num_warps": 2}, {"num_stages": 4})
print("as it is launched")
"""

ONE_HEAD = """
import launches
launches.BATCH = launches.HEADS = 1
SLOW = ("forward", "key", "query", "pairs forward", "pairs key", "pairs query")  # take long to compile
found = {}
for kind in ("whole", "pairs"):
    for name, launch in launches.launched(kind, "float16", 16, 90):
        if not name.removesuffix(" with parameters") in SLOW:
            launches.built(launch, 90)
            found[name] = launch
print(len(found))
"""

OF_GROUPS = """
import torch
from launches import launches
from rfa.ops.backends import BACKENDS
from rfa.ops.positions import Positions
from rfa.ops.problem import Options, Parameters, Problem
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

def call():
    query, key, value = (torch.empty(2, 1, 100, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    groups = torch.empty(2, 100, dtype=torch.int32)
    times = torch.empty(2, 100, dtype=torch.float64)
    parameters = Parameters(torch.empty(1), torch.empty(1, 8), *(torch.empty(1, requires_grad=True) for _ in range(6)))
    problem = Problem(parameters, Positions(times, times, groups, groups), Options(prior="riccati"))
    BACKENDS["triton"].run(query, key, value, problem)[0].sum().backward()

backend = CUDABackend(GPUTarget("cuda", 90, 32))
for launch in launches(call, 90):
    options = backend.parse_options(launch.options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    known = backend.get_codegen_implementation(options), backend.get_module_map()
    source.make_ir(backend.target, options, *known, context)
    print(launch.name)
"""


@needs_triton
def test_types_of_the_pairs_kernels_with_groups():
    """A variable must keep its type from one trip of a loop to the next. The interpreter does not show it."""
    assert {"pairs forward", "pairs key", "pairs query"} <= set(process("-c", OF_GROUPS).splitlines())


STAGES_OF_CARDS = """
import launches
for number in (80, 86, 89, 90, 100, 120):
    for channels in (64, 128):
        found = launches.launched("whole", "bfloat16", channels, number)
        stages = [each.constant("STAGES") for name, each in found if name in ("forward", "query")]
        print(number, channels, *stages)
"""


@needs_triton
def test_cards_with_little_shared_memory_have_fewer_stages():
    """By the limits of CUDA's programming guide; what they hold is compiled below, in `make test-all`."""
    found = [list(map(int, line.split())) for line in process("-c", STAGES_OF_CARDS).splitlines()]
    assert len(found) == 12
    for number, channels, *stages in found:
        small = number in (86, 89, 120) and channels == 128
        assert stages == ([2, 2] if small else [3, 3]), number


@slow
@needs_triton
@pytest.mark.parametrize(("arch", "kind"), [*(("sm_86", kind) for kind in KINDS), ("sm_120", "whole")])
def test_every_kernel_fits_into_100_kb_of_shared_memory(arch, kind):
    """At the widest heads, which need the most. 8.6 and 8.9 run the same code."""
    dtypes = ["bfloat16", "float16"] + ["float32"] * (kind != "whole")  # in float32 no kernel takes whole problems
    call = "import launches; print([launches.too_large({!r}, dtype, 128, {!r}) for dtype in {}])"
    assert process("-c", call.format(arch, kind, dtypes)).strip() == str([{}] * len(dtypes))


@slow
@needs_triton
def test_launches_are_recorded_as_a_device_would_get_them(tmp_path):
    program = tmp_path / "recorded.py"  # triton reads the source of a kernel
    program.write_text(RECORDED)
    assert "as it is launched" in process(program)


@slow
@needs_triton
def test_kernels_around_the_attention_compile_for_one_head():
    """A number that is 1 is compiled as a constant, which has no methods. The interpreter does not show it."""
    assert int(process("-c", ONE_HEAD)) >= 4
