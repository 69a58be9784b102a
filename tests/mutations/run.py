"""Apply each mutation to a copy of the sources and see which test finds it.

    python tests/mutations/run.py                       # the tests of this checkout, on its sources
    python tests/mutations/run.py --tests ../old/tests  # another suite, on the same sources
    python tests/mutations/run.py --only decode.h       # those of one file

A mutation is first met by the tests that the list names for it. What they miss meets the folder of these tests. The
table says which test found what; the exit status is 1 where a mutation survived. RFA_TESTS=all counts as in
`make test-all`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
PASSED = 0


def found(tests: Path, sources: Path, selection: list[str]) -> str | None:
    """The first test that fails with these sources, `selection` below `tests`; None where all pass."""
    environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in selection)],
        cwd=tests.parent, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode == PASSED:
        return None
    if failed := re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE):
        return failed[1]
    raise SystemExit(f"pytest {selection}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def judge(mutation: Mutation, tests: Path, sources: Path) -> str | None:
    """The test that finds a mutation. The sources are afterwards as they were."""
    file = sources / mutation.file
    text = file.read_text("utf-8")
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file}: got {text.count(mutation.old)} times {mutation.old!r}, expected once")
    file.write_text(text.replace(mutation.old, mutation.new), "utf-8")
    try:
        named = mutation.tests.split()
        return found(tests, sources, named) or found(
            tests, sources, sorted({"/".join(name.split("/")[:2]) for name in named})
        )
    finally:
        file.write_text(text, "utf-8")


def main() -> int:
    """Print a table in Markdown, line by line as the mutations are judged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the folder of the tests")
    parser.add_argument("--only", default="", help="mutations of files with this in their name")
    parser.add_argument("--start", type=int, default=1, help="the number of the first")
    given = parser.parse_args()
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="rfa-mutations-") as folder:
        sources = Path(
            shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        )
        chosen = [mutation for mutation in MUTATIONS if given.only in mutation.file]
        print("| | file | what breaks | found by | seconds |\n| ---: | --- | --- | --- | ---: |")
        for number, mutation in enumerate(chosen[given.start - 1 :], given.start):
            start = time.monotonic()
            test = judge(mutation, given.tests.resolve(), sources)
            survivors += test is None
            shown = f"`{test}`" if test else "**nothing**"
            spent = time.monotonic() - start
            print(f"| {number} | `{mutation.file}` | {mutation.breaks} | {shown} | {spent:.0f} |", flush=True)
    tried = len(chosen) - given.start + 1
    print(f"\n{tried - survivors} of {tried} mutations found.")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
