"""Messages of transformers, silent for a while."""

import pytest
from transformers.utils import logging

from rfa.models.saved_files import quiet_transformers
from rfa_lab.training import RunFolder


@pytest.fixture(params=[(logging.INFO, True)], ids=["loud"])
def settings(request):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    apply(*request.param)
    yield request.param
    apply(*before)


def apply(verbosity, bars):
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar() if bars else logging.disable_progress_bar()


def current():
    return logging.get_verbosity(), logging.is_progress_bar_enabled()


def test_quiet_inside_and_as_before_afterwards(settings):
    with quiet_transformers():
        assert current() == (logging.ERROR, False)
    assert current() == settings
    with pytest.raises(KeyError), quiet_transformers():
        raise KeyError
    assert current() == settings


def test_loading_a_model_leaves_the_settings(settings, finished):
    RunFolder(finished).load_model()
    assert current() == settings
