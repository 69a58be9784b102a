"""What all synthetic tasks share: batches, sizes that are checked, and how labels and places are drawn."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rfa.checks import check_range, require

NOT_ASKED = -100  # the label of a position that asks nothing
MOST = 100_000  # of sizes


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


class SyntheticTask(ABC):
    """A task whose sequences have any length from `least_length`."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids."""

    @property
    @abstractmethod
    def least_length(self) -> int:
        """The length of the shortest sequence that holds the task."""

    @property
    @abstractmethod
    def answers(self) -> int:
        """Number of answers, which are equally likely: a guess is right in `1 / answers` of all questions."""

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
        check_range("batch", batch, 1, MOST)
        self.check_length(length)
        return self._draw(batch, length, generator)

    @abstractmethod
    def _draw(self, batch: int, length: int, generator: torch.Generator) -> SyntheticBatch: ...


def check_sizes(task: object, *names: str, least: int = 1) -> None:
    """Raise `ValueError` unless these fields lie between `least` and `MOST`."""
    for name in names:
        check_range(name, getattr(task, name), least, MOST)


def distinct(batch: int, count: int, among: int, generator: torch.Generator) -> Int[Tensor, "batch count"]:
    """For each sequence different numbers from 0 to `among - 1`, in random order."""
    return torch.rand(batch, among, generator=generator).argsort(-1)[:, :count]


def labels_at(
    tokens: Int[Tensor, "batch length"], asked: Int[Tensor, "batch asked"], answers: Int[Tensor, "batch asked"]
) -> Int[Tensor, "batch length"]:
    """The answers at their positions, and -100 elsewhere."""
    return torch.full_like(tokens, NOT_ASKED).scatter_(1, asked, answers)
