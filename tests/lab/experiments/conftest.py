import pytest

from rfa_lab import evaluation

from .recipes import stand_in


@pytest.fixture
def out(tmp_path):
    """Where runs and results go; not there yet."""
    return tmp_path / "out"


@pytest.fixture
def evaluated(monkeypatch):
    """The stand-in of the evaluation in its place; the run folders that it was called with."""
    calls = []

    def noted(folder, **options):
        calls.append(folder.name)
        return stand_in(folder, **options)

    monkeypatch.setattr(evaluation, "full_evaluation", noted, raising=False)
    return calls
