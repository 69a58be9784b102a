"""What each instruction is for, the shapes of matrix products, and how fast the multiprocessors do them."""

import re

from rfa.checks import require

from .machine_code import Instruction

_KINDS = {  # by the names of opcodes; those of the uniform path start with U
    "tensor": "HMMA HGMMA IMMA IGMMA QGMMA BMMA DMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA OMMA QMMA",
    "function": "MUFU",
    "float": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 FFMA32I FMUL32I FADD32I FSWZADD HFMA2 HADD2 HMUL2 HFMA HADD HMUL",
    "double": "DFMA DADD DMUL DSETP DMNMX",
    "integer multiply": "IMAD IMAD32I IMUL XMAD",
    "integer": "IADD3 IADD IADD32I VIADD LEA SHF SHL SHR IABS ISCADD SGXT BMSK PRMT FLO POPC BREV IDP VIADDMNX",
    "logic": "LOP3 LOP LOP32I PLOP3 P2R R2P BFE BFI",
    "compare": "ISETP FSETP FSET ISET HSETP2 HSET2 FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 VIADDMNMX HMNMX2 FCHK",
    "select": "SEL FSEL",
    "move": "MOV MOV32I CS2R S2R S2UR R2UR LEPC",
    "convert": "F2FP F2F F2I I2F I2FP I2I FRND F2IP I2IP F2F32",
    "global": "LDG STG LD ST ATOM ATOMG RED REDG LDC ULDC LDCU",
    "shared": "LDS STS LDSM STSM ATOMS LDTM STTM UTCCP LDGMC",
    "local": "LDL STL",
    "copy": "LDGSTS UBLKCP UBLKRED UTMALDG UTMASTG UTMAREDG UTMAPF UBLKPF",
    "shuffle": "SHFL REDUX CREDUX VOTE VOTEU MATCH",
    "barrier": "BAR BARRIER SYNCS DEPBAR LDGDEPBAR WARPGROUP WARPGROUPSET WARPSYNC WARPARRIVE FENCE MEMBAR UTCBAR "
    "UTMACMDFLUSH ERRBAR CCTL ARRIVES UTMACCTL LDTMWAIT UTCATOMSWS UVIRTCOUNT",
    "control": "BRA BRX JMP EXIT CALL RET BSSY BSYNC BREAK NOP BPT ELECT NANOSLEEP YIELD KILL PLEPOCH ACQBULK USETMAXREG",
}
KINDS = (*_KINDS, "uniform", "other")
_KIND = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def kind(instruction: Instruction) -> str:
    """One of `KINDS`."""
    known = _KIND.get(instruction.name)
    return known or ("uniform" if instruction.name.startswith("U") else "other")


_WARP = {"1684": 16 * 8 * 4, "1688": 16 * 8 * 8, "16816": 16 * 8 * 16, "16832": 16 * 8 * 32}


def products(instruction: Instruction, warps: int) -> int:
    """The multiply-adds that the program's warps do with one matrix instruction; 0 for others.

    An HMMA is one warp's, an HGMMA that of a group of four warps, and one thread issues a UTCHMMA for all of them.

    Raises:
        ValueError: where the shape cannot be told.
    """
    if kind(instruction) != "tensor":
        return 0
    if instruction.name.startswith("UTC"):
        descriptor = re.search(r"idesc\[0x([0-9a-f]+)\]", instruction.operands)
        require(descriptor is not None, "machine code", instruction.operands, "a matrix product of a known shape")
        bits = int(descriptor[1], 16) if descriptor else 0
        rows, columns = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
        inner = 8 if (bits >> 7 & 7) == 2 else 16  # TF32, or a format of 16 bits
        return rows * columns * inner * (2 if ".2CTA" in instruction.opcode else 1)
    if shape := re.match(r"\w*GMMA\.(\d+)x(\d+)x(\d+)\.", instruction.opcode):
        rows, columns, inner = map(int, shape.groups())
        return rows * columns * inner * warps // 4
    shape = re.match(r"\w*MMA\.(\d+)\.", instruction.opcode)
    require(shape is not None and shape[1] in _WARP, "machine code", instruction.opcode, "a product of a known shape")
    return _WARP[shape[1]] * warps if shape else 0
