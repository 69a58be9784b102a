"""Tasks of recall: by key, by what came before, by time."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rfa.checks import check_range, require

from .synthetic_task import MOST, NOT_ASKED, SyntheticBatch, SyntheticTask, check_sizes, distinct, labels_at

_MOST_COUNTS = 1_000_000  # pairs times values: entries of the table that counts the statements of one sequence


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(SyntheticTask):
    """Multi-query associative recall (Arora et al. 2023, Zoology, arXiv:2312.04927).

    A sequence begins with statements, a key and its value each. Then each key is asked once, among filler: its label is
    its value. With `repeats` each pair is stated so many times, in random order, and with `corrupted` some statements
    have another key of the sequence. A key whose value is not stated more often than any other is not asked.

    Args:
        pairs: keys of a sequence, all different. Pairs times values is at most a million.
        keys, values, filler: numbers of their tokens, which have their ids in this order; two values at least.
        repeats: statements of each pair.
        corrupted: share of the statements whose key is replaced at random.

    Raises:
        ValueError: for a size or a share out of range.
    """

    pairs: int = 8
    keys: int = 64
    values: int = 64
    filler: int = 32
    repeats: int = 1
    corrupted: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "pairs", "keys", "filler", "repeats")
        check_sizes(self, "values", least=2)
        require(self.pairs <= self.keys, "pairs", self.pairs, f"at most keys, {self.keys}")
        many = _MOST_COUNTS // self.pairs
        require(self.values <= many, "values", self.values, f"at most {many} with {self.pairs} pairs")
        require(0 <= self.corrupted < 1, "corrupted", self.corrupted, "a share from 0, below 1")
        require(not self.corrupted or self.pairs > 1, "pairs", self.pairs, "at least 2 where keys are corrupted")

    @property
    def vocabulary(self) -> int:
        """Keys, values and filler."""
        return self.keys + self.values + self.filler

    @property
    def least_length(self) -> int:
        """All statements and questions."""
        return self._stated + self.pairs

    @property
    def answers(self) -> int:
        """Number of values."""
        return self.values

    @property
    def _stated(self) -> int:
        """Tokens of all statements."""
        return 2 * self.pairs * self.repeats

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        keys = distinct(batch, self.pairs, self.keys, generator)
        values = torch.randint(self.values, (batch, self.pairs), generator=generator)
        statements = self.pairs * self.repeats
        order = distinct(batch, statements, statements, generator) % self.pairs  # the pair of each statement
        wrong = torch.rand(batch, statements, generator=generator) < self.corrupted
        others = torch.randint(1, max(self.pairs, 2), (batch, statements), generator=generator)
        said = torch.where(wrong, (order + others) % self.pairs, order)  # the pair whose key is in the statement
        stated = values.gather(1, order)
        counts = torch.zeros(batch, self.pairs * self.values, dtype=torch.long)
        counts.scatter_add_(1, said * self.values + stated, torch.ones_like(said))
        counts = counts.view(batch, self.pairs, self.values)
        own = counts.gather(2, values[..., None])
        known = (counts.scatter(2, values[..., None], 0) < own).all(-1)  # the true value is ahead of all others
        tokens = self.keys + self.values + torch.randint(self.filler, (batch, length), generator=generator)
        tokens[:, : self._stated] = torch.stack([keys.gather(1, said), self.keys + stated], -1).flatten(1)
        asked = self._stated + distinct(batch, self.pairs, length - self._stated, generator)
        tokens.scatter_(1, asked, keys)
        return SyntheticBatch(tokens, labels_at(tokens, asked, torch.where(known, self.keys + values, NOT_ASKED)))


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

    def __post_init__(self) -> None:
        check_sizes(self, "symbols", "alphabet", "filler")
        check_range("symbols", self.symbols, 2, self.alphabet)

    @property
    def least_length(self) -> int:
        """The string twice."""
        return 2 * self.symbols

    @property
    def answers(self) -> int:
        """Number of symbols."""
        return self.alphabet

    def _string(self, batch: int, length: int, room: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Filler with a string at random places among the first `room`, and the string."""
        string = distinct(batch, self.symbols, self.alphabet, generator)
        tokens = self.alphabet + torch.randint(self.filler, (batch, length), generator=generator)
        return tokens.scatter_(1, distinct(batch, self.symbols, room, generator).sort(-1).values, string), string


@dataclass(frozen=True, kw_only=True)
class GappedCopy(StringTask):
    """Copying with gaps: at the end, after a mark, the string is repeated without gaps; each label is the next symbol.

    The mark has the last id.
    """

    @property
    def vocabulary(self) -> int:
        """Symbols, filler and the mark."""
        return self.alphabet + self.filler + 1

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        tokens, string = self._string(batch, length, length - self.symbols, generator)
        mark = torch.full((batch, 1), self.alphabet + self.filler)
        tokens[:, -self.symbols :] = torch.cat([mark, string[:, :-1]], 1)
        asked = torch.arange(length - self.symbols, length).expand(batch, -1)
        return SyntheticBatch(tokens, labels_at(tokens, asked, string))


@dataclass(frozen=True, kw_only=True)
class GappedInduction(StringTask):
    """Induction with gaps: in the second half each symbol but the last stands once more, among filler, in random order.

    Its label is the symbol that came after it in the string, however much filler stood between them.
    """

    @property
    def vocabulary(self) -> int:
        """Symbols and filler."""
        return self.alphabet + self.filler

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        half = length // 2
        tokens, string = self._string(batch, length, half, generator)
        asked = half + distinct(batch, self.symbols - 1, length - half, generator)
        tokens.scatter_(1, asked, string[:, :-1])
        return SyntheticBatch(tokens, labels_at(tokens, asked, string[:, 1:]))


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
        check_sizes(self, "questions")
        check_sizes(self, "values", least=2)
        require(0 < self.lag <= MOST, "lag", self.lag, f"a time above 0, at most {MOST}")
        require(0 <= self.jitter < 1, "jitter", self.jitter, "a number from 0, below 1")
        apart = self.jitter > 0 or self.lag % 1 > 0
        require(apart, "lag", self.lag, "no whole number with jitter=0: a question would stand at a value's time")

    @property
    def vocabulary(self) -> int:
        """Values and the question."""
        return self.values + 1

    @property
    def least_length(self) -> int:
        """The questions, as many values, and those said since."""
        return 2 * self.questions + math.ceil(self.lag)

    @property
    def answers(self) -> int:
        """Number of values."""
        return self.values

    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch:
        said = length - self.questions
        gaps = 1 + self.jitter * (2 * torch.rand(batch, said, generator=generator, dtype=torch.float64) - 1)
        times, values = gaps.cumsum(-1) - gaps[:, :1], torch.randint(self.values, (batch, said), generator=generator)
        about = distinct(batch, self.questions, said - math.ceil(self.lag), generator)
        questions, nothing = torch.full_like(about, self.values), torch.full_like(values, NOT_ASKED)
        times, order = torch.cat([times, times.gather(1, about) + self.lag], 1).sort(-1)
        tokens, labels = torch.cat([values, questions], 1), torch.cat([nothing, values.gather(1, about)], 1)
        return SyntheticBatch(tokens.gather(1, order), labels.gather(1, order), times)
