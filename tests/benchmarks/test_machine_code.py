"""`benchmarks/machine_code.py`: what it reads from listings, records and refuses; no kernel has got slower.

Kernels are compiled in processes of their own: here triton may be interpreted.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from cover import slow
from gpu_code.listings import loops_with_products, pairs_of_loops, unit_of
from scripts import ROOT, script

SCRIPT = str(ROOT / "benchmarks" / "machine_code.py")
KEPT = ROOT / "benchmarks" / "results" / "gpu_instructions.json"
REDRAW = "python benchmarks/machine_code.py --arch sm_90 sm_100 --json benchmarks/results/gpu_instructions.json"
MORE = 1.05
KINDS = ("whole", "pairs", "pairs, exponential", "pairs, riccati", "pairs, dot product")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# As nvdisasm writes it: three loops in another. The first waits for a barrier out of line; the second has no products.
LISTING = """
.text.forward_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR51], R4 ;
        /*0030*/              @!P0 BRA `(.L_x_9) ;
.L_x_8:
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0050*/               @P2 BRA `(.L_x_2) ;
        /*0060*/                   LDG.E R36, desc[UR34][R4.64] ;
.L_x_2:
        /*0070*/                   MUFU.EX2 R0, R0 ;
        /*0080*/              @!P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0090*/                   FADD R1, R1, R1 ;
        /*00a0*/              @!P1 BRA `(.L_x_3) ;
.L_x_4:
        /*00b0*/                   UTCHMMA gdesc[UR4], gdesc[UR8], tmem[UR32], tmem[UR28], idesc[UR29], UPT ;
        /*00c0*/              @!P1 BRA `(.L_x_4) ;
        /*00d0*/              @!P2 BRA `(.L_x_0) ;
        /*00e0*/                   EXIT ;
.L_x_9:
        /*00f0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR51], R4 ;
        /*0100*/             @!P0 BRA `(.L_x_9) ;
        /*0110*/                   BRA `(.L_x_8) ;
"""

SOURCE = """
    %out = scf.for %tile = %c0 to %n step %c1 iter_args(%x = %cst) -> (tensor<64x64xf32>)  : i32 {
      %dot = tt.dot %q, %k, %cst, inputPrecision = tf32 : tensor<64x128xbf16> * tensor<128x32xbf16> -> tensor<64x32xf32>
      %y = scf.if %c -> (tensor<64xi32>) {
        scf.yield %a : tensor<64xi32>
      } else {
        scf.yield %b : tensor<64xi32>
      }
      %o = tt.dot %p, %v, %x, inputPrecision = tf32 : tensor<64x32xbf16> * tensor<32x128xbf16> -> tensor<64x128xf32>
      scf.yield %o : tensor<64x64xf32>
    }
    %no = scf.for %tile = %c0 to %n step %c1 iter_args(%x = %cst) -> (tensor<64xf32>)  : i32 {
      scf.yield %x : tensor<64xf32>
    }
    %late = tt.dot %q, %k, %cst, inputPrecision = tf32 : tensor<64x128xbf16> * tensor<128x32xbf16> -> tensor<64x32xf32>
"""


def test_loops_and_their_pairs():
    first, second = loops_with_products(LISTING)
    assert [each.split(".")[0] for each in first] == ["SYNCS", "BRA", "HGMMA", "BRA", "LDG", "MUFU", "BRA"]
    assert [each.split(".")[0] for each in second] == ["UTCHMMA", "BRA"]
    assert pairs_of_loops(SOURCE) == [64 * 32]


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("FFMA", "float"),
        ("FFMA2", "float"),
        ("IMAD.MOV.U32", "float"),
        ("MUFU.EX2", "functions"),
        ("HMMA.1688.F32.TF32", "tensor"),
        ("HGMMA.64x64x16.F32.BF16", "tensor"),
        ("UTCHMMA", "tensor"),
        ("HADD2", "float"),
        ("LDGSTS.E.BYPASS.128", "memory"),
        ("LDSM.16.M88.4", "memory"),
        ("LDL.LU", "memory"),
        ("LEA.HI", "integer"),
        ("FSEL", "integer"),
        ("F2FP.BF16.F32.PACK_AB", "integer"),
        ("F2F.F64.F32", "functions"),
        ("BRA.U", "rest"),
        ("UISETP.GT.U32.AND", "rest"),
    ],
)
def test_units(opcode, expected):
    assert unit_of(opcode) == expected


def process(*arguments):
    """The output of Python with these arguments."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def identity(line):
    return tuple(line[name] for name in ("name", "kind", "arch", "dtype", "channels"))


def compare_with_kept(lines):
    """Fail for a kernel with 5 % more instructions for each pair than in the kept file."""
    kept = {identity(line): line for line in json.loads(KEPT.read_text())}
    for line in lines:
        assert identity(line) in kept, f"a new kernel: {REDRAW}"
        before = kept[identity(line)]
        if before["triton"] != line["triton"]:
            pytest.skip(f"counted with triton {before['triton']}, here is {line['triton']}: {REDRAW}")
        found, least = (each["loops"][0]["instructions"] for each in (line, before))
        assert found <= least * MORE, f"{identity(line)} had {least} a pair"


@slow
@needs_triton
@pytest.mark.parametrize("kind", ["whole", "pairs"])
def test_no_kernel_has_got_slower(tmp_path, kind):
    file = tmp_path / "counts.json"
    out = process(SCRIPT, "--dtype", "bfloat16", "--channels", "64", "--kind", kind, "--json", str(file))
    lines = json.loads(file.read_text())
    kept = [line for line in json.loads(KEPT.read_text()) if identity(line)[1:] == (kind, "sm_90", "bfloat16", 64)]
    assert [identity(line) for line in lines] == [identity(line) for line in kept], f"other kernels: {REDRAW}"
    compare_with_kept(lines)
    for line in lines:
        assert f"{line['loops'][0]['instructions']:.1f}" in out
        for loop in line["loops"]:
            assert loop["units"]["functions"] >= 2  # an exponential and a logarithm: nothing of a trip is left out
            assert sum(loop["units"].values()) == pytest.approx(loop["instructions"], abs=0.01)


def test_a_slower_kernel_is_found():
    lines = json.loads(KEPT.read_text())
    compare_with_kept(lines)
    loop = lines[0]["loops"][0]
    slower = lines[0] | {"loops": [loop | {"instructions": 1.06 * loop["instructions"]}]}
    with pytest.raises(AssertionError, match="a pair"):
        compare_with_kept([slower])
    with pytest.raises(AssertionError, match="a new kernel"):
        compare_with_kept([slower | {"name": "other"}])


def test_the_kept_file_has_every_kernel_of_every_size():
    lines = json.loads(KEPT.read_text())
    assert len({identity(line) for line in lines}) == len(lines)
    sizes = {identity(line)[2:] for line in lines}
    assert len(sizes) == 2 * 2 * 2
    names = {(line["kind"], line["name"]) for line in lines}
    for start, kind in (("", "whole"), ("pairs ", "pairs")):
        assert names >= {(kind, f"{start}{name}") for name in ("forward", "key", "query", "query with parameters")}
    assert len(lines) == len(names) * len(sizes)


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
    assert launch.constant("SIZE") == 64
    assert constants == {"one": 1, "SIZE": 64, "FLAG": True} | ({"y": None} if launch is first else {}), constants
for launch, aligned in ((first, ["x", "n"]), (second, ["y", "n"])):
    assert [names[place] for (place,), known in launch.attributes.items() if known] == aligned
assert (first.options, second.options) == ({"num_warps": 2}, {"num_stages": 4})
print("as it is launched")
"""

ONE_HEAD = """
import machine_code
from gpu_code.listings import compiled
machine_code.BATCH = machine_code.HEADS = 1
SLOW = ("forward", "key", "query", "pairs forward", "pairs key", "pairs query")  # take long to compile
found = {}
for kind in ("whole", "pairs"):
    for name, launch in machine_code.launched(kind, "float16", 16, 90):
        if not name.removesuffix(" with parameters") in SLOW:
            compiled(launch, 90)
            found[name] = launch
print(len(found))
"""

OF_GROUPS = """
import torch
from gpu_code.launches import launches
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
import machine_code
for number in (80, 86, 89, 90, 100, 120):
    for channels in (64, 128):
        launches = machine_code.launched("whole", "bfloat16", channels, number)
        stages = [each.constant("STAGES") for name, each in launches if name in ("forward", "query")]
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
    call = "import machine_code; print([machine_code.too_large({!r}, dtype, 128, {!r}) for dtype in {}])"
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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--arch sm_90 h100", "arch: got 'h100', expected one of sm_80, sm_86, sm_89, sm_90"),
        ("--dtype float32", "dtype: got 'float32', expected one of bfloat16, float16"),
        ("--channels 64 48", "channels: got 48, expected one of 16, 32, 64, 128"),
        ("--kind none", "kind: got 'none'"),
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
