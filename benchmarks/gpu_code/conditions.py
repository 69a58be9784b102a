"""Which branches of a loop depend on data: on what was loaded or exchanged, or on a comparison of real numbers.

The others depend on the loop's counter and on the thread alone. Compilers add such branches around what they do early
for the next tile: their code runs in every trip but the last.
"""

import re
from collections.abc import Sequence

from .machine_code import Instruction

_LOADS = {"LDG", "LD", "LDS", "LDSM", "LDTM", "ATOM", "ATOMG", "ATOMS"}
_DATA = _LOADS | {"SHFL", "REDUX", "CREDUX", "SYNCS", "FSETP", "FSET", "DSETP", "HSETP2"}
_STORES = {"STG", "ST", "STS", "STSM", "STTM", "STL", "RED"}
_WRITES_NOTHING = _STORES | {"BAR", "BRA", "BSSY", "BSYNC", "CALL", "EXIT", "DEPBAR", "MEMBAR"}
_REGISTER = re.compile(r"\bU?[RP]\d+\b")
_PREDICATE = re.compile(r"U?P[\dT]")
_FIRST = re.compile(r"(U?R)(\d+|Z)\b")
_DEPTH = 12  # instructions from a condition to what it depends on


class Conditions:
    """The conditions of the branches of a loop.

    Args:
        code: all instructions of the loop, in the order of the code.
    """

    def __init__(self, code: Sequence[Instruction]):
        self.code = code
        self._operands = [_operands(instruction) for instruction in code]

    def depends_on_data(self, place: int) -> bool:
        """Whether the branch at a place depends on data.

        Each register is followed to the instruction of the loop that wrote it last, at most once round the loop. What
        was written before the loop does not count.
        """
        branch = self.code[place]
        condition = f"{branch.predicate or ''} {branch.operands.partition('`')[0]}"
        waiting = [(name, place, _DEPTH) for name in _REGISTER.findall(condition)]
        seen = set()
        while waiting:
            name, before, depth = waiting.pop()
            writer = self._last_writer(name, before)
            if writer is None or (name, writer) in seen:
                continue
            seen.add((name, writer))
            if self.code[writer].name in _DATA:
                return True
            if depth:
                sources = _REGISTER.findall(", ".join(self._operands[writer][1]))
                waiting += [(source, writer, depth - 1) for source in sources]
        return False

    def _last_writer(self, name: str, before: int) -> int | None:
        for place in (*range(before - 1, -1, -1), *range(len(self.code) - 1, before - 1, -1)):
            if name in self._operands[place][0]:
                return place
        return None


def _operands(instruction: Instruction) -> tuple[list[str], list[str]]:
    """The registers that an instruction writes, and its other operands.

    First come predicates and one register that it writes, then further predicates, such as that of a carry. A
    comparison writes predicates only.
    """
    operands = instruction.operands.split(", ")
    if instruction.name in _WRITES_NOTHING:
        return [], operands
    written: list[str] = []
    taken, register = 0, instruction.name.endswith("SETP")
    for operand in operands[: -1 if instruction.name.startswith("VOTE") else None]:  # its last one is read
        if _PREDICATE.fullmatch(operand):
            written.append(operand)
        elif not register and (first := _FIRST.match(operand)):
            register = True
            number = int(first[2]) if first[2] != "Z" else 0
            written += [f"{first[1]}{number + i}" for i in range(_width(instruction.opcode)) if first[2] != "Z"]
        else:
            break
        taken += 1
    return written, operands[taken:]


def _width(opcode: str) -> int:
    """How many registers of 32 bits an instruction writes side by side."""
    found = re.search(r"\.x(\d+)\b", opcode)
    if found:
        return int(found[1])
    return 4 if ".128" in opcode or "MMA" in opcode else 2 if re.search(r"\.64|WIDE|[A-Z]2\b", opcode) else 1
