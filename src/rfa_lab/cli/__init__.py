"""The command line: it parses arguments, calls the library and prints.

`app.py` has the entry point and what commands share. `console.py` makes the printed tables and progress bars. Commands
for runs are in `runs.py`, for recipes and result files in `experiments.py`, for forecasts of series in `forecast.py`,
for this machine in `machine.py`.
"""

from rfa.checks import needs

needs("rich", "typer")

from . import runs  # noqa: I001 (the help lists commands in the order of these imports)
from . import experiments
from . import forecast
from . import machine
from .app import main

__all__ = ["experiments", "forecast", "machine", "main", "runs"]
