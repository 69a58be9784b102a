"""What each instruction is for, the shapes of matrix products, and what a multiprocessor does in a cycle."""

import re
from typing import NamedTuple

from rfa.checks import require

from .machine_code import Instruction

_KINDS = {  # by the names of opcodes
    "tensor": "HMMA HGMMA UTCHMMA QMMA QGMMA UTCQMMA IMMA IGMMA UTCIMMA DMMA OMMA UTCOMMA",
    "function": "MUFU",
    "float": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 FFMA32I FMUL32I FADD32I FSWZADD HFMA2 HADD2 HMUL2",
    "integer multiply": "IMAD IMAD32I IMUL IDP",
    "integer": "IADD3 IADD IADD32I VIADD LEA SHF SHL SHR IABS SGXT BMSK PRMT POPC BREV",
    "logic": "LOP3 PLOP3 P2R R2P",
    "compare": "ISETP FSETP FSET HSETP2 HSET2 FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 VIADDMNMX HMNMX2 FCHK",
    "select": "SEL FSEL",
    "move": "MOV MOV32I CS2R S2R S2UR R2UR R2URL LDC",
    "convert": "F2FP I2FP I2IP F2IP",
    "slow convert": "F2F F2I I2F I2I FRND FLO",
    "double": "DFMA DADD DMUL DSETP",
    "global": "LDG STG LD ST ATOM ATOMG RED REDG",
    "shared": "LDS STS LDSM STSM ATOMS",
    "tensor memory": "LDTM STTM",
    "local": "LDL STL",
    "copy": "LDGSTS UBLKCP UBLKRED UTMALDG UTMASTG UTMAREDG UTMAPF UBLKPF UTCCP",
    "shuffle": "SHFL REDUX CREDUX VOTE VOTEU MATCH",
    "barrier": "BAR SYNCS DEPBAR LDGDEPBAR WARPGROUP WARPSYNC FENCE MEMBAR UTCBAR UTMACMDFLUSH ERRBAR CCTL ARRIVES",
    "control": "BRA BRX JMP EXIT CALL RET BSSY BSYNC BREAK NOP BPT ELECT NANOSLEEP YIELD KILL USETMAXREG",
}
KINDS = (*_KINDS, "uniform", "other")  # of the unit for numbers that a warp shares; of none of these
_KIND = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def kind(instruction: Instruction) -> str:
    """One of `KINDS`."""
    shared = instruction.name.startswith("U") or instruction.name == "LDCU"
    return _KIND.get(instruction.name) or ("uniform" if shared else "other")


_WARP = {"1684": 16 * 8 * 4, "1688": 16 * 8 * 8, "16816": 16 * 8 * 16}  # by the name of an HMMA
_TF32 = 2  # in a descriptor


def products(instruction: Instruction, warps: int) -> int:
    """The multiply-adds that the program's warps do with one matrix instruction; 0 for others.

    An HMMA is one warp's, an HGMMA that of a group of four warps, and one thread issues a UTCHMMA for all of them.

    Raises:
        ValueError: where its shape cannot be told.
    """
    if kind(instruction) != "tensor":
        return 0
    if instruction.name.startswith("UTC"):
        descriptor = _descriptor(instruction)
        return (descriptor >> 24 & 31) * 16 * (descriptor >> 17 & 63) * 8 * (8 if is_tf32(instruction) else 16)
    if shape := re.match(r"\w+GMMA\.(\d+)x(\d+)x(\d+)\.", instruction.opcode):
        rows, columns, inner = map(int, shape.groups())
        return rows * columns * inner * warps // 4
    named = instruction.opcode.split(".")[1]
    require(named in _WARP, "machine code", instruction.opcode, "a matrix product of a known shape")
    return _WARP[named] * warps


def is_tf32(instruction: Instruction) -> bool:
    """Whether a matrix product takes factors in TF32, at half the speed of 16 bits."""
    if instruction.name.startswith("UTC") and kind(instruction) == "tensor":
        return _descriptor(instruction) >> 7 & 7 == _TF32
    return "TF32" in instruction.opcode


def _descriptor(instruction: Instruction) -> int:
    """The number that says shape and formats of a UTCHMMA: rows / 16 from bit 24 on, columns / 8 from bit 17 on."""
    found = re.search(r"idesc\[(0x[0-9a-f]+)\]", instruction.operands)
    if found is None:
        raise ValueError(f"machine code: got {instruction.operands}, expected a matrix product of a known shape")
    return int(found[1], 16)


def results(instruction: Instruction) -> int:
    """How many results of 32 bits an instruction that is no matrix product gives or moves, in one thread."""
    if instruction.name in ("FFMA2", "FMUL2", "FADD2"):
        return 2
    if kind(instruction) in UNITS["memory"]:
        return max(_WIDTHS.get(part, 1) for part in instruction.opcode.split("."))
    return 1


_WIDTHS = {"64": 2, "2": 2, "128": 4, "4": 4}  # in LDS.64, LDGSTS.E.128 and LDSM.16.M88.4


UNITS = {  # the kinds of instructions that a unit carries out; all are issued
    "tensor": ("tensor",),
    "functions": ("function", "slow convert"),
    "FMA": ("float", "integer multiply"),
    "ALU": ("integer", "logic", "compare", "select", "move", "convert"),
    "double": ("double",),
    "memory": ("global", "shared", "local", "copy", "shuffle"),
}
ISSUED = 128  # instructions of threads in a cycle: those of four warps


class Architecture(NamedTuple):
    """A multiprocessor as NVIDIA documents it.

    Fields:
        number: of the compute capability.
        products: multiply-adds of dense 16-bit matrices in a cycle; half as many in TF32.
        rates: results in a cycle, each of 32 bits of a thread, by the kind of instructions; 64 for others.
        shared_bytes: of shared memory.
    """

    number: int
    products: int
    rates: dict[str, int]
    shared_bytes: int

    def cycles(self, instruction: Instruction) -> float:
        """The share of a cycle that the unit for an instruction, which is no matrix product, takes for one thread."""
        return results(instruction) / self.rates.get(kind(instruction), 64)

    def programs(self, registers: int, warps: int, shared_bytes: int) -> int:
        """How many programs a multiprocessor holds at once; 0 where one does not fit."""
        by_warp = -(-registers // 8) * 8 * 32
        by_registers = 65536 // by_warp // 4 * 4 // warps
        return min(by_registers, 64 // warps, 32, self.shared_bytes // (shared_bytes + 1024))


_RATES = {"function": 16, "slow convert": 16, **dict.fromkeys(UNITS["memory"], 32)}
ARCHITECTURES = {
    "sm_80": Architecture(80, 1024, {**_RATES, "float": 64, "double": 32}, 164 * 1024),
    "sm_90": Architecture(90, 2048, {**_RATES, "float": 128}, 228 * 1024),
    "sm_100": Architecture(100, 4096, {**_RATES, "float": 128}, 228 * 1024),
}
