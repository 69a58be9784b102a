"""The Gaussian estimate with the Riccati prior, that is, the Kalman filter: all that is known, in linear time."""

from collections.abc import Iterable

import torch

from .information import Information
from .observations import Grid, Steps


def kalman_information(grid: Grid, steps: Steps, start: Information, smooth: bool) -> Information:
    """What the past and the present, and with `smooth` the future, say of every moment: `(b, G, ...)`.

    Where series differ in their measurements only, the precision is found once for all: its batch is 1.

    Args:
        start: what is known of the first moment.
    """
    steps = steps.first(grid.models)
    seen = [Information(*parts) for parts in zip(*(part.unbind(1) for part in grid.seen), strict=True)]
    known, past = start, []
    for k, here in enumerate(seen):
        known = (steps.forward(k - 1, known) if k else known) + here
        past.append(known)
    if not smooth:
        return _stacked(past)
    known, future = Information(*(torch.zeros_like(part) for part in seen[-1])), []
    for k in reversed(range(len(seen))):
        known = steps.backward(k, known + seen[k + 1]) if k + 1 < len(seen) else known
        future.append(known)
    return _stacked(past) + _stacked(reversed(future))


def _stacked(moments: Iterable[Information]) -> Information:
    return Information(*(torch.stack(parts, dim=1) for parts in zip(*moments, strict=True)))
