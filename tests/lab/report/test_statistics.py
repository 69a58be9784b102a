"""Intervals against SciPy, and differences against numbers computed by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from rfa_lab.report.statistics import differences, half_interval, over_seeds, seed_noise

from .records import record, run


def test_the_interval_is_that_of_scipy():
    values = np.random.default_rng(0).normal(size=7)
    low, high = stats.t.interval(0.95, 6, loc=values.mean(), scale=stats.sem(values))
    assert half_interval(values) == pytest.approx((high - low) / 2)
    assert math.isnan(half_interval([1.0]))
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.302653 * 1 / math.sqrt(3), rel=1e-6)


def test_means_over_seeds(tmp_path):
    found = record(tmp_path, run("b1-rope", 0, (2.0, 3.0)), run("b1-rope", 1, (2.2, 3.4)), run("b2-alibi"))
    means, halves = over_seeds(found.values("loss blocks"))
    assert means.loc["b1-rope"].tolist() == pytest.approx([2.1, 3.2])
    assert halves.loc["b1-rope", 16] == pytest.approx(12.7062 * 0.1, rel=1e-4)  # t of one degree, times s / sqrt(2)
    assert math.isnan(halves.loc["b2-alibi", 16])


def test_paired_differences(tmp_path):
    """Both books differ alike, so the bootstrap's interval is the difference; seeds that one lacks do not count."""
    runs = [run("b1-rope", seed, (2.0 + seed, 3.0)) for seed in (0, 1, 2)]
    runs += [run("m2-sc-rfa", seed, (1.9 + seed + 0.01 * seed, 3.0)) for seed in (0, 1)]
    found = differences(record(tmp_path, *runs), "b1-rope", "blocks")["m2-sc-rfa"]
    assert found[16].value == pytest.approx(-0.095, abs=1e-6)
    assert (found[16].low, found[16].high) == pytest.approx((-0.095, -0.095), abs=1e-5)
    assert found[16].half == pytest.approx(12.7062 * 0.005, rel=1e-3)
    assert (found[16].seeds, found[16].verdict) == (2, "")
    assert found[64].verdict == "open"  # it is 0


def test_one_seed_is_compared_with_the_noise_of_seeds(tmp_path):
    """The noise is 1.96 times the spread over seeds of the difference of the two models with three seeds."""
    noise = [0.0, 0.1, 0.2]
    runs = [run("b1-rope", seed, (2.0, 3.0)) for seed in range(3)]
    runs += [run("b2-alibi", seed, (2.0 + noise[seed], 3.0)) for seed in range(3)]
    found = record(tmp_path, *runs, run("x", 0, (1.9, 3.0)), run("y", 0, (1.0, 3.0)))
    assert seed_noise(found.values("loss blocks")[16.0]) == pytest.approx(1.959964 * 0.1, rel=1e-5)
    compared = differences(found, "b1-rope", "blocks")
    assert (compared["x"][16].verdict, compared["y"][16].verdict) == ("within a seed", "")
    few = differences(record(tmp_path, run("b1-rope"), run("x", 0, (1.9, 2.9))), "b1-rope", "blocks")
    assert few["x"][16].verdict == "one seed"


def test_books_are_drawn_the_same_way_each_time(tmp_path):
    """With two books of other differences the interval is between them."""
    first, second = run("b1-rope"), run("m2-sc-rfa")
    row = (second["measure"] == "loss blocks of A.txt") & (second["x"] == 16)
    second.loc[row, "value"] -= 10 * 0.4
    found = differences(record(tmp_path, first, second), "b1-rope", "blocks")["m2-sc-rfa"][16]
    assert (found.low, found.high) == pytest.approx((-0.4, 0.0), abs=1e-6)
