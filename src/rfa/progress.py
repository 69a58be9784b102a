"""The types of progress callbacks. They carry numbers and names, and a console makes words of them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

Progress = Callable[[int, int], None]  # the amount done and the total: bytes, tokens or files
TrainingProgress = Callable[[int, int, dict[str, float]], None]  # step, total number of steps, latest metrics


class Stage(NamedTuple):
    """A part of a call that does several things one after the other.

    Args:
        name: of the part: "text" while text is read, "training", a protocol of evaluation.
        run: name of the recipe's run that the part belongs to; empty if it belongs to all runs.
        metrics: the latest metrics during "training", as `TrainingProgress` gets them.
    """

    name: str
    run: str = ""
    metrics: Mapping[str, float] | None = None


StageProgress = Callable[[Stage, int, int], None]  # the part, the amount done, the total
