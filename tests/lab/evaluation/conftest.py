import pytest
from training.runs import tiny_spec, write_corpus

from rfa_lab.training import train


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated") / "run"
    train(tiny_spec(corpus, max_steps=4), out)
    return out
