"""Training of small networks in one go, on batches that are drawn anew for each step; and of time-series models so."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rfa.checks import check_range, require
from rfa.files import write_whole
from rfa.progress import Progress
from rfa_lab.data.simulated_series import SeriesBatch

from .callbacks import Diverged
from .trainer import make_optimizer, one_cycle

_MOST = 1_000_000
_CLIP = 1.0  # of the norm of all gradients
_SAVED = 200  # steps between checkpoints, a multiple of the batches that a simulation draws at once


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
    model: nn.Module,
    draw: Draw,
    training: SeriesTraining,
    progress: Progress | None = None,
    checkpoint: Path | None = None,
) -> list[float]:
    """Train in place by `series_loss`, as `train_steps` does; the loss of each step.

    `draw` gives a batch of so many series; `model(times, values)` gives a `TimeSeriesOutput` of all rows. Raises
    `Diverged` for a loss that is not finite.
    """
    return train_steps(
        model,
        lambda generator: series_loss(model, draw(training.batch_size, generator)),
        steps=training.steps,
        learning_rate=training.learning_rate,
        seed=training.seed,
        after=None if progress is None else lambda step: progress(step, training.steps),
        checkpoint=checkpoint,
    )


def series_loss(model: Callable[..., Any], batch: SeriesBatch) -> Tensor:
    """The mean of two means of `-log p(target)`: on rows with a reading, and on rows without, where there are targets.

    So filtering and forecasting count alike, however many rows each has. Both come from one pass of the model. Raises
    `ValueError` for a batch without any target.
    """
    asked = ~batch.targets.isnan()
    require(bool(asked.any()), "targets", "none that is known", "at least one")
    distribution = model(batch.times, batch.values).unchecked()
    loss = -distribution.log_prob(torch.where(asked, batch.targets, 0.0).to(distribution.mean))
    read = ~batch.values.isnan().all(-1, keepdim=True)
    parts = [loss[rows].mean() for rows in (asked & read, asked & ~read) if bool(rows.any())]
    return torch.stack(parts).mean()


def train_steps(
    model: nn.Module,
    draw_loss: Callable[[torch.Generator], Tensor],
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    one_group: bool = False,
    after: Callable[[int], None] | None = None,
    checkpoint: Path | None = None,
) -> list[float]:
    """Train in place; the loss of each step. The model is in `eval` mode afterwards.

    Adam without weight decay, a one-cycle schedule, gradients clipped at a norm of 1. The parameters of the SDE have
    half the rate and no momentum, as in the paper's training (appendix F), unless there is `one_group`. `draw_loss`
    draws a batch and gives its loss. `after` is called with the steps done; it may use the model, in any mode. With a
    checkpoint, a file of this training alone, it goes on from the last 200 steps. Raises `Diverged` for a loss that is
    not finite, or such weights after the last step.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model, learning_rate, one_group)  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: one_cycle(step, steps))
    losses: list[float] = []
    if checkpoint is not None and checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        for part in (model, optimizer, schedule):
            part.load_state_dict(saved[type(part).__name__])
        generator.set_state(saved["generator"])
        losses = saved["losses"]
    for step in range(len(losses) + 1, steps + 1):
        model.train()
        loss = draw_loss(generator)
        losses.append(loss.item())
        if not loss.isfinite():
            raise Diverged(f"training: got a loss of {losses[-1]} in step {step}, expected a finite number")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        schedule.step()
        if after is not None:
            after(step)
        if checkpoint is not None and (step % _SAVED == 0 or step == steps):
            parts = (model, optimizer, schedule)
            state: dict[str, Any] = {type(part).__name__: part.state_dict() for part in parts}
            state |= {"generator": generator.get_state(), "losses": losses}
            write_whole(checkpoint, partial(torch.save, state))
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        raise Diverged(f"training: got weights that are not finite after step {steps}, expected finite numbers")
    model.eval()
    return losses
