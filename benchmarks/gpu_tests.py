"""A plugin of pytest that keeps the outcome of each test, so that a stopped run goes on: `pytest -p gpu_tests`.

`GPU_TESTS` names the file, of JSON lines. Tests that have passed or were skipped are not run again.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_LONGEST = 4000  # characters of a failure's message


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(Path(os.environ["GPU_TESTS"]), hasattr(config, "workerinput")))


class Outcomes:
    """What the tests came to, now and before.

    Args:
        path: of the file.
        worker: this process is one of several of pytest-xdist, whose reports the first one gets too.
    """

    def __init__(self, path: Path, worker: bool):
        self._path, self._worker = path, worker
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        found = [json.loads(line) for line in lines]
        newest = {each["test"]: each["outcome"] for each in found}
        self._over = {name for name, outcome in newest.items() if outcome != "failed"}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is over."""
        left = [item for item in items if item.nodeid not in self._over]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._over])
        items[:] = left

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome."""
        if self._worker or (report.when != "call" and report.outcome == "passed"):
            return
        line: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.outcome != "passed":
            line["message"] = str(report.longrepr)[-_LONGEST:]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """That no test is left is no fault."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._over:
            session.exitstatus = pytest.ExitCode.OK
