"""Training of time-series models on batches that are drawn anew for each step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rfa.checks import check_range, require
from rfa.progress import Progress
from rfa_lab.data.simulated_series import SeriesBatch

from .steps import train_steps

_MOST = 1_000_000


Draw = Callable[[int, torch.Generator], SeriesBatch]


@dataclass(frozen=True, kw_only=True)
class SeriesTraining:
    """How a model is trained on series.

    Args:
        steps: of the optimiser.
        batch_size: series of a step.
        learning_rate: the peak of the one-cycle schedule.
        seed: of the weights and of the series.

    Raises:
        ValueError: for a number out of range.
    """

    steps: int = 700
    batch_size: int = 32
    learning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("steps", self.steps, 1, _MOST)
        check_range("batch_size", self.batch_size, 1, _MOST)
        require(0 < self.learning_rate < 1, "learning_rate", self.learning_rate, "a number between 0 and 1")
        check_range("seed", self.seed, 0, 2**31)


def train_on_series(
    model: nn.Module, draw: Draw, training: SeriesTraining, progress: Progress | None = None
) -> list[float]:
    """Train in place by the mean of two losses: on rows with a reading, and on rows without.

    The optimiser is that of `train_steps`.

    Args:
        model: called as `model(times, values)`; gives a `TimeSeriesOutput` of all rows.
        draw: gives a batch of so many series.
        training: steps, sizes and seed of the series.
        progress: called with the steps done and their number.

    Returns:
        The loss of each step.

    Raises:
        Diverged: for a loss that is not finite.
    """
    return train_steps(
        model,
        lambda generator: series_loss(model, draw(training.batch_size, generator)),
        steps=training.steps,
        learning_rate=training.learning_rate,
        seed=training.seed,
        after=None if progress is None else lambda step: progress(step, training.steps),
    )


def series_loss(model: Callable[..., Any], batch: SeriesBatch) -> Tensor:
    """The mean of two means of `-log p(target)`: on rows with a reading, and on rows without, where there are targets.

    So filtering and forecasting count alike, however many rows each has. Both come from one pass of the model.

    Raises:
        ValueError: for a batch without any target.
    """
    asked = ~batch.targets.isnan()
    require(bool(asked.any()), "targets", "none that is known", "at least one")
    distribution = model(batch.times, batch.values).unchecked()
    loss = -distribution.log_prob(torch.where(asked, batch.targets, 0.0).to(distribution.mean))
    read = ~batch.values.isnan().all(-1, keepdim=True)
    parts = [loss[rows].mean() for rows in (asked & read, asked & ~read) if bool(rows.any())]
    return torch.stack(parts).mean()
