"""The command line: it parses arguments, calls the library and prints. `rfa_lab.cli` adds its commands to these."""

from rfa.checks import needs

needs("rich", "typer")

from . import doctor, forecast
from .app import main

__all__ = ["doctor", "forecast", "main"]
