"""`rfa train` when it is stopped: one line, the right status, nothing lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rfa_lab import training


def entry_point():
    """What an installed `rfa` does."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    module, function = re.search(r'^rfa = "([\w.]+):(\w+)"', text, re.MULTILINE).groups()
    return f"import sys; from {module} import {function}; sys.exit({function}())"


def test_ctrl_c_while_libraries_are_imported(tmp_path):
    """Whatever the library that is being imported makes of it."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    sources = Path(training.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{sources}"}
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + entry_point()
    command = [sys.executable, "-c", program, "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rfa: stopped\n")
