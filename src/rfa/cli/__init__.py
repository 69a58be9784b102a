"""The command line: parses and calls.

`app.py` holds what commands share and the entry point, `console.py` what they print: tables and progress. The commands
around runs stand in `runs.py`, those around recipes and result files in `experiments.py`, those about this machine in
`machine.py`.
"""

from . import runs  # noqa: I001 (commands are listed in the order in which they join)
from . import experiments
from . import machine
from .app import main

__all__ = ["experiments", "machine", "main", "runs"]
