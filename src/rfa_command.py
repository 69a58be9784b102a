"""The command `rfa` until its libraries are there: Ctrl-C ends it in one line, whatever is being imported.

It stands outside the package, which imports PyTorch and transformers; an exception in the middle of that would come out
as a traceback, or not at all where a library takes it for its own.
"""

import os
import signal


def main() -> None:
    """Import the command line, which Ctrl-C may interrupt, and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a background job may have been started with SIGINT ignored
        signal.signal(signal.SIGINT, _stop)
    from rfa.cli import main as command

    try:
        signal.signal(signal.SIGINT, before)
        command()
    except KeyboardInterrupt:  # between restoring the handler and the command installing its own
        _stop()


def _stop(*_: object) -> None:
    os.write(2, b"rfa: stopped\n")
    os._exit(130)  # nothing to clean up yet
