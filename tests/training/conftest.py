import pytest

from rfa.training import train
from training.runs import tiny_spec, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory):
    """A finished run of `m2-sc-rfa`, for reading."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_spec(corpus), out)
    return out
