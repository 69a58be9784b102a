"""Angles: told by their jumps, and filtered without them."""

import numpy as np
import pytest

from rfa.forecasting.scale import angles_from, continuous_angles, jumps_of_angle

RANDOM = np.random.default_rng(0)
TURNS = {
    "ramp": 178 + 0.1 * np.arange(40),
    "wind around north": RANDOM.normal(scale=20.0, size=200),
    "walk": RANDOM.normal(scale=15.0, size=200).cumsum(),
    "tide, 29 degrees an hour": 28.98 * np.arange(200),
    "rotor": 130.0 * np.arange(200) + RANDOM.normal(size=200),
}


@pytest.mark.parametrize("least", [0, -180])
@pytest.mark.parametrize("angles", TURNS.values(), ids=TURNS)
def test_the_turn_of_each_angle_is_found(angles, least):
    """Whole turns apart at most, beside gaps and single wrong readings of any direction too."""
    given = angles_from(angles, least, 360.0)
    assert ((given >= least) & (given <= least + 360)).all()
    given[5:8] = np.nan
    wrong = np.arange(20, len(angles), 20)
    given[wrong] = angles_from(angles[wrong] + 45 * np.arange(1, 1 + len(wrong)), least, 360.0)
    usual = ~np.isnan(given)
    usual[wrong] = False
    offset = (continuous_angles(given, 360.0) - angles)[usual]
    np.testing.assert_allclose(offset, offset[0], atol=1e-8)
    assert abs(np.rint(offset[0] / 360) * 360 - offset[0]) < 1e-8


@pytest.mark.parametrize("name", ["ramp", "wind around north", "walk"])
@pytest.mark.parametrize("least", [0, -180])
def test_angles_are_told_by_jumps_of_nearly_a_turn(name, least):
    given = angles_from(TURNS[name], least, 360.0)
    assert (jumps_of_angle(given) > 0) == (np.abs(np.diff(given)) > 270).any()


@pytest.mark.parametrize(
    "values",
    [
        [],
        [5.0],
        np.r_[RANDOM.normal(10, 1, 50), 350.0, RANDOM.normal(10, 1, 50)],  # a wrong reading
        np.tile([0.0, 355.0, 0.0], 20),  # on and off
        RANDOM.uniform(0, 900, 100),
        TURNS["ramp"] - 100,
    ],
)
def test_other_values_are_no_angles(values):
    assert jumps_of_angle(np.asarray(values)) == 0
