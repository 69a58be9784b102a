"""Synthetic tasks on sequences of tokens: what a model must recall, copy or keep track of is known exactly.

A token at a position with a label asks a question. The answer depends on the tokens up to it, and on nothing else.
"""

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rfa.checks import check_range, require

NOT_ASKED = -100  # the label of a position that asks nothing
_MOST = 100_000  # of sizes
_MOST_COUNTS = 1_000_000  # pairs times values: entries of the table that counts the statements of one sequence


class SyntheticBatch(NamedTuple):
    """Sequences of a task.

    Fields:
        tokens: ids from 0.
        labels: the answer to the question that a token asks, a token id; -100 where nothing is asked.
        times: of the tokens, ascending; None for 0, 1, 2, ...
    """

    tokens: Int[Tensor, "batch length"]
    labels: Int[Tensor, "batch length"]
    times: Float[Tensor, "batch length"] | None = None


class TaskSizes(NamedTuple):
    """Sizes of a task.

    Fields:
        vocabulary: number of token ids.
        least_length: of a sequence that holds the task.
        answers: number of answers, which are equally likely: a guess is right in `1 / answers` of all questions.
    """

    vocabulary: int
    least_length: int
    answers: int


class SyntheticTask(ABC):
    """A task whose sequences have any length from `least_length`. It has the fields of `TaskSizes` as properties."""

    @property
    @abstractmethod
    def sizes(self) -> TaskSizes:
        """Vocabulary, least length and answers."""

    vocabulary = property(lambda self: self.sizes.vocabulary)
    least_length = property(lambda self: self.sizes.least_length)
    answers = property(lambda self: self.sizes.answers)

    def check_length(self, length: int) -> None:
        """Raise `ValueError` for a length that the task does not fit in."""
        require(length >= self.least_length, "length", length, f"at least {self.least_length} tokens for this task")

    def sample(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        """Draw sequences.

        Args:
            batch: their number.
            length: tokens of each.
            generator: of the random numbers.

        Raises:
            ValueError: for fewer than one sequence, or a length that the task does not fit in.
        """
        check_range("batch", batch, 1, _MOST)
        self.check_length(length)
        return self._draw(batch, length, generator)

    @abstractmethod
    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch: ...


def _check_sizes(task: object, *names: str, least: int = 1) -> None:
    """Raise `ValueError` unless these fields lie between `least` and `_MOST`."""
    for name in names:
        check_range(name, getattr(task, name), least, _MOST)


def _distinct(batch: int, count: int, among: int, generator: torch.Generator) -> Int[Tensor, "batch count"]:
    """For each sequence different numbers from 0 to `among - 1`, in random order."""
    return torch.rand(batch, among, generator=generator).argsort(-1)[:, :count]


def _labels_at(
    tokens: Int[Tensor, "batch length"], asked: Int[Tensor, "batch asked"], answers: Int[Tensor, "batch asked"]
) -> Int[Tensor, "batch length"]:
    """The answers at their positions, and -100 elsewhere."""
    return torch.full_like(tokens, NOT_ASKED).scatter_(1, asked, answers)


class Statements(NamedTuple):
    """What a sequence states of its pairs. Keys and values are numbered from 0.

    Fields:
        said: the pair whose key stands in each statement.
        stated: the value in each statement.
        answers: the true value of each pair; -100 for a pair that is not asked.
    """

    said: Int[Tensor, "batch statements"]
    stated: Int[Tensor, "batch statements"]
    answers: Int[Tensor, "batch pairs"]


@dataclass(frozen=True, kw_only=True)
class PairTask(SyntheticTask):
    """A sequence begins with statements, a key and a value each. Then each key is asked once, among filler.

    Args:
        pairs: keys of a sequence, all different.
        keys, values, filler: numbers of their tokens, which have their ids in this order; two values at least.
        repeats: statements of each pair, in random order among those of the other pairs.

    Raises:
        ValueError: for a size out of range.
    """

    pairs: int = 8
    keys: int = 64
    values: int = 64
    filler: int = 32
    repeats: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self, "pairs", "keys", "filler", "repeats")
        _check_sizes(self, "values", least=2)
        require(self.pairs <= self.keys, "pairs", self.pairs, f"at most keys, {self.keys}")

    @property
    def sizes(self) -> TaskSizes:
        """Keys, values and filler; all statements and questions; a value."""
        return TaskSizes(self.keys + self.values + self.filler, self._stated + self.pairs, self.values)

    @property
    def _stated(self) -> int:
        """Tokens of all statements."""
        return 2 * self.pairs * self.repeats

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        keys = _distinct(batch, self.pairs, self.keys, generator)
        values = torch.randint(self.values, (batch, self.pairs), generator=generator)
        statements = self.pairs * self.repeats
        order = _distinct(batch, statements, statements, generator) % self.pairs  # the pair of each statement
        said, stated, answers = self._statements(values, order, generator)
        tokens = self.keys + self.values + torch.randint(self.filler, (batch, length), generator=generator)
        tokens[:, : self._stated] = torch.stack([keys.gather(1, said), self.keys + stated], -1).flatten(1)
        asked = self._stated + _distinct(batch, self.pairs, length - self._stated, generator)
        tokens.scatter_(1, asked, keys)
        return SyntheticBatch(tokens, _labels_at(tokens, asked, torch.where(answers < 0, answers, self.keys + answers)))

    @abstractmethod
    def _statements(
        self,
        values: Int[Tensor, "batch pairs"],
        order: Int[Tensor, "batch statements"],
        generator: torch.Generator,
    ) -> Statements:
        """What is said of pairs with these values, each statement of the pair that `order` names."""


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(PairTask):
    """Multi-query associative recall (Arora et al. 2023, Zoology, arXiv:2312.04927).

    The label of a key is its value. With `repeats` each pair is stated so many times, and with `corrupted` some
    statements have another key of the sequence. A key whose value is not stated more often than any other is not asked.

    Args:
        pairs, keys, values, filler, repeats: as of `PairTask`. Pairs times values is at most a million.
        corrupted: share of the statements whose key is replaced at random.

    Raises:
        ValueError: for a size or a share out of range.
    """

    corrupted: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        many = _MOST_COUNTS // self.pairs
        require(self.values <= many, "values", self.values, f"at most {many} with {self.pairs} pairs")
        require(0 <= self.corrupted < 1, "corrupted", self.corrupted, "a share from 0, below 1")
        require(not self.corrupted or self.pairs > 1, "pairs", self.pairs, "at least 2 where keys are corrupted")

    def _statements(self, values: Tensor, order: Tensor, generator: torch.Generator) -> Statements:
        wrong = torch.rand(order.shape, generator=generator) < self.corrupted
        others = torch.randint(1, max(self.pairs, 2), order.shape, generator=generator)
        said, stated = torch.where(wrong, (order + others) % self.pairs, order), values.gather(1, order)
        counts = torch.zeros(len(values), self.pairs * self.values, dtype=torch.long)
        counts.scatter_add_(1, said * self.values + stated, torch.ones_like(said))
        counts = counts.view(len(values), self.pairs, self.values)
        own = counts.gather(2, values[..., None])
        known = (counts.scatter(2, values[..., None], 0) < own).all(-1)  # the true value is ahead of all others
        return Statements(said, stated, torch.where(known, values, NOT_ASKED))


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(PairTask):
    """Recall of values that are read with errors: the label of a key is the true value, of which no reading need be it.

    Values lie on a circle: an error of 1 makes the last one the first. Errors are `spread` times a Student-t variable,
    rounded.

    Args:
        pairs, keys, values, filler, repeats: as of `PairTask`; each statement has a reading of its own.
        spread: of the errors, in values.
        freedom: degrees of freedom of the errors. With few of them tails are heavy.

    Raises:
        ValueError: for a size or a number out of range.
    """

    spread: float = 1.0
    freedom: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self, "freedom")
        require(0 <= self.spread <= _MOST, "spread", self.spread, f"a number from 0 to {_MOST}")

    def _statements(self, values: Tensor, order: Tensor, generator: torch.Generator) -> Statements:
        shape = (*order.shape, self.freedom + 1)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        student = normal[..., 0] / normal[..., 1:].square().mean(-1).sqrt()
        # beyond a circle's errors all places are alike, and a float of any size is no integer
        errors = (self.spread * student).remainder(self.values).round().long()
        return Statements(order, (values.gather(1, order) + errors) % self.values, values)


