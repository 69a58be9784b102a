"""The list of mutations fits the sources: each text that it replaces stands there once."""

from pathlib import Path

from faults import MUTATIONS

TESTS = Path(__file__).parents[1]


def test_none_is_listed_twice():
    assert len({(mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS}) == len(MUTATIONS) >= 60


def test_they_fit():
    sources = {name: (TESTS.parent / "src" / name).read_text("utf-8") for name in {x.file for x in MUTATIONS}}
    assert [x for x in MUTATIONS if sources[x.file].count(x.old) != 1 or x.new == x.old] == []
    named = {name.split("::")[0] for mutation in MUTATIONS for name in mutation.tests.split()}
    assert [name for name in sorted(named) if not (TESTS / name).is_file()] == []
