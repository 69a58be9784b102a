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
    before, arguments = signal.getsignal(signal.SIGINT), sys.argv[1:]
    if before is signal.default_int_handler:  # a background job may have been started with SIGINT ignored
        signal.signal(signal.SIGINT, _stop)
    try:
        from .cli import main as command

        if arguments and not arguments[0].startswith("-") and "--help" not in arguments:  # PyTorch takes seconds
            importlib.import_module("rfa.forecasting.output" if arguments[0] == "forecast" else "rfa.models")
    except MissingExtra as error:
        print(f"rfa: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        signal.signal(signal.SIGINT, before)
        command()
    except KeyboardInterrupt:  # between restoring the handler and the command installing its own
        _stop()


def _stop(*_: object) -> None:
    os.write(2, b"rfa: stopped\n")
    os._exit(130)  # nothing to clean up yet


if __name__ == "__main__":
    main()
