"""Synthetic tasks on sequences of tokens: what a model must recall, copy or keep track of is known exactly.

A token at a position with a label asks a question. The answer depends on the tokens up to it, and on nothing else.
"""

import itertools
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Int
from torch import Tensor

from rfa.checks import require

from .synthetic_recall import AssociativeRecall, GappedCopy, GappedInduction, TimedRecall
from .synthetic_task import NOT_ASKED, SyntheticBatch, SyntheticTask, check_sizes

__all__ = [
    "TASKS",
    "AssociativeRecall",
    "FlipFlop",
    "GappedCopy",
    "GappedInduction",
    "GroupWord",
    "SyntheticBatch",
    "SyntheticTask",
    "TimedRecall",
]

_WRITE, _READ, _IGNORE = range(3)  # the instructions of a flip-flop
_BITS = 3  # the id of its first value


@dataclass(frozen=True, kw_only=True)
class FlipFlop(SyntheticTask):
    """Flip-flop (Liu et al. 2023, "Exposing attention glitches with flip-flop language modeling", arXiv:2306.00946).

    A sequence is a chain of instructions, each with a value: write (id 0), read (1) or ignore (2). The first one writes
    and the last one reads. The label of a read is the value of the last write, which also stands after it.

    Args:
        write, read: shares of these instructions; the others ignore.
        values: number of values, at least two, with ids from 3.

    Raises:
        ValueError: for a share or a number out of range.
    """

    write: float = 0.1
    read: float = 0.1
    values: int = 2

    def __post_init__(self) -> None:
        check_sizes(self, "values", least=2)
        for name in ("write", "read"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share from 0 to 1")
        require(self.write + self.read <= 1, "read", self.read, f"at most {1 - self.write:g}, what write leaves")

    @property
    def vocabulary(self) -> int:
        """Instructions and values."""
        return _BITS + self.values

    @property
    def least_length(self) -> int:
        """One write and one read."""
        return 4

    @property
    def answers(self) -> int:
        """Number of values."""
        return self.values

    def check_length(self, length: int) -> None:
        """Raise `ValueError` for a length that is odd or below 4."""
        super().check_length(length)
        require(length % 2 == 0, "length", length, "an even number: an instruction and a value take two tokens")

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        drawn, steps = torch.rand(batch, length // 2, generator=generator), torch.arange(length // 2)
        instructions = torch.where(drawn < self.write, _WRITE, torch.where(drawn >= 1 - self.read, _READ, _IGNORE))
        instructions[:, 0], instructions[:, -1] = _WRITE, _READ
        values = _BITS + torch.randint(self.values, instructions.shape, generator=generator)
        last_write = torch.where(instructions == _WRITE, steps, 0).cummax(-1).values
        reads = instructions == _READ
        values = torch.where(reads, values.gather(1, last_write), values)
        nothing = torch.full_like(values, NOT_ASKED)
        labels = torch.stack([torch.where(reads, values, NOT_ASKED), nothing], -1)
        return SyntheticBatch(torch.stack([instructions, values], -1).flatten(1), labels.flatten(1))


@dataclass(frozen=True, kw_only=True)
class GroupWord(SyntheticTask):
    """The word problem of a group: from the second token on, each label is the product of all elements so far.

    `label_t = token_t * label_{t-1}`. Parity is the group of two elements. A5, the even permutations of five things, is
    the smallest group that is not solvable: its product needs a state (Merrill et al. 2024, arXiv:2404.08819).

    Args:
        group: "parity" or "a5".

    Raises:
        ValueError: for another group.
    """

    group: str = "parity"

    def __post_init__(self) -> None:
        require(self.group in _PRODUCTS, "group", self.group, f"one of {', '.join(_PRODUCTS)}")

    @property
    def vocabulary(self) -> int:
        """Number of elements."""
        return len(_PRODUCTS[self.group])

    @property
    def least_length(self) -> int:
        """Two elements."""
        return 2

    @property
    def answers(self) -> int:
        """Number of elements."""
        return self.vocabulary

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        product = _PRODUCTS[self.group]
        tokens = torch.randint(self.vocabulary, (batch, length), generator=generator)
        states = [tokens[:, 0]]
        for token in tokens[:, 1:].unbind(1):
            states.append(product[token, states[-1]])
        labels = torch.stack(states, 1)
        labels[:, 0] = NOT_ASKED
        return SyntheticBatch(tokens, labels)


def even_permutations() -> list[tuple[int, ...]]:
    """The elements of A5 in the order of their ids; `p` maps place i to `p[i]`, so the first one changes nothing."""
    pairs = list(itertools.combinations(range(5), 2))
    return [p for p in itertools.permutations(range(5)) if sum(p[i] > p[j] for i, j in pairs) % 2 == 0]


def _products_of_a5() -> Int[Tensor, "element element"]:
    """The id of `p * q`, which applies q first."""
    elements = even_permutations()
    place = {element: index for index, element in enumerate(elements)}
    return torch.tensor([[place[tuple(p[k] for k in q)] for q in elements] for p in elements])


_PRODUCTS = {"parity": torch.tensor([[0, 1], [1, 0]]), "a5": _products_of_a5()}

TASKS: MappingProxyType[str, type[SyntheticTask]] = MappingProxyType(
    {
        "recall": AssociativeRecall,
        "copy": GappedCopy,
        "induction": GappedInduction,
        "flip_flop": FlipFlop,
        "word": GroupWord,
        "timed_recall": TimedRecall,
    }
)
