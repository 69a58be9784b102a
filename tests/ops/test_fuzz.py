"""The fuzz command: a few of its cases hold, a broken kernel does not, and its oracle is the tests' one."""

import numpy as np
import pytest
import torch
from cover import slow
from scripts import script

from rfa.ops import filter_attention

from . import oracle


@pytest.fixture(scope="module")
def fuzz():
    return script("benchmarks/fuzz.py")


def test_thirty_cases_hold(fuzz, capsys):
    assert fuzz.main(["--cases", "30", "--triton-cases", "0"]) == 0
    assert "30 cases, 0 faults" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [11983, 30916, 31821, 106700])
def test_found_and_mended(fuzz, seed):
    """Times far from their origin; long lags; a tiny measurement noise; a variance of 1e-38 in lag tables."""
    assert fuzz.faults(fuzz.draw(seed), ("cpu",)) == []


@slow
def test_a_fault_is_told_and_replayed(fuzz, capsys, monkeypatch):
    """An estimate that is off by a thousandth, ten thousand roundings of float32."""

    def wrong(*args, backend, **kwargs):
        output, log_precision = filter_attention.robust_filter_attention(*args, backend=backend, **kwargs)
        return output * (1.001 if backend == "cpu" else 1.0), log_precision

    monkeypatch.setattr(fuzz, "robust_filter_attention", wrong)
    assert fuzz.main(["--cases", "10", "--triton-cases", "0"]) == 1
    told = capsys.readouterr().out
    seed = told.rsplit("--only ", 1)[1].split()[0]
    assert fuzz.main(["--only", seed]) == 1
    assert f"--only {seed}: cpu estimate" in capsys.readouterr().out


def off_by(share, orig=filter_attention.robust_filter_attention):
    """The operator, whose estimate is off by a share on every backend."""

    def wrong(*args, **kwargs):
        output, log_precision = orig(*args, **kwargs)
        return output * (1 + share), log_precision

    return wrong


@slow
def test_a_mistake_of_the_reference_excuses_nobody(fuzz, monkeypatch):
    """Off by 0.9 % together: found but where half precision rounds as much, or where nothing is computed."""
    monkeypatch.setattr(fuzz, "robust_filter_attention", off_by(0.009))
    found = {seed: fuzz.faults(fuzz.draw(seed), ("cpu",)) for seed in range(700_000, 700_060)}
    assert sum(map(bool, found.values())) > 30
    for backend in ("reference", "cpu"):
        assert any(line.startswith(f"{backend} estimate: ") for lines in found.values() for line in lines)


def scaled_gradient(name, share, backends):
    """The operator, of which the gradient of one input is off by a share on some backends."""

    def wrong(*args, backend, **kwargs):
        given = kwargs[name]
        if backend in backends:
            kwargs[name] = given.detach() + (1 + share) * (given - given.detach())
        return filter_attention.robust_filter_attention(*args, backend=backend, **kwargs)

    return wrong


@pytest.mark.parametrize("name", ["key_noise", "query"])
def test_what_the_reference_is_excused(fuzz, monkeypatch, name):
    """0.9 % of a gradient of parameters; the kernel may not have the same."""
    case = fuzz.draw(58)  # one key and float32: a gradient of its score has all digits
    monkeypatch.setattr(fuzz, "robust_filter_attention", scaled_gradient(name, 0.009, ("reference",)))
    told = fuzz.faults(case, ("cpu",))
    assert any(line.startswith(f"reference {name}: ") for line in told) == (name == "query")
    assert not any(line.startswith("cpu ") for line in told)
    monkeypatch.setattr(fuzz, "robust_filter_attention", scaled_gradient(name, 0.009, ("reference", "cpu")))
    assert any(line.startswith(f"cpu {name}: ") for line in fuzz.faults(case, ("cpu",)))


@slow
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_poison_that_comes_out_as_a_number(fuzz, monkeypatch, backend):
    """In the estimate, and in the log precision but of a poisoned value, which it does not depend on."""
    poisoned = [case for case in map(fuzz.draw, range(700_000, 700_100)) if bool(fuzz.poisoned(case).any())]
    assert {case.poison[0] for case in poisoned} == {"query", "key", "value"}

    def healed(*args, **kwargs):
        output, log_precision = filter_attention.robust_filter_attention(*args, **kwargs)
        if kwargs["backend"] == backend:
            output, log_precision = (x.nan_to_num(7.0, neginf=-torch.inf) for x in (output, log_precision))
        return output, log_precision

    for case in poisoned:
        monkeypatch.setattr(fuzz, "robust_filter_attention", filter_attention.robust_filter_attention)
        assert fuzz.faults(case, ("cpu",)) == []
        monkeypatch.setattr(fuzz, "robust_filter_attention", healed)
        names = ["estimate", "log_precision"][: 1 if case.poison[0] == "value" else 2]
        rows = int(fuzz.poisoned(case).sum())
        told = [f"{backend} {name}: {rows} of {rows} rows that see poison hold numbers" for name in names]
        assert fuzz.faults(case, ("cpu",)) == told


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
