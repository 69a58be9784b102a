"""Machine code as `nvdisasm` prints it: instructions and basic blocks."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_\w+|\$?\w[\w$.]*):\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_DESCRIPTOR = re.compile(r"idesc\[(UR\d+)\]")
_NEVER = ("BRA.DIV", "BRA.CONV")  # taken where the threads of a warp have parted, which these kernels' do not


class Instruction(NamedTuple):
    """One instruction: the predicate without "@" or None, the opcode with its modifiers, the operands as text."""

    predicate: str | None
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass
class Block:
    """Instructions that run one after another, and the indices of the blocks that may follow."""

    instructions: list[Instruction] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)


def blocks(text: str) -> list[Block]:
    """The basic blocks of a listing, in its order.

    Raises:
        ValueError: if a branch has no known target.
    """
    made = [Block()]
    labels: dict[str, int] = {}
    constants: dict[str, str] = {}
    branches: list[tuple[int, str, bool]] = []  # block, target, whether the next block may follow too
    for line in text.splitlines():
        if label := _LABEL.match(line):
            if made[-1].instructions:
                made.append(Block())
            labels[label[1]] = len(made) - 1
        elif found := _INSTRUCTION.match(line):
            instruction = _with_constants(Instruction(*found.groups()[1:]), constants)
            made[-1].instructions.append(instruction)
            if (jump := _jump(instruction)) is not None:
                branches.append((len(made) - 1, *jump))
                made.append(Block())
    ends = {index: (target, falls) for index, target, falls in branches}
    for index, block in enumerate(made):
        target, falls = ends.get(index, ("", True))
        if target:
            if target not in labels:
                raise ValueError(f"machine code: a branch to {target!r}, which is no label")
            block.followers.append(labels[target])
        if falls and index + 1 < len(made):
            block.followers.append(index + 1)
    return made


def _with_constants(instruction: Instruction, constants: dict[str, str]) -> Instruction:
    """The instruction with the descriptor of its matrices' shape instead of the register that holds it.

    `constants` is what uniform registers were last set to, in the order of the code.
    """
    if instruction.name == "UMOV":
        register, _, value = instruction.operands.partition(", ")
        constants[register] = value
    shape = _DESCRIPTOR.search(instruction.operands)
    if shape is None or not constants.get(shape[1], "").startswith("0x"):
        return instruction
    known = f"idesc[{constants[shape[1]]}]"
    return instruction._replace(operands=instruction.operands.replace(shape[0], known))


def _jump(instruction: Instruction) -> tuple[str, bool] | None:
    """The target of a jump ("" for none) and whether execution may go on behind it; None for other instructions."""
    name, target = instruction.name, _TARGET.search(instruction.operands)
    conditional = instruction.predicate is not None
    if name in ("EXIT", "RET", "KILL"):
        return "", conditional
    if instruction.opcode.startswith(_NEVER):
        return None
    if name in ("BRA", "JMP") and target:
        return target[1], conditional or "," in instruction.operands.partition("`")[0]
    if name == "CALL" and target and target[1].startswith(".L"):  # a far jump; functions have names and return
        return target[1], conditional
    return None
