"""The innermost loops with matrix products, and the instructions of one trip."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .conditions import Conditions
from .machine_code import Block, Instruction, blocks


class Loop(NamedTuple):
    """An innermost loop with matrix products.

    Fields:
        body: the instructions of one trip, on the way with the most products. Where a branch depends on data, it takes
            the side with fewer instructions, which skips what is rare. Other branches take the longer side: it does the
            work for the next tile, in every trip but the last.
        others: the instructions of the loop that are not on this way.
    """

    body: list[Instruction]
    others: list[Instruction]


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
    order = sorted(body)
    conditions = Conditions([instruction for index in order for instruction in made[index].instructions])
    ends, place = {}, 0
    for index in order:
        place += len(made[index].instructions)
        ends[index] = place - 1
    best: dict[int, _Way | None] = {}

    def visit(index: int) -> _Way | None:
        """The best way from a block to the end of a trip, if there is one."""
        if index not in best:
            ways = []
            for follower in made[index].followers:
                if follower == head:
                    ways.append(_Way(0, 0, []))
                elif follower in body and follower not in dominators[index]:  # not round an inner loop
                    ways += [way for way in [visit(follower)] if way is not None]
            best[index] = None
            if ways:
                rare = len(ways) > 1 and conditions.depends_on_data(ends[index])
                way = max(ways, key=lambda way: (way.products, -way.instructions if rare else way.instructions))
                mine = weights[index], len(made[index].instructions)
                best[index] = _Way(way.products + mine[0], way.instructions + mine[1], [index, *way.blocks])
        return best[index]

    found = visit(head)
    way = [] if found is None else found.blocks
    others = sorted(body - set(way))
    return Loop([x for i in way for x in made[i].instructions], [x for i in others for x in made[i].instructions])


class _Way(NamedTuple):
    """A way through blocks: its multiply-adds and instructions."""

    products: int
    instructions: int
    blocks: list[int]
