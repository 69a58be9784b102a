"""The lab's commands, added to those of `rfa.cli`: for runs in `runs.py`, for recipes and speed in `experiments.py`."""

from rfa.checks import needs

needs("rich", "typer")

from . import runs  # noqa: I001 (the help lists commands in the order of these imports)
from . import experiments
from rfa.cli import main

__all__ = ["experiments", "main", "runs"]