@dataclass(frozen=True, kw_only=True)
class StaleRecall(PairTask):
    """Recall of keys that are bound again: each statement has a value of its own, and a key's last one holds."""

    def _statements(self, values: Tensor, order: Tensor, generator: torch.Generator) -> Statements:
        stated = torch.randint(self.values, order.shape, generator=generator)
        last = torch.stack([(order == pair).long().cumsum(1).argmax(1) for pair in range(self.pairs)], 1)
        return Statements(order, stated, stated.gather(1, last))


@dataclass(frozen=True, kw_only=True)
class StringTask(SyntheticTask):
    """A string of different symbols with gaps of filler between them, and questions about it.

    Args:
        symbols: of the string.
        alphabet, filler: numbers of their tokens, which have their ids in this order.

    Raises:
        ValueError: for a size out of range.
    """

    symbols: int = 8
    alphabet: int = 64
    filler: int = 32
    _marks: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _check_sizes(self, "symbols", "alphabet", "filler")
        check_range("symbols", self.symbols, 2, self.alphabet)

    @property
    def sizes(self) -> TaskSizes:
        """Symbols, filler and marks; the string twice; a symbol."""
        return TaskSizes(self.alphabet + self.filler + self._marks, 2 * self.symbols, self.alphabet)

    def _string(self, batch: int, length: int, room: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Filler with a string at random places among the first `room`, and the string."""
        string = _distinct(batch, self.symbols, self.alphabet, generator)
        tokens = self.alphabet + torch.randint(self.filler, (batch, length), generator=generator)
        return tokens.scatter_(1, _distinct(batch, self.symbols, room, generator).sort(-1).values, string), string


@dataclass(frozen=True, kw_only=True)
class GappedCopy(StringTask):
    """Copying with gaps: at the end, after a mark, the string is repeated without gaps; each label is the next symbol.

    The mark has the last id.
    """

    _marks = 1

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        tokens, string = self._string(batch, length, length - self.symbols, generator)
        mark = torch.full((batch, 1), self.alphabet + self.filler)
        tokens[:, -self.symbols :] = torch.cat([mark, string[:, :-1]], 1)
        asked = torch.arange(length - self.symbols, length).expand(batch, -1)
        return SyntheticBatch(tokens, _labels_at(tokens, asked, string))


@dataclass(frozen=True, kw_only=True)
class GappedInduction(StringTask):
    """Induction with gaps: in the second half each symbol but the last stands once more, among filler, in random order.

    Its label is the symbol that came after it in the string, however much filler stood between them.
    """

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        half = length // 2
        tokens, string = self._string(batch, length, half, generator)
        asked = half + _distinct(batch, self.symbols - 1, length - half, generator)
        tokens.scatter_(1, asked, string[:, :-1])
        return SyntheticBatch(tokens, _labels_at(tokens, asked, string[:, 1:]))


@dataclass(frozen=True, kw_only=True)
class TimedRecall(SyntheticTask):
    """Recall by time: a question asks for what was said exactly `lag` units of time ago.

    Values are said at irregular times, with gaps uniform between `1 - jitter` and `1 + jitter`. A question stands
    between them, at its own time. All questions are the same token, the last id: only times tell the answers apart.

    Args:
        questions: of a sequence.
        values: number of their tokens, at least two.
        lag: in units of the mean gap.
        jitter: half the width of the gaps' distribution.

    Raises:
        ValueError: for a size, a lag or a jitter out of range.
    """

    questions: int = 8
    values: int = 64
    lag: float = 37.5
    jitter: float = 0.5

    def __post_init__(self) -> None:
        _check_sizes(self, "questions")
        _check_sizes(self, "values", least=2)
        require(0 < self.lag <= _MOST, "lag", self.lag, f"a time above 0, at most {_MOST}")
        require(0 <= self.jitter < 1, "jitter", self.jitter, "a number from 0, below 1")
        apart = self.jitter > 0 or self.lag % 1 > 0
        require(apart, "lag", self.lag, "no whole number with jitter=0: a question would stand at a value's time")

    @property
    def sizes(self) -> TaskSizes:
        """Values and the question; the questions, as many values, and those said since; a value."""
        return TaskSizes(self.values + 1, 2 * self.questions + math.ceil(self.lag), self.values)

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        said = length - self.questions
        gaps = 1 + self.jitter * (2 * torch.rand(batch, said, generator=generator, dtype=torch.float64) - 1)
        times, values = gaps.cumsum(-1) - gaps[:, :1], torch.randint(self.values, (batch, said), generator=generator)
        about = _distinct(batch, self.questions, said - math.ceil(self.lag), generator)
        questions, nothing = torch.full_like(about, self.values), torch.full_like(values, NOT_ASKED)
        times, order = torch.cat([times, times.gather(1, about) + self.lag], 1).sort(-1)
        tokens, labels = torch.cat([values, questions], 1), torch.cat([nothing, values.gather(1, about)], 1)
        return SyntheticBatch(tokens.gather(1, order), labels.gather(1, order), times)


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
        _check_sizes(self, "values", least=2)
        for name in ("write", "read"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share from 0 to 1")
        require(self.write + self.read <= 1, "read", self.read, f"at most {1 - self.write:g}, what write leaves")

    @property
    def sizes(self) -> TaskSizes:
        """Instructions and values; one write and one read; a value."""
        return TaskSizes(_BITS + self.values, 4, self.values)

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
    def sizes(self) -> TaskSizes:
        """The elements; two of them; an element."""
        elements = len(_PRODUCTS[self.group])
        return TaskSizes(elements, 2, elements)

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
        "noisy_recall": NoisyRecall,
        "stale_recall": StaleRecall,
    }
)
