"""The fuzz command: a few of its cases hold, and those that once did not."""

import pytest
from cover import ALL
from scripts import script


@pytest.fixture(scope="module")
def fuzz():
    return script("benchmarks/fuzz.py")


def test_random_cases_hold(fuzz, capsys):
    """Of shapes, parameters and options."""
    cases = 300 if ALL else 120
    assert fuzz.main(["--cases", str(cases), "--triton-cases", "0", "--certified-cases", "0"]) == 0
    assert f"{cases} cases, 0 faults" in capsys.readouterr().out


def test_certified_windows_hold(fuzz, capsys):
    """Of any times, segments and masks, around the edges of tiles."""
    cases = 2000 if ALL else 40
    assert fuzz.main(["--cases", "0", "--triton-cases", "0", "--certified-cases", str(cases)]) == 0
    assert f"{cases:,} cases, 0 faults" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [11983, 30916, 31821, 106700])
def test_found_and_mended(fuzz, seed):
    """Times far from their origin; long lags; a tiny measurement noise; a variance of 1e-38 in lag tables."""
    assert fuzz.faults(fuzz.draw(seed), ("cpu",)) == []
