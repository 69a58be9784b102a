"""A way to compute without a compiler, for the tests of compiled code."""

import pytest

from rfa.estimation import compiled


@pytest.fixture
def in_torch(monkeypatch):
    """Calls a function where there is no compiler."""

    def call(function, *given, **options):
        with monkeypatch.context() as without:
            without.setattr(compiled, "library", lambda: None)
            return function(*given, **options)

    assert compiled.library() is not None
    return call
