"""Compile a kernel as it is launched, disassemble it, and count the instructions of its loops for each pair."""

import json
import math
import re
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rfa.checks import installed, require
from rfa.ops.backends import interpreted
from rfa.progress import Stage, StageProgress

from .cases import KernelCase
from .launches import Launch
from .loops import Loop, product_loops
from .units import ARCHITECTURES, ISSUED, KINDS, UNITS, is_tf32, kind, products

_DOT = re.compile(r"\btt\.dot\b.*: tensor<(\d+)x(\d+)x\w+> \* tensor<\d+x(\d+)x\w+>")
_RESULT = re.compile(r"dot\b.*-> tensor<(\d+)x(\d+)xf32, (#\w+)>")
_LAYOUT = re.compile(r"(#\w+) = #ttg\.nvidia_mma<.*warpsPerCTA = \[([\d, ]+)\].*instrShape = \[([\d, ]+)\]")
_LOOP = re.compile(r"\bscf\.(for|while)\b")

Counts = dict[str, Any]


class Visit(NamedTuple):
    """What a loop does for one tile, by Triton's code.

    Fields:
        pairs: of a query and a key.
        needed: multiply-adds of its products.
        done: multiply-adds that its warps do, more than needed where a tile is too small for so many warps.
    """

    pairs: int
    needed: int
    done: int


class Compiled(NamedTuple):
    """What the compiler made of a launch.

    Fields:
        listing: the machine code as text.
        visits: the loops of Triton's own code.
        registers: of a thread.
        stack_bytes: of a thread's stack, where spilled registers go.
        shared_bytes: of a program.
        warps: of a program.
    """

    listing: str
    visits: list[Visit]
    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int


