"""The command `rfa`, also as `python -m rfa`. Ctrl-C ends it with one line, also during the import of PyTorch.

The libraries are imported in a function: a KeyboardInterrupt during that import would print a traceback, or a library
would catch it.
"""

import importlib
import os
import signal
import sys

from rfa.checks import MissingExtra


def main() -> None:
    """Import the command line, which Ctrl-C may interrupt, and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a background job may have been started with SIGINT ignored
        signal.signal(signal.SIGINT, _stop)
    try:
        from .cli import main as command

        if _runs_a_command(sys.argv[1:]):  # PyTorch and transformers take seconds
            importlib.import_module("rfa.forecasting.output" if sys.argv[1] == "forecast" else "rfa.models")
    except MissingExtra as error:
        sys.exit(_said(f"rfa: {error}\n", 2))

    try:
        signal.signal(signal.SIGINT, before)
        command()
    except KeyboardInterrupt:  # between restoring the handler and the command installing its own
        _stop()


def _runs_a_command(arguments: list[str]) -> bool:
    """Whether these arguments ask for more than help or the completion of a shell."""
    return bool(arguments) and not arguments[0].startswith("-") and "--help" not in arguments


def _said(line: str, status: int) -> int:
    os.write(2, line.encode())
    return status


def _stop(*_: object) -> None:
    os._exit(_said("rfa: stopped\n", 130))  # nothing to clean up yet


if __name__ == "__main__":
    main()
