"""Machine code as `nvdisasm` prints it: instructions, basic blocks, and the loops with matrix products."""

import re
from collections.abc import Callable, Iterator, Sequence
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


class Loop(NamedTuple):
    """An innermost loop with matrix products.

    Fields:
        body: the instructions of one trip, on the way with the most products and, of such ways, the fewest
            instructions.
        others: the instructions of the loop that are not on this way: they run under a condition.
    """

    body: list[Instruction]
    others: list[Instruction]


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


def product_loops(text: str, products: Callable[[Instruction], int]) -> list[Loop]:
    """The innermost loops that hold products, in the order of the code.

    Args:
        text: the listing.
        products: the multiply-adds of an instruction, 0 for those that are no matrix product.
    """
    made = blocks(text)
    reachable = set(_reachable(made))
    for index, block in enumerate(made):
        if index not in reachable:  # what runs only where the threads of a warp have parted
            block.followers.clear()
    dominators = _dominators(made)
    bodies: dict[int, set[int]] = {}
    for index, block in enumerate(made):
        for follower in block.followers:
            if follower in dominators[index]:
                bodies.setdefault(follower, {follower}).update(_natural_loop(made, follower, index))
    weights = [sum(map(products, block.instructions)) for block in made]
    holding = {head: body for head, body in bodies.items() if any(weights[i] for i in body)}
    inner = {head: body for head, body in holding.items() if not any(other < body for other in holding.values())}
    return [_loop(made, head, inner[head], dominators, weights) for head in sorted(inner)]


def _dominators(made: Sequence[Block]) -> list[set[int]]:
    """For each block those that every way from the start to it passes; none for a block that cannot be reached."""
    before: list[list[int]] = [[] for _ in made]
    for index, block in enumerate(made):
        for follower in block.followers:
            before[follower].append(index)
    everything = set(range(len(made)))
    found = [set(everything) for _ in made]
    found[0] = {0}
    changed = True
    while changed:
        changed = False
        for index in range(1, len(made)):
            common = set.intersection(*(found[i] for i in before[index])) if before[index] else set()
            new = common | {index} if before[index] else set()
            if new != found[index]:
                found[index], changed = new, True
    return found


def _reachable(made: Sequence[Block]) -> Iterator[int]:
    seen, waiting = {0}, [0]
    while waiting:
        index = waiting.pop()
        yield index
        new = set(made[index].followers) - seen
        seen |= new
        waiting += new


def _natural_loop(made: Sequence[Block], head: int, tail: int) -> set[int]:
    """The blocks from which `tail`, the end of a backward branch to `head`, is reached without passing `head`."""
    before: dict[int, list[int]] = {}
    for index, block in enumerate(made):
        for follower in block.followers:
            before.setdefault(follower, []).append(index)
    found, waiting = {head, tail}, [tail] if tail != head else []
    while waiting:
        new = set(before.get(waiting.pop(), [])) - found
        found |= new
        waiting += new
    return found


def _loop(made: Sequence[Block], head: int, body: set[int], dominators: list[set[int]], weights: list[int]) -> Loop:
    """The loop, with the way of one trip through it."""
    best: dict[int, _Way | None] = {}

    def visit(index: int) -> _Way | None:
        """The best way from a block to the end of a trip, if there is one."""
        if index not in best:
            own, ways = _Way(weights[index], -len(made[index].instructions), [index]), []
            for follower in made[index].followers:
                if follower == head:
                    ways.append(own)
                elif follower in body and follower not in dominators[index]:  # not round an inner loop
                    ways += [own.then(rest) for rest in [visit(follower)] if rest is not None]
            best[index] = max(ways, default=None)
        return best[index]

    found = visit(head)
    way = [] if found is None else found.blocks
    others = sorted(body - set(way))
    return Loop([x for i in way for x in made[i].instructions], [x for i in others for x in made[i].instructions])


class _Way(NamedTuple):
    """A way through blocks; of two, the greater is the better one."""

    products: int
    less_instructions: int
    blocks: list[int]

    def then(self, rest: "_Way") -> "_Way":
        """This way and then the other."""
        sums = self.products + rest.products, self.less_instructions + rest.less_instructions
        return _Way(*sums, self.blocks + rest.blocks)
