"""The parser of machine code, on small listings as `nvdisasm --print-code` writes them, by what was counted by hand."""

import json

import pytest
from gpu_code import ARCHITECTURES
from gpu_code.conditions import Conditions
from gpu_code.count import Visit, visits
from gpu_code.loops import product_loops
from gpu_code.machine_code import Instruction, blocks
from gpu_code.units import KINDS, UNITS, is_tf32, kind, products, results
from scripts import ROOT

# Recorded from a forward kernel for sm_90, with most of the arithmetic left out.
HOPPER = """
	.target	sm_90a
	.section	.text.forward_kernel,"ax",@progbits
        .global         forward_kernel
        .size           forward_kernel,(.L_x_7 - forward_kernel)
forward_kernel:
.text.forward_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0130*/                   MUFU.RCP R0, R0 ;
        /*3750*/              @!P1 BRA `(.L_x_0) ;
.L_x_4:
        /*40b0*/                   DEPBAR.LE SB0, 0x0 ;
        /*40d0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*4190*/                   BSSY B0, `(.L_x_1) ;
        /*4310*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*43b0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*4500*/                   BRA.DIV ~URZ, `(.L_x_9) ;
        /*4510*/                   SHFL.BFLY PT, R32, R35, 0x2, 0x1f ;
.L_x_8:
        /*7110*/                   HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8].tnspB, R56, gsb0 ;
        /*73a0*/                   HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8].tnspB, R56, gsb0 ;
        /*a380*/              @!PT LDGSTS.E.BYPASS.128 [R38+0x11800], desc[UR34][R30.64+-0x800], P0 ;
        /*a3d0*/               @P2 BRA `(.L_x_2) ;
        /*a3e0*/                   LDG.E R36, desc[UR34][R4.64] ;
.L_x_2:
        /*a3f0*/                   BSYNC B0 ;
.L_x_1:
        /*a400*/                   FSETP.NAN.AND P1, PT, R36, R36, PT ;
        /*a4c0*/              @!P1 BRA `(.L_x_3) ;
        /*a4d0*/                   IMAD.IADD R28, R92, 0x1, -R37.reuse ;
        /*a5c0*/                   REDUX.SUM.S32 UR8, R26 ;
.L_x_3:
        /*bc60*/                   IADD3 R19, P5, R19, 0x40, RZ ;
        /*bed0*/               @P1 BRA `(.L_x_4) ;
        /*bf10*/                   BRA `(.L_x_5) ;
.L_x_0:
        /*bf20*/                   LOP3.LUT R2, R0, 0x20, RZ, 0xc0, !PT ;
.L_x_5:
        /*de50*/               @P5 EXIT ;
        /*de90*/                   EXIT ;
.L_x_9:
        /*dea0*/                   CALL.REL.NOINC `($__internal_1_$__cuda_sm70_shflsync_bfly) ;
        /*deb0*/                   BRA `(.L_x_8) ;
.L_x_6:
        /*dec0*/                   BRA `(.L_x_6);
.L_x_7:
"""

# The same for sm_100: one thread issues the products, a barrier is waited for out of line, and the logarithms are those
# of the next tile, which the last trip does not have.
BLACKWELL = """
        /*0000*/                   UMOV UR29, 0x4110490 ;
.L_x_18:
        /*b630*/                   UIADD3 UR4, UPT, UPT, UR4, 0x1, URZ ;
        /*b638*/                   UISETP.GE.AND UP4, UPT, UR4, UR17, UPT ;
        /*b640*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR51], R4 ;
        /*b660*/              @!P0 BRA `(.L_x_13) ;
.L_x_26:
        /*b670*/                   LDTM.16dp32bit_t0_t15.x32 R4, tmem[UR33+0x100000] ;
        /*deb0*/                   BRA.U UP3, `(.L_x_15) ;
        /*dfa0*/                   UTCHMMA tmem[UR36], gdesc[UR20], tmem[UR32], tmem[UR28], idesc[UR29], UPT ;
        /*dfe0*/                   UTCHMMA tmem[UR11], gdesc[UR24], tmem[UR32], tmem[UR28], idesc[UR29], UPT ;
.L_x_15:
        /*66e0*/                   BRA.U UP4, `(.L_x_31) ;
        /*6700*/                   MUFU.LG2 R8, R8 ;
.L_x_31:
        /*138e0*/                  BRA.U UP0, `(.L_x_18) ;
        /*138f0*/                  EXIT ;
.L_x_13:
        /*16d90*/                  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR51], R4 ;
        /*16da0*/             @!P0 BRA `(.L_x_13) ;
        /*16db0*/                  BRA `(.L_x_26) ;
"""

