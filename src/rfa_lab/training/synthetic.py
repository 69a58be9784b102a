"""Training of language models on synthetic tasks, with a look at a fixed batch on the way."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rfa.checks import check_range
from rfa.models import RFAForCausalLM
from rfa.progress import Progress
from rfa_lab.data.synthetic import NOT_ASKED, SyntheticBatch, SyntheticTask

from .series import SeriesTraining, train_steps

_CHUNK = 32  # sequences scored at once
_TRIES = 100  # batches, until one has a question
_HELD_OUT_SEED = 30_260_000


@dataclass(frozen=True, kw_only=True)
class TaskTraining(SeriesTraining):
    """How a model is trained on a task.

    Args:
        steps, batch_size, learning_rate, seed: as of series.
        length: tokens of each sequence.
        every: steps between looks at the held-out batch; the last step has one too.
        held_out: sequences of that batch, which is the same for all models and seeds.
        one_group: treat the parameters of the SDE as all others, as the paper's released code does.

    Raises:
        ValueError: for a number out of range.
    """

    learning_rate: float = 2e-3
    length: int = 64
    every: int = 50
    held_out: int = 128
    one_group: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("length", self.length, 2, 100_000)
        check_range("every", self.every, 1, 1_000_000)
        check_range("held_out", self.held_out, 1, 100_000)


class TaskScore(NamedTuple):
    """How well a model answers.

    Fields:
        loss: mean of `-log p(answer)`, in nats.
        accuracy: share of the questions whose answer is the likeliest token.
        questions: their number.
    """

    loss: float
    accuracy: float
    questions: int


def train_on_task(
    model: RFAForCausalLM, task: SyntheticTask, training: TaskTraining, progress: Progress | None = None
) -> dict[int, TaskScore]:
    """Train in place on fresh sequences in every step, as `train_steps` does; the score on the held-out batch by steps.

    Raises:
        ValueError: for a length that the task does not fit in.
        Diverged: for a loss that is not finite.
    """
    held_out = task.sample(training.held_out, training.length, torch.Generator().manual_seed(_HELD_OUT_SEED))
    curve: dict[int, TaskScore] = {}

    def after(step: int) -> None:
        if step % training.every == 0 or step == training.steps:
            curve[step] = task_score(model, held_out)
        if progress is not None:
            progress(step, training.steps)

    def draw_loss(generator: torch.Generator) -> Tensor:
        for _ in range(_TRIES):
            batch = task.sample(training.batch_size, training.length, generator)
            if bool((batch.labels != NOT_ASKED).any()):
                return functional.cross_entropy(*_answers(model, batch))
        raise ValueError(f"task: got {_TRIES} batches of {task} without a question, expected one at least")

    train_steps(
        model,
        draw_loss,
        steps=training.steps,
        learning_rate=training.learning_rate,
        seed=training.seed,
        one_group=training.one_group,
        after=after,
    )
    return curve


@torch.no_grad()
def task_score(model: RFAForCausalLM, batch: SyntheticBatch) -> TaskScore:
    """The score of a model, which is in `eval` mode afterwards. Raises `ValueError` for no question at all."""
    model.eval()
    found = [_answers(model, part) for part in _parts(batch)]
    logits, answers = (torch.cat(each) for each in zip(*found, strict=True))
    check_range("questions", len(answers), 1, len(answers))
    right = (logits.argmax(-1) == answers).double().mean().item()
    return TaskScore(functional.cross_entropy(logits, answers).item(), right, len(answers))


def _answers(model: RFAForCausalLM, batch: SyntheticBatch) -> tuple[Tensor, Tensor]:
    """Logits and answers of all questions."""
    asked = batch.labels != NOT_ASKED
    return model(batch.tokens, times=batch.times, use_cache=False).logits[asked], batch.labels[asked]


def _parts(batch: SyntheticBatch) -> Iterator[SyntheticBatch]:
    for start in range(0, len(batch.tokens), _CHUNK):
        rows = slice(start, start + _CHUNK)
        times = None if batch.times is None else batch.times[rows]
        yield SyntheticBatch(batch.tokens[rows], batch.labels[rows], times)
