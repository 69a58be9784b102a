"""The loop that trains a small network in one go: series and synthetic tasks share it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .callbacks import Diverged
from .trainer import make_optimizer, one_cycle

_CLIP = 1.0  # of the norm of all gradients


def train_steps(
    model: nn.Module,
    draw_loss: Callable[[torch.Generator], Tensor],
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    one_group: bool = False,
    after: Callable[[int], None] | None = None,
) -> list[float]:
    """Train in place. The model is in `eval` mode afterwards.

    Adam without weight decay, a one-cycle schedule, gradients clipped at a norm of 1. The parameters of the SDE have
    half the rate and no momentum, as in the paper's training (appendix F).

    Args:
        model: what is trained; it has `sde_parameters`.
        draw_loss: draws a batch and gives its loss.
        steps: of the optimiser.
        learning_rate: the peak of the schedule.
        seed: of the generator that `draw_loss` gets.
        one_group: treat the parameters of the SDE as all others, as the paper's released code does.
        after: called after each step with the steps done. It may use the model, in any mode.

    Returns:
        The loss of each step.

    Raises:
        Diverged: for a loss that is not finite, or such weights after the last step.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model, learning_rate, one_group)  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: one_cycle(step, steps))
    losses = []
    for step in range(1, steps + 1):
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
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        raise Diverged(f"training: got weights that are not finite after step {steps}, expected finite numbers")
    model.eval()
    return losses