def compiled(launch: Launch, arch: str) -> Compiled:
    """Compile and disassemble, by the tools in Triton's wheel.

    Raises:
        ValueError: where a tool fails, or for a kernel whose warps have different tasks.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel: Any = triton.compile(
            source, target=GPUTarget("cuda", ARCHITECTURES[arch].number, 32), options=launch.options
        )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = _output(tools / "nvdisasm", "--print-code", file.name)
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
    require(
        "ttg.warp_specialize" not in kernel.asm["ttgir"], launch.name, "specialised warps", "warps that do the same"
    )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    require(found is not None, "cuobjdump", usage, "the registers of a kernel")
    registers, stack = map(int, found.groups()) if found else (0, 0)
    tiles = visits(kernel.asm["ttir"], kernel.asm["ttgir"])
    return Compiled(listing, tiles, registers, stack, kernel.metadata.shared, kernel.metadata.num_warps)


def _output(tool: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{tool.name} failed: {error.stderr.strip()[-300:]}") from None
    return done.stdout


def visits(source: str, placed: str) -> list[Visit]:
    """The loops with products in Triton's code, in order.

    The first product of a loop is that of queries and keys: its result has one number for each pair of the tile.

    Args:
        source: the code before it is laid out on threads, with one visit of a tile in a trip of a loop.
        placed: the same with layouts.
    """
    depth = 0
    open_: list[tuple[int, list[tuple[int, int, int]]]] = []
    found: list[list[tuple[int, int, int]]] = []
    for line in source.splitlines():
        if _LOOP.search(line):
            open_.append((depth, []))
            found.append(open_[-1][1])
        elif (dot := _DOT.search(line)) and open_:
            rows, inner, columns = map(int, dot.groups())
            open_[-1][1].append((rows, columns, inner))
        depth += line.count("{") - line.count("}")
        while open_ and depth <= open_[-1][0]:
            open_.pop()
    repeated = _repeated(placed)
    visited = []
    for dots in filter(None, found):
        needed = [rows * columns * inner for rows, columns, inner in dots]
        done = sum(each * repeated.get(dot[:2], 1) for dot, each in zip(dots, needed, strict=True))
        visited.append(Visit(dots[0][0] * dots[0][1], sum(needed), done))
    return visited


def _repeated(placed: str) -> dict[tuple[int, int], int]:
    """How often each product is done, by the shape of its result: more than once where it is too small for all warps.

    Raises:
        ValueError: where two results of one shape differ in that.
    """
    layouts = {name: tuple(map(_numbers, parts)) for name, *parts in _LAYOUT.findall(placed)}
    found: dict[tuple[int, int], int] = {}
    for rows, columns, name in _RESULT.findall(placed):
        if name in layouts:
            shape = int(rows), int(columns)
            times = math.prod(max(1, w * i // n) for w, i, n in zip(*layouts[name], shape, strict=False))
            require(found.setdefault(shape, times) == times, "products", shape, "one layout for each shape")
    return found


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def counts(name: str, case: KernelCase, launch: Launch) -> Counts | None:
    """The line of a kernel in the result file; None for a kernel without a loop over pairs."""
    import triton

    made = compiled(launch, case.arch)
    tiles = made.visits
    if not tiles:
        return None
    loops = product_loops(made.listing, lambda each: products(each, made.warps))
    require(bool(loops), name, "no loop with matrix products", "one on tensor cores")
    if len(loops) != len(tiles):  # a compiler has doubled a loop, or unrolled all of it
        require(len(set(tiles)) == 1, name, tiles, f"{len(loops)} loops, or loops with the same products")
        tiles = tiles[:1] * len(loops)
    counted = [_of_loop(loop, tile, made.warps, case.arch) for loop, tile in zip(loops, tiles, strict=True)]
    return {
        "name": ", ".join([name, *(each for each in (case.times, case.score) if each not in _USUAL)]),
        **case._asdict(),
        "instructions_per_pair": counted[0]["instructions_per_pair"],
        "registers": made.registers,
        "spills": sum(map(made.listing.count, (" LDL", " STL"))),
        "stack_bytes": made.stack_bytes,
        "shared_bytes": made.shared_bytes,
        "warps": made.warps,
        "programs_per_multiprocessor": ARCHITECTURES[case.arch].programs(made.registers, made.warps, made.shared_bytes),
        "loops": [{"main": number == 0, **loop} for number, loop in enumerate(counted)],
        "triton": triton.__version__,
    }


_USUAL = ("uniform", "student_t", "softmax")  # what a name does not tell


def _of_loop(loop: Loop, tile: Visit, warps: int, arch: str) -> Counts:
    """Instructions of a thread and cycles of a multiprocessor, for each pair."""
    multiprocessor = ARCHITECTURES[arch]
    done = sum(products(each, warps) for each in loop.body)
    require(done % tile.done == 0, "machine code", f"{done} multiply-adds", f"a multiple of {tile.done}")
    pairs = done // tile.done * tile.pairs
    share = 32 * warps / pairs  # threads for each pair

    cycles = {
        unit: sum(multiprocessor.cycles(each) for each in loop.body if kind(each) in kinds) * share
        for unit, kinds in UNITS.items()
        if unit != "tensor"
    }
    slow = sum(products(each, warps) for each in loop.body if is_tf32(each))
    cycles["tensor"] = (done + slow) / pairs / multiprocessor.products
    busiest = max(cycles, key=lambda unit: cycles[unit])
    number = Counter(map(kind, loop.body))
    return {
        "instructions_per_pair": _rounded(len(loop.body) * share),
        "conditional_per_pair": _rounded(len(loop.others) * share),
        "pairs": pairs,
        "spills": number["local"],
        "products_done_of_needed": _rounded(tile.done / tile.needed),
        "by_kind": {each: _rounded(number[each] * share) for each in KINDS if number[each]},
        "busiest_unit": busiest,
        "cycles_per_pair": {
            **{unit: _rounded(each) for unit, each in cycles.items() if each},
            "issue": _rounded(len(loop.body) * share / ISSUED),
        },
    }


def _rounded(x: float) -> float:
    return round(x, 4)


def run(
    made: Sequence[KernelCase], only: Sequence[str] = (), progress: StageProgress = lambda *_: None
) -> Iterator[Counts]:
    """Count each kernel of the cases that has a loop over pairs.

    Args:
        made: the cases, from `cases`.
        only: beginnings of the names of kernels; all by default.
        progress: called with the stage, the cases or kernels done and their number.

    Raises:
        ValueError: where triton is missing or interprets its kernels, or no kernel has a name that `only` asks for.
    """
    require(installed("triton"), "instructions", "no triton", "the package triton (Linux only): pip install triton")
    require(not interpreted(), "TRITON_INTERPRET", "1", "that it is not set: kernels are compiled")
    kernels: list[tuple[KernelCase, str, Launch]] = []
    for done, case in enumerate(made):
        progress(Stage("launches"), done, len(made))
        kernels += [(case, name, launch) for name, launch in case.launches()]
    names = list(dict.fromkeys(name for _, name, _ in kernels))
    for each in only:
        begins = any(name.startswith(each) for name in names)
        require(begins, "only", each, f"the beginning of one of: {', '.join(names)}")
    kernels = [kernel for kernel in kernels if not only or kernel[1].startswith(tuple(only))]
    for done, (case, name, launch) in enumerate(kernels):
        progress(Stage(f"{case}: {name}"), done, len(kernels))
        if (line := counts(name, case, launch)) is not None:
            yield line
    progress(Stage("done"), len(kernels), len(kernels))


def as_json(lines: Sequence[Counts]) -> str:
    """The result file: a list with one kernel on each line."""
    return "[\n" + ",\n".join(json.dumps(line, allow_nan=False) for line in lines) + "\n]\n"
