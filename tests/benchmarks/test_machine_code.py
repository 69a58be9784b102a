"""`benchmarks/machine_code.py`: what it records and refuses; and no kernel has more instructions than were kept.

Kernels are compiled in processes of their own: here triton may be interpreted.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from cover import slow
from scripts import ROOT, script

SCRIPT = str(ROOT / "benchmarks" / "machine_code.py")
KEPT = ROOT / "benchmarks" / "results" / "gpu_instructions.json"
REDRAW = "python benchmarks/machine_code.py --arch sm_80 sm_90 sm_100 --json benchmarks/results/gpu_instructions.json"
SIZES = {(arch, channels) for arch in ("sm_80", "sm_90", "sm_100") for channels in (64, 128)}
MORE = 1.05

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def process(*arguments, interpret=False):
    """The output of Python with these arguments."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}"}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def identity(line):
    return tuple(line[name] for name in ("name", "arch", "dtype", "channels", "times", "score"))


def compare_with_kept(lines):
    """Fail for a kernel with 5 % more instructions for each pair than in the kept file."""
    kept = {identity(line): line for line in json.loads(KEPT.read_text())}
    for line in lines:
        assert identity(line) in kept, f"a new kernel: {REDRAW}"
        before = kept[identity(line)]
        if before["triton"] != line["triton"]:
            pytest.skip(f"counted with triton {before['triton']}, here is {line['triton']}: {REDRAW}")
        most = before["instructions_per_pair"] * MORE
        assert line["instructions_per_pair"] <= most, f"{identity(line)} had {before['instructions_per_pair']} a pair"


@slow
@needs_triton
def test_a_kernel_has_not_got_slower(tmp_path):
    file = tmp_path / "new" / "counts.json"
    size = ["--arch", "sm_90", "--dtype", "bfloat16", "--channels", "64", "--times", "uniform"]
    out = process(SCRIPT, *size, "--only", "forward", "--json", str(file))
    (line,) = json.loads(file.read_text())
    assert identity(line) == ("forward", "sm_90", "bfloat16", 64, "uniform", "student_t")
    assert {"registers", "spills", "shared_bytes", "programs_per_multiprocessor"} <= line.keys()
    assert [loop["main"] for loop in line["loops"]] == [True] + [False] * (len(line["loops"]) - 1)
    assert line["instructions_per_pair"] == line["loops"][0]["instructions_per_pair"]
    assert line["loops"][0]["by_kind"]["function"] >= 1  # the exponential of a pair
    assert line["loops"][0]["cycles_per_pair"]["tensor"] == pytest.approx(
        (2 * 64 + 16) / 2048, abs=1e-4
    )  # q.k, the values, and T
    assert f"{line['instructions_per_pair']:.1f}" in out
    compare_with_kept([line])


ONE_HEAD = """
import importlib
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
cases = importlib.import_module("gpu_code.cases")
cases.BATCH = cases.HEADS = 1
PAIRS = ("forward", "sharpen", "query gradient", "key gradient")  # take long to compile
done = set()
for times, score in (("uniform", "student_t"), ("irregular", "student_t"), ("irregular", "riccati")):
    for name, launch in cases.KernelCase("sm_90", "float16", 16, times, score).launches():
        if launch.identity not in done and not name.startswith(PAIRS):
            done.add(launch.identity)
            source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
print(len(done))
"""


@slow
@needs_triton
def test_kernels_around_the_attention_compile_for_one_head():
    """A number that is 1 is compiled as a constant, which has no methods. The interpreter does not show it."""
    assert int(process("-c", ONE_HEAD)) > 15


