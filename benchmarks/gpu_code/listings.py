"""Compile a kernel as it is launched, disassemble it, and count the instructions of its loops for each pair."""

import re
import subprocess
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from rfa.checks import require

from .launches import Launch

_DOT = re.compile(r"\btt\.dot\b.*: tensor<(\d+)x(\d+)x\w+> \* tensor<\d+x(\d+)x\w+>")
_LOOP = re.compile(r"\bscf\.(for|while)\b")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_\w+):\s*$")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_UNITS = {  # by the beginnings of opcodes; what has none of these is "rest"
    "tensor": r"[HQIDO]?G?MMA|UTC\w*MMA|[HIQ]G?MMA",
    "functions": r"MUFU|F2F\b|F2I|I2F|FRND|FLO",
    "float": r"FFMA|FMUL|FADD|HFMA|HADD|HMUL|IMAD|IMUL",
    "integer": r"IADD|VIADD|LEA|SHF|SHL|SHR|IABS|PRMT|POPC|BREV|P?LOP3|[IFH]SET|FMNMX|V?IMNMX|F?SEL|MOV|CS2R|S2|F2FP",
    "memory": r"LD[GSTM]?\b|LDSM|LDTM|ST[GSTL]?\b|STSM|STTM|ATOM|RED|SHFL|LDL|LDGSTS|UTMA|UBLK",
}
UNITS = (*_UNITS, "rest")


class Loop(NamedTuple):
    """A loop over tiles of pairs.

    Fields:
        instructions: of a thread for each pair.
        units: the same by `UNITS`.
        spills: local loads and stores of a trip.
        pairs: of a trip.
    """

    instructions: float
    units: dict[str, float]
    spills: int
    pairs: int


class Kernel(NamedTuple):
    """What the compiler made of a launch.

    Fields:
        loops: those over pairs. The one with the fewest instructions a pair is first: that over tiles without a mask.
        registers: of a thread.
        spills: local loads and stores of the whole kernel.
        shared_bytes, warps: of a program.
    """

    loops: list[Loop]
    registers: int
    spills: int
    shared_bytes: int
    warps: int


def built(launch: Launch, number: int) -> Any:
    """What Triton makes of a launch for a compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton.compile(source, target=GPUTarget("cuda", number, 32), options=launch.options)


def compiled(launch: Launch, number: int) -> Kernel:
    """Compile for a compute capability and count, by the tools in Triton's wheel.

    Raises:
        ValueError: where a tool fails, or the machine code has other loops than Triton's code.
    """
    import triton

    made = built(launch, number)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        listing = _output(tools / "nvdisasm", "--print-code", file.name)
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
    warps, tiles, bodies = made.metadata.num_warps, pairs_of_loops(made.asm["ttir"]), loops_with_products(listing)
    if not tiles:  # products in float32 are no matrix products: nothing is read from such a kernel
        bodies = []
    require(len(tiles) == len(bodies), launch.name, f"{len(bodies)} loops in machine code", str(len(tiles)))
    loops = [_loop(body, pairs, 32 * warps) for body, pairs in zip(bodies, tiles, strict=True)]
    registers = re.search(r"REG:(\d+)", usage)
    return Kernel(
        sorted(loops, key=lambda loop: loop.instructions),
        int(registers[1]) if registers else 0,
        _spills(instructions(listing)),
        made.metadata.shared,
        warps,
    )


def _loop(body: list[str], pairs: int, threads: int) -> Loop:
    share = threads / pairs
    units = Counter(unit_of(opcode) for opcode in body)
    by_unit = {unit: round(units[unit] * share, 3) for unit in UNITS if units[unit]}
    return Loop(round(len(body) * share, 3), by_unit, _spills(body), pairs)


def _spills(opcodes: list[str]) -> int:
    return sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)


def _output(tool: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{tool.name} failed: {error.stderr.strip()[-300:]}") from None
    return done.stdout


def unit_of(opcode: str) -> str:
    """One of `UNITS`."""
    return next((unit for unit, names in _UNITS.items() if re.match(names, opcode)), "rest")


def instructions(listing: str) -> list[str]:
    """The opcodes of a listing."""
    return [found[1] for found in map(_INSTRUCTION.match, listing.splitlines()) if found]


def loops_with_products(listing: str) -> list[list[str]]:
    """The opcodes of the innermost loops with matrix products, in the order of the code.

    A loop is what lies between a label and a branch back to it. What waits for a barrier, or runs where threads of a
    warp have parted, stands behind the kernel's exit and goes back from there: it is left out. A branch forward skips
    what is rare, or what other threads do, and its instructions count.
    """
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif found := _INSTRUCTION.match(line):
            opcodes.append(found[1])
            target = _TARGET.search(found[2])
            if target and found[1].startswith(("BRA", "CALL")) and target[1] in labels:
                loops.append((labels[target[1]], len(opcodes)))
    exits = {place for place, opcode in enumerate(opcodes) if opcode == "EXIT"}
    loops = [(a, b) for a, b in loops if exits.isdisjoint(range(a, b))]
    holding = [(a, b) for a, b in loops if any(unit_of(each) == "tensor" for each in opcodes[a:b])]
    inner = [one for one in holding if not any(one != o and one[0] <= o[0] and o[1] <= one[1] for o in holding)]
    return [opcodes[a:b] for a, b in sorted(set(inner))]


def pairs_of_loops(source: str) -> list[int]:
    """The pairs of a trip of each innermost loop with products in Triton's code, in order.

    The first product of a loop is that of queries and keys: its result has one number for each pair of the tile.
    """
    depth = 0
    open_: list[tuple[int, list[int]]] = []
    found: list[list[int]] = []
    for line in source.splitlines():
        if _LOOP.search(line):
            open_.append((depth, []))
            found.append(open_[-1][1])
        elif (dot := _DOT.search(line)) and open_:
            open_[-1][1].append(int(dot[1]) * int(dot[3]))
        depth += line.count("{") - line.count("}")
        while open_ and depth <= open_[-1][0]:
            open_.pop()
    return [pairs[0] for pairs in found if pairs]
