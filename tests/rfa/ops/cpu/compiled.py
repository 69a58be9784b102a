"""Processes of their own: with a cache of their own, and without the test run's shape checks, as users have them."""

import shutil
import subprocess
import sys

from scripts import with_tests

from rfa.ops.cpu.build import compiled_library


def give_library(cache):
    """This session's compiled kernels in another cache folder, for compiling takes 20 seconds. Returns the copy."""
    library = compiled_library()
    folder = cache / "cpu"
    folder.mkdir(parents=True)
    for path in (library, library.with_name(f"{library.name}.sha256")):
        shutil.copy(path, folder)
    return folder / library.name


def environment(cache, **variables):
    return with_tests(RFA_CACHE=str(cache), OMP_NUM_THREADS="1", **{n: str(x) for n, x in variables.items()})


def python(program, cache, **variables):
    """A finished process; `ops.problems` can be imported in it."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment(cache, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
