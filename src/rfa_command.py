"""Entry point of the command `rfa`. Ctrl-C ends it with one line, also during the import of PyTorch.

The module stands outside the package because `import rfa` imports PyTorch and transformers. A KeyboardInterrupt during
those imports prints a traceback, or a library catches it.
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
