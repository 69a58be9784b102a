"""The list of mutations fits the sources: each text that it replaces stands there once."""

from pathlib import Path

import pytest
from faults import MUTATIONS

SOURCES = Path(__file__).parents[2] / "src"


def test_none_is_listed_twice():
    assert len({(mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS}) == len(MUTATIONS) >= 60


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.file)
def test_it_fits(mutation):
    assert (SOURCES / mutation.file).read_text("utf-8").count(mutation.old) == 1
    assert mutation.new != mutation.old
    tests = Path(__file__).parents[1]
    assert all((tests / name.split("::")[0]).is_file() for name in mutation.tests.split())
