"""The command line: parses and calls.

`app.py` holds what commands share and the entry point, `runs.py` the commands around runs, `machine.py` those about
this machine.
"""

from . import runs  # noqa: I001 (commands are listed in the order in which they join)
from . import machine
from .app import main

__all__ = ["machine", "main", "runs"]
