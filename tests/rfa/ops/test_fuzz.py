"""The fuzz command: a few of its cases hold, a broken kernel does not, and its oracle is the tests' one."""

import numpy as np
import pytest
import torch
from cover import ALL
from scripts import script

from . import oracle


@pytest.fixture(scope="module")
def fuzz():
    return script("benchmarks/fuzz.py")


def test_random_cases_hold(fuzz, capsys):
    """Of shapes, parameters and options."""
    cases = 300 if ALL else 40
    assert fuzz.main(["--cases", str(cases), "--triton-cases", "0"]) == 0
    assert f"{cases} cases, 0 faults" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [11983, 30916, 31821, 106700])
def test_found_and_mended(fuzz, seed):
    """Times far from their origin; long lags; a tiny measurement noise; a variance of 1e-38 in lag tables."""
    assert fuzz.faults(fuzz.draw(seed), ("cpu",)) == []


def test_its_oracle_is_that_of_the_tests(fuzz):
    """Two computations in float64 of their own. Noises of zero, of which each makes something else, are left out."""
    compared = 0
    for seed in range(60):
        case = fuzz.draw(seed)
        given = {**case.inputs, **case.options}
        noises = [given[n] for n in ("process_noise", "key_noise", "noise_floor")]
        if given["key"].shape[2] > 12 or float(torch.stack(noises).min()) < 1e-6:
            continue
        given = {
            n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()
        }
        output, log_precision, _ = fuzz.Oracle()(given)
        expected, expected_log = oracle.filter_attention(**given)
        # sums in another order; times far from their origin lose some digits of phases
        np.testing.assert_allclose(output.numpy(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max(initial=1e-9))
        np.testing.assert_allclose(log_precision.numpy(), expected_log, rtol=1e-6, atol=1e-6)
        compared += 1
    assert compared > 5
