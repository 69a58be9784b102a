"""Many tracks at once: each as if it were alone, in lanes of a vector or by itself."""

import copy
from functools import partial

import numpy as np
import pytest

from rfa.estimation import LinearSDE, RobustFilter

from .trackers import DIFFUSION, SENSORS, START, A, readings_of, tracker


@pytest.mark.parametrize("robust", [False, True])
def test_many_tracks_are_each_track_alone(robust):
    z = np.stack([readings_of(40, seed, 0.05) for seed in range(7)])
    mask = np.arange(40) < np.array([40, 40, 31, 22, 40, 13, 5])[:, None]
    mask[0, 7] = False
    starts = np.stack([START[0] + k for k in range(7)]), START[1]
    times = 0.5 * np.arange(40.0)
    found = tracker(robust=robust, start=starts).fit(times, z, mask=mask)
    together, past, ahead = found.filter(), found.smooth(), found.forecast(3)
    own = 0.5 * np.arange(40.0) + np.arange(7)[:, None]
    shifted = tracker(robust=robust, start=starts).filter(own, z, mask=mask)
    np.testing.assert_array_equal(shifted.states, together.states)
    assert shifted.times.shape == (7, 40)
    later, live = found.update([25.0, 26.0], z[:, :2]), copy.copy(found).update(30.0, z[:, 0])
    close = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)  # one track alone rounds in another order
    for k in range(7):
        one = tracker(robust=robust, start=(starts[0][k], START[1]))
        one.fit(times, np.where(mask[k][:, None], z[k], np.nan))
        close(one.filter().states, together.states[k])
        np.testing.assert_array_equal(one.smooth().state_covariances, past.state_covariances[k])
        close(one.forecast(3).variance, ahead.variance[k])
        close(one.update([25.0, 26.0], z[k, :2]).weights, later.weights[k])
        close(one.update(30.0, z[k, 0]).states, live.states[k])
        assert one.log_likelihood == pytest.approx(together.log_likelihood[k], abs=1e-10)


def lanes_of(case, count):
    """A filter and what it is given: tracks of which some differ in something rare."""
    rng = np.random.default_rng(4)
    z, times = rng.normal(size=(count, 40, 5)).cumsum(1), np.cumsum(rng.exponential(0.7, 40))
    options, info = {"start": START, "start_at": "reading"}, {}
    z[0, 10] += 60.0  # an outlier, and a jump: challengers
    z[-1, 20:] += 90.0
    z[count // 2, 5:9, 0] = np.nan
    z[0, 30:] = np.nan
    if case == "own times":
        times = times + np.cumsum(rng.exponential(0.1, (count, 40)), axis=1)
    if case == "huge":
        z[1 % count, 12, 1] = -1e150
    if case == "diffuse":
        options = {}
    if case == "components":
        options["weights"] = "component"
    if case == "control":
        options["control_matrix"] = np.eye(4)[:, [1, 3]]
        info["control"] = rng.normal(size=(count, 40, 2))
    if case == "sensor":
        info["sensor"] = np.where(np.arange(40) % 3 == 0, "gps", "radar")
        z = np.where((info["sensor"] == "gps")[:, None] & (np.arange(3) == 2), np.nan, z[..., :3])
    return options, times, z, info


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("count", [1, 7, 9])
@pytest.mark.parametrize("case", ["plain", "own times", "diffuse", "components", "control", "sensor", "huge"])
def test_side_by_side_as_one_by_one(case, count, robust):
    """Many tracks go through `filter` side by side, through `update` one by one."""
    options, times, z, info = lanes_of(case, count)
    noises = {"gps": np.diag([1.0, 2.0]), "radar": SENSORS[1]["radar"]}
    model = LinearSDE(A, DIFFUSION, SENSORS[0], noises if case == "components" else SENSORS[1])
    many = RobustFilter(model, robust=robust, **options).filter(times, z, **info).found
    for track in range(count):
        live = RobustFilter(model, robust=robust, **options)
        own, control = times if times.ndim == 1 else times[track], info.get("control")
        if case == "diffuse":  # the times of all readings give the units
            live.fit(own[:10], z[track, :10])
        for k in range(10 * (case == "diffuse"), 40):
            sensor, push = (
                info["sensor"][k] if case == "sensor" else None,
                None if control is None else control[track, k],
            )
            row = z[track, k, :2] if sensor == "gps" else z[track, k]
            one = live.update(own[k], row, sensor, control=push).found
            for name in ("mean", "covariance", "weight", "spread", "predicted", "variance", "log_density"):
                ours, other = (np.atleast_1d(getattr(x, name)) for x in (one, type(one)(*(y[track, k] for y in many))))
                np.testing.assert_allclose(
                    other[: len(ours)], ours, rtol=1e-9, atol=1e-9, err_msg=f"{name} {track} {k}"
                )


def test_a_fault_of_one_track_is_said():
    times = np.tile(0.5 * np.arange(5.0), (7, 1))
    times[4, 3:] = [1.7, 2.0]
    with pytest.raises(ValueError, match=r"times: got 1.7 in row 3, expected gaps of whole steps"):
        tracker(robust=True).filter(times, np.ones((7, 5, 2)))
    wrong = np.ones((7, 5, 2))
    wrong[5, 2, 1] = np.inf
    with pytest.raises(ValueError, match=r"readings: got an infinite value at 1.0 in row 2"):
        tracker().filter(times[0], wrong)
    grows = RobustFilter(LinearSDE([[9.0]], [[1.0]], [[1.0]], [[1.0]]), start=([0.0], [[1.0]]), start_at="reading")
    times = np.tile([0.0, 1.0], (7, 1))
    times[2, 1] = 100.0
    with pytest.raises(ValueError, match=r"times: got 100.0 in row 1, expected a shorter gap, or smaller numbers"):
        grows.filter(times, np.ones((7, 2, 1)))
