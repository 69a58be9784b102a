"""The kernels compiled for ARM make recorded calls again under an emulator, and find the same numbers."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from cover import slow

from rfa.nn import FilterCache, RobustFilterAttention
from rfa.ops import robust_filter_attention
from rfa.ops.cpu.build import SOURCES
from rfa.ops.cpu.compiler import compiler_version, flags
from rfa.ops.cpu.operator import NUMBERS

from ..problems import irregular_times, problem
from .recorded import ENTRIES, recording, replay

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
pytestmark = [
    slow,  # compiling takes a minute of processor time
    pytest.mark.skipif(
        COMPILER is None or EMULATOR is None,
        reason="aarch64-linux-gnu-g++ or qemu-aarch64 is missing: Debian's g++-aarch64-linux-gnu and qemu-user",
    ),
]
PROBLEMS = {  # of which only the priors, scores and visible keys differ: each takes other code
    "uniform": {},
    "exponential": {"weight": "exponential"},
    "all keys": {"causal": False},
    "packed": {"segment_ids": torch.arange(150).expand(2, -1) // 40},
    "irregular": {"times": irregular_times(5, 150)},
    "irregular, all keys": {"times": irregular_times(5, 150), "causal": False},
    "riccati": {"times": irregular_times(5, 150), "prior": "riccati"},
}
HALF = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # 8 and 11 bits
LAYERS = {
    "student_t": {},
    "exponential": {"weight": "exponential", "rotate_values": False},
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The command of the program that makes calls again."""
    folder = tmp_path_factory.mktemp("arm")
    command = [COMPILER, *flags(compiler_version(COMPILER), "armv8-a")]
    objects, running = [], []
    for source in (*SOURCES.glob("*.cpp"), Path(__file__).with_name("replay.cpp")):
        objects.append(str(folder / f"{source.stem}.o"))
        running.append(subprocess.Popen([*command, "-c", str(source), "-o", objects[-1]]))
    assert [process.wait() for process in running] == [0] * len(running)
    subprocess.run([*command, "-static", *objects, "-o", str(folder / "replay")], check=True, capture_output=True)
    return [EMULATOR, str(folder / "replay")]


@pytest.fixture
def agree(program, monkeypatch, tmp_path):
    """A function that makes the calls of `use` again on ARM, compares all that they write, and returns their names."""

    def compare(use):
        with recording(monkeypatch) as calls:
            use()
        for call, found in zip(calls, replay(program, calls, tmp_path), strict=True):
            expected, found = call.numbers(call.after), call.numbers(found)
            assert expected, call.entry
            for name, wanted in expected.items():
                known = np.isfinite(wanted)
                assert np.array_equal(known, np.isfinite(found[name])), (call.entry, name)
                assert known.any(), (call.entry, name)
                error = np.linalg.norm((found[name] - wanted)[known].astype(float))
                scale = np.linalg.norm(wanted[known].astype(float))
                # other registers add up in another order; gradients are sums that cancel
                tolerance = HALF.get(NUMBERS[call.number], 1e-4 if name.startswith("grad") else 1e-5)
                assert error <= tolerance * scale, (call.entry, name, error / scale)
        return {call.entry for call in calls}

    return compare


@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_and_backward(name, agree):
    inputs = problem(7, keys=150, modes=9, dtype=torch.float32)  # two blocks of keys, channels that fill no register
    learned = [x.requires_grad_() for x in inputs.values() if x is not inputs["frequency"]]

    def use():
        out, log_precision = robust_filter_attention(
            **inputs, **PROBLEMS[name], return_log_precision=True, backend="cpu"
        )
        weight = torch.linspace(-1, 2, out.numel()).view_as(out)
        torch.autograd.grad((out * weight).sum() + log_precision.sum(), learned)

    assert agree(use) == {"phases", "forward", "backward"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_decoding(name, dtype, agree):
    torch.manual_seed(3)
    layer = RobustFilterAttention(2 * 18, 2, **LAYERS[name]).to(dtype).eval()
    x = torch.randn(2, 140, 2 * 18).to(dtype)

    @torch.no_grad()
    def use():
        cache = FilterCache()
        layer(x[:, :135], past_key_values=cache)
        layer(x[:, 135:136], past_key_values=cache)  # one call
        mask = torch.arange(137)[None] >= torch.tensor([[0], [3]])
        layer(x[:, 136:137], past_key_values=cache, key_mask=mask)  # by the operator

    assert agree(use) >= {"enter", "token", "decode"}


def test_each_entry_point_is_recorded():
    sources = "".join(source.read_text() for source in SOURCES.glob("*.cpp"))
    assert set(re.findall(r"int rfa_(\w+)\(const", sources)) == set(ENTRIES)