@slow
@needs_triton
@pytest.mark.parametrize("case", ["sm_80 bfloat16 64", "sm_90 float16 128", "sm_90 bfloat16 64", "sm_100 bfloat16 64"])
def test_no_kernel_has_got_slower(tmp_path, case):
    file = tmp_path / "counts.json"
    arch, dtype, channels = case.split()
    arguments = ["--arch", arch, "--dtype", dtype, "--channels", channels, "--json", str(file)]
    process(SCRIPT, *arguments)
    lines = json.loads(file.read_text())
    kept = [line for line in json.loads(KEPT.read_text()) if identity(line)[1:4] == (arch, dtype, int(channels))]
    assert [identity(line) for line in lines] == [identity(line) for line in kept], f"other kernels: {REDRAW}"
    compare_with_kept(lines)


def test_a_slower_kernel_is_found():
    lines = json.loads(KEPT.read_text())
    compare_with_kept(lines)
    slower = lines[0] | {"instructions_per_pair": 1.06 * lines[0]["instructions_per_pair"]}
    with pytest.raises(AssertionError, match="a pair"):
        compare_with_kept([slower])
    with pytest.raises(AssertionError, match="a new kernel"):
        compare_with_kept([slower | {"name": "other"}])


def test_the_kept_file_has_every_kernel_of_every_size():
    lines = json.loads(KEPT.read_text())
    assert len({identity(line) for line in lines}) == len(lines)
    assert {(line["arch"], line["channels"]) for line in lines} == SIZES
    assert {line["dtype"] for line in lines} == {"bfloat16", "float16"}
    names = {line["name"] for line in lines}
    needed = {"forward", "key gradient", "query gradient"}
    peers = {f"flash {name}" for name in needed}
    needed |= {"query gradient with prior"}
    assert needed | {f"{name}, irregular" for name in needed} | peers <= names
    for name in names:
        assert len([line for line in lines if line["name"] == name]) == 2 * len(SIZES), name
    for line in lines:
        assert line["programs_per_multiprocessor"] > 0, line["name"]  # otherwise it cannot be launched


RECORDED = """
import torch, triton, triton.language as tl
from gpu_code.launches import launches

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
    assert constants == {"one": 1, "SIZE": 64, "FLAG": True} | ({"y": None} if launch is first else {}), constants
for launch, aligned in ((first, ["x", "n"]), (second, ["y", "n"])):
    assert [names[place] for (place,), known in launch.attributes.items() if known] == aligned
assert (first.options, second.options) == ({"num_warps": 2}, {"num_stages": 4})
print("as it is launched")
"""

FLASH = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from gpu_code.flash import flash_attention

torch.manual_seed(0)
states = [torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3)]
grad = torch.randn(1, 2, 256, 16)
actual, expected = flash_attention(*states), scaled_dot_product_attention(*states, is_causal=True)
torch.testing.assert_close(actual, expected)
for pair in zip(*(torch.autograd.grad(out, states, grad) for out in (actual, expected))):
    torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)
print("as PyTorch's")
"""


@slow
@needs_triton
def test_launches_are_recorded_as_a_device_would_get_them(tmp_path):
    program = tmp_path / "recorded.py"  # triton reads the source of a kernel
    program.write_text(RECORDED)
    assert "as it is launched" in process(program)


@slow
@needs_triton
def test_plain_attention_is_right():
    assert "as PyTorch's" in process("-c", FLASH, interpret=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--arch sm_90 h100", "arch: got 'h100', expected one of sm_80, sm_90, sm_100"),
        ("--dtype float32", "dtype: got 'float32', expected one of bfloat16, float16"),
        ("--channels 64 48", "channels: got 48, expected one of 16, 32, 64, 128"),
        ("--times none", "times: got 'none'"),
        ("--score softmax", "score: got 'softmax'"),
        ("--json /proc/x/y", "--json: got"),
    ],
)
def test_bad_input(monkeypatch, capsys, given, expected):
    monkeypatch.setattr(sys, "argv", ["machine_code.py", *given.split()])
    with pytest.raises(SystemExit) as ended:
        script("benchmarks/machine_code.py").main()
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@needs_triton
def test_interpreted_kernels_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["machine_code.py"])
    with pytest.raises(SystemExit):
        script("benchmarks/machine_code.py").main()
    assert "TRITON_INTERPRET: got '1'" in capsys.readouterr().err
