"""The command line: parses and calls.

`app.py` holds what commands share and the entry point, `runs.py` the commands around runs, `experiments.py` the one
around recipes, `report.py` the one around result files, `machine.py` those about this machine.
"""

from . import runs  # noqa: I001 (commands are listed in the order in which they join)
from . import experiments
from . import report
from . import machine
from .app import main

__all__ = ["experiments", "machine", "main", "report", "runs"]
