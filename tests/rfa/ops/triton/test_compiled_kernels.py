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


@slow
@needs_triton
@pytest.mark.parametrize(("arch", "kind"), [*(("sm_86", kind) for kind in KINDS), ("sm_120", "whole")])
def test_every_kernel_fits_into_100_kb_of_shared_memory(arch, kind):
    """At the widest heads, which need the most. 8.6 and 8.9 run the same code."""
    dtypes = ["bfloat16", "float16"] + ["float32"] * (kind != "whole")  # in float32 no kernel takes whole problems
    call = "import launches; print([launches.too_large({!r}, dtype, 128, {!r}) for dtype in {}])"
    assert process("-c", call.format(arch, kind, dtypes)).strip() == str([{}] * len(dtypes))
