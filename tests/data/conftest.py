"""Data of record, where it is there."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def _shared(name):
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    return folder


@pytest.fixture(scope="session")
def novels():
    return _shared("novels")


@pytest.fixture(scope="session")
def gpt2_folder():
    return _shared("gpt2-bpe")