# Two loops within a third one. The first may skip a tile, and the second has two kinds of tiles.
NESTED = """
.L_x_0:
        /*0000*/                   S2R R3, SR_CTAID.X ;
.L_x_1:
        /*0010*/               @P0 BRA `(.L_x_2) ;
        /*0020*/                   HMMA.16816.F32.BF16 R88, R64, R92, RZ ;
        /*0030*/                   FADD R1, R1, R1 ;
        /*0040*/                   FADD R1, R1, R1 ;
.L_x_2:
        /*0050*/              @!P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0060*/               @P0 BRA `(.L_x_4) ;
        /*0070*/                   HMMA.1688.F32.TF32 R88, R64, R92, RZ ;
        /*0080*/                   FMUL R1, R1, R1 ;
        /*0090*/                   FSEL R1, R1, R1, P0 ;
        /*00a0*/                   BRA `(.L_x_5) ;
.L_x_4:
        /*00b0*/                   HMMA.1688.F32.TF32 R88, R64, R92, RZ ;
.L_x_5:
        /*00c0*/              @!P1 CALL.REL.NOINC `(.L_x_3) ;
        /*00d0*/              @!P2 BRA `(.L_x_0) ;
        /*00e0*/                   EXIT ;
"""


def names(instructions):
    return [instruction.name for instruction in instructions]


def one(text):
    """An instruction, from its text."""
    block, *_ = blocks(f"        /*0000*/                   {text} ;")
    return block.instructions[0]


def loops(text, warps=4):
    return product_loops(text, lambda instruction: products(instruction, warps))


def test_a_trip_has_all_products_and_nothing_rare():
    (loop,) = loops(HOPPER)
    expected = "DEPBAR BAR BSSY HGMMA HGMMA BRA SHFL HGMMA HGMMA LDGSTS BRA LDG BSYNC FSETP BRA IADD3 BRA"
    assert names(loop.body) == expected.split()
    assert names(loop.others) == ["IMAD", "REDUX"]  # of NaN; neither what runs after a parting of a warp
    assert sum(products(each, 4) for each in loop.body) == 4 * 64 * 64 * 16
    assert sum(products(each, 8) for each in loop.body) == 8 * 64 * 64 * 16  # of two groups of warps


def test_products_of_one_thread_and_barriers():
    (loop,) = loops(BLACKWELL)
    expected = "UIADD3 UISETP SYNCS BRA LDTM BRA UTCHMMA UTCHMMA BRA MUFU BRA"
    assert names(loop.body) == expected.split()
    assert names(loop.others) == ["SYNCS", "BRA", "BRA"]
    assert sum(products(each, 4) for each in loop.body) == 2 * 64 * 64 * 16
    with pytest.raises(ValueError, match="a matrix product of a known shape"):
        loops(BLACKWELL.replace("0x4110490", "UR3"))


def test_innermost_loops_in_the_order_of_the_code():
    first, second = loops(NESTED)
    assert names(first.body) == ["BRA", "HMMA", "FADD", "FADD", "BRA"]  # not the tile without a product
    assert first.others == []
    assert names(second.body) == ["BRA", "HMMA", "FMUL", "FSEL", "BRA", "CALL"]  # the longer of two
    assert names(second.others) == ["HMMA"]
    _, second = loops(NESTED.replace(".L_x_3:\n", ".L_x_3:\n        /*0055*/  FSETP.GT.AND P0, PT, R1, RZ, PT ;\n"))
    assert names(second.body) == ["FSETP", "BRA", "HMMA", "CALL"]  # what is rare is left out
    assert sum(products(each, 4) for each in first.body) == 4 * 16 * 8 * 16
    assert sum(products(each, 4) for each in second.body) == 4 * 16 * 8 * 8


def test_a_branch_to_nowhere():
    with pytest.raises(ValueError, match=r"'\.L_x_3', which is no label"):
        blocks(HOPPER.replace(".L_x_3:\n", ""))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("IADD3 R1, R1, 0x1, RZ; ISETP.GE.AND P1, PT, R1, R9, PT; @P1 BRA", False),
        ("LDS R1, [R2]; ISETP.GE.AND P1, PT, R1, R9, PT; @P1 BRA", True),
        ("LDS.128 R4, [R2]; IADD3 R1, P2, R7, R8, RZ; ISETP.GE.AND P1, PT, R1, R9, PT; @P1 BRA", True),
        ("LDS.64 R4, [R2]; IADD3 R1, P2, R7, R8, RZ; ISETP.GE.AND P1, PT, R1, R9, PT; @P1 BRA", False),
        ("FSETP.GT.AND P0, P1, R1, RZ, PT; @!P1 BRA", True),
        ("FSETP.GT.AND P0, P2, R1, RZ, PT; @!P1 BRA", False),
        ("SHFL.BFLY PT, R3, R1, 0x1, 0x1f; VIMNMX R4, R3, R5, !PT; ISETP.NE.AND P3, PT, R4, RZ, PT; @P3 BRA", True),
        ("LDG.E R1, desc[UR4][R2.64]; MOV R1, R7; ISETP.NE.AND P3, PT, R1, RZ, PT; @P3 BRA", False),  # written over
        ("ISETP.NE.AND P3, PT, R1, RZ, PT; @P3 BRA; LDS R1, [R2]", True),  # of the trip before
        ("STS [R4], R1; LDS R9, [R1]; IADD3 R2, P0, R3, R4, RZ; @P0 BRA", False),
        ("REDUX.MAX.S32 UR8, R24; UISETP.GT.AND UP0, UPT, UR8, URZ, UPT; BRA.U UP0", True),
        ("VOTE.ANY P0, P1; FSETP.GT.AND P1, PT, R1, RZ, PT; @P0 BRA", True),
    ],
)
def test_conditions_on_data(code, expected):
    instructions = [one(text.strip()) for text in code.split(";")]
    place = next(place for place, instruction in enumerate(instructions) if instruction.name == "BRA")
    assert Conditions(instructions).depends_on_data(place) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FFMA R1, R2, R3, R4", "float"),
        ("FFMA2 R4, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO", "float"),
        ("IMAD.MOV.U32 R115, RZ, RZ, 0x40000040", "integer multiply"),
        ("MUFU.EX2 R0, R0", "function"),
        ("UISETP.GT.U32.AND UP0, UPT, UR9, UR4, UPT", "uniform"),
        ("LDCU.64 UR6, c[0x0][0x3a8]", "uniform"),
        ("UTCBAR [UR34], URZ", "barrier"),
        ("LDL.LU R1, [R1+0x4]", "local"),
        ("NEWOP.X R1", "other"),
    ],
)
def test_kinds(text, expected):
    assert kind(one(text)) == expected
    assert expected in KINDS


