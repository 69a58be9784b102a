import shutil

import pytest

from rfa_lab.training import RunFolder, Stopped, train
from training.runs import at_step, ctrl_c, tiny_spec, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory):
    """A finished run of `m2-sc-rfa`, for reading."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_spec(corpus), out)
    return out


@pytest.fixture(scope="session")
def _stopped(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stopped):
        train(tiny_spec(corpus), out, progress=at_step(5, ctrl_c))
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run."""
    return RunFolder(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def stopped(_stopped, tmp_path):
    """A copy of a run of `m2-sc-rfa` that Ctrl-C stopped at step 5 of 8, with checkpoints of steps 3 and 5."""
    return RunFolder(shutil.copytree(_stopped, tmp_path / "run"))
