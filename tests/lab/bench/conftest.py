"""Short turns, and peak rates that nobody measured."""

import pytest

from rfa_lab.bench.bound import Peaks


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr("rfa_lab.bench.measurement.TURN", 1e-4)
    monkeypatch.setattr("rfa_lab.bench.bound.measured_peaks", lambda *_: Peaks(1e10, 1e9, 1e9, 1e12))
