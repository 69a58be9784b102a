"""How callers learn how far a long call is: the types of its callbacks, which carry numbers and names, never text.

This file stands alone because `data`, `training`, `evaluation`, `report` and `experiments` all need it. The module
`rfa.cli.console` turns what the callbacks get into words and bars.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

Progress = Callable[[int, int], None]  # how much is done, of how much: bytes, tokens, files
TrainingProgress = Callable[[int, int, dict[str, float]], None]  # step, steps in all, the latest metrics


class Stage(NamedTuple):
    """A part of a call that does several things one after the other.

    Args:
        name: of the part: "text" while text is read, "training", a protocol, a probe, the title of a benchmark.
        run: of which run of a recipe; empty where it belongs to all of them.
        metrics: in "training" the latest metrics, as `TrainingProgress` gets them.
    """

    name: str
    run: str = ""
    metrics: Mapping[str, float] | None = None


StageProgress = Callable[[Stage, int, int], None]  # the part, how much of it is done, of how much