def test_work_of_an_instruction():
    widths = {"LDS R1, [R2]": 1, "LDS.64 R1, [R2]": 2, "LDSM.16.M88.4 R1, [R2]": 4, "LDGSTS.E.BYPASS.128 [R1], [R2]": 4}
    for text, width in widths.items():
        assert results(one(text)) == width
    assert results(one("FADD2 R1, R2, R3")) == 2
    half = Instruction(None, "HMMA.16816.F32.BF16", "R88, R64, R92, RZ")
    single = half._replace(opcode="HMMA.1688.F32.TF32")
    assert [is_tf32(half), is_tf32(single)] == [False, True]
    tf32 = 0x4110490 & ~(7 << 7 | 7 << 10) | 2 << 7 | 2 << 10
    assert products(one(f"UTCHMMA gdesc[UR1], idesc[{tf32:#x}], UPT"), 4) == 64 * 64 * 8


def test_occupancy():
    """As NVIDIA's occupancy calculator has it: 65,536 registers, 64 warps, 1 KiB of each program for the system."""
    hopper = ARCHITECTURES["sm_90"]
    assert hopper.programs(registers=255, warps=4, shared_bytes=0) == 2
    assert hopper.programs(registers=168, warps=4, shared_bytes=0) == 3
    assert hopper.programs(registers=128, warps=8, shared_bytes=0) == 2
    assert hopper.programs(registers=32, warps=4, shared_bytes=0) == 16
    assert hopper.programs(registers=128, warps=4, shared_bytes=75 * 1024) == 3
    assert hopper.programs(registers=128, warps=4, shared_bytes=227 * 1024) == 1
    assert hopper.programs(registers=128, warps=4, shared_bytes=228 * 1024) == 0
    assert ARCHITECTURES["sm_80"].programs(registers=128, warps=4, shared_bytes=75 * 1024) == 2


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
PLACED = """
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = [16, 16, 16]}>
#mma1 = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 2], instrShape = [16, 64, 16]}>
      %1 = ttng.warp_group_dot %q, %k, %c {isAsync = true} : !ttg.memdesc<64x128xbf16, #s> * !ttg.memdesc<128x32xbf16, #s> -> tensor<64x32xf32, #mma>
      %2 = ttng.warp_group_dot %p, %v, %x : tensor<64x32xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma1}>> * !ttg.memdesc<32x128xbf16, #s> -> tensor<64x128xf32, #mma1>
"""  # noqa: E501


def test_pairs_and_products_of_a_tile():
    """Eight warps do the first product twice, 16 rows each of 64, and share the columns of the second."""
    needed = 2 * 64 * 32 * 128
    assert visits(SOURCE, "") == [Visit(64 * 32, needed, needed)]
    assert visits(SOURCE, PLACED) == [Visit(64 * 32, needed, needed + 64 * 32 * 128)]
    with pytest.raises(ValueError, match="one layout for each shape"):
        visits(SOURCE, PLACED + PLACED.splitlines()[3].replace("#mma>", "#mma1>").replace("x32xf32, ", "x32xf32, "))


def test_all_instructions_of_the_kept_kernels_are_known():
    lines = json.loads((ROOT / "benchmarks" / "results" / "gpu_instructions.json").read_text())
    of_units = {each for kinds in UNITS.values() for each in kinds}
    assert of_units <= set(KINDS)
    for line in lines:
        for loop in line["loops"]:
            assert "other" not in loop["by_kind"], line["name"]
            assert sum(loop["by_kind"].values()) == pytest.approx(loop["instructions_per_pair"], rel=1e-3)
            # an exponential, with Student-t a logarithm, in gradients a reciprocal: nothing of a trip is left out
            functions = 1 if line["score"] == "softmax" else 3 if "gradient" in line["name"] else 2
            assert loop["by_kind"]["function"] >= functions, line["name"]
            assert loop["cycles_per_pair"]["issue"] == pytest.approx(loop["instructions_per_pair"] / 128, abs=1e-4)
