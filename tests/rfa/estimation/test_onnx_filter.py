"""The exported step of a filter, run where there is neither this library nor PyTorch, beside `RobustFilter`."""

import json
import subprocess
import sys

import numpy as np
import pytest

from rfa.checks import MissingExtra
from rfa.estimation import Autoregression, Cycle, Level, LinearSDE, RobustFilter, Season, Trend
from rfa.estimation.components import StructuralModel
from rfa.estimation.parameter_search import parameter_kinds

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

RUN = """
import json
import sys

sys.modules.update(dict.fromkeys(["rfa", "torch", "onnx", "pandas"]))  # an import of one of them raises
import numpy as np
import onnxruntime

file, given, steps, found = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
known = session.get_modelmeta().custom_metadata_map
names, given = [output.name for output in session.get_outputs()], dict(np.load(given))
state, rows = np.array(json.loads(known.get("start", known["state"]))), []
for row in range(len(next(iter(given.values())))):
    if row >= int(steps):  # each from the last reading on
        state = np.array(json.loads(known["state"]))
    inputs = {name: np.asarray(column[row]) for name, column in given.items()}
    rows.append(dict(zip(names, session.run(None, {"state": state, **inputs}))))
    state = rows[-1]["new_state"]
np.savez(found, **{name: np.stack([row[name] for row in rows]) for name in names})
"""
LATER = np.array([0.0, 0.25, 3.0, 100.0, 5000.0])  # gaps after the last reading
VALUES = {"sigma2.level": 0.01, "sigma2.trend": 1e-5, "damping.trend": 0.9, "sigma2.ar": 0.3, "ar.L1": 0.6}
VALUES |= {"sigma2.cycle": 0.2, "frequency.cycle": 0.7, "damping.cycle": 0.95}  # others: 1
CASES = {
    "level": (Level(), 500, ("fill value",)),
    "cycle with known noises": (Level() + Cycle(), 500, ("offset", "noise")),
    "rows of C": (Trend(), 500, ("observation",)),
    "Kalman filter": (Level() + Season(24.0), 500, ("Kalman",)),
    "all": (Trend(damped=True) + Season(24.0) + Cycle() + Autoregression(), 10_000, ("sensor", "exog", "noise")),
}


def readings(count, generator):
    """Irregular times with long gaps; a wave, a jump, outliers, and missing values.

    A diffuse start loses digits, here and there differently: the more, the larger the spread beside the noise is, and
    the nearer the first times are to each other.
    """
    gaps = 0.3 + generator.exponential(0.7, count)
    gaps[generator.random(count) < 0.01] *= 50
    gaps[count // 4] = 2000.0
    times = gaps.cumsum()
    values = 20 + 3 * np.sin(2 * np.pi * times / 24) + generator.normal(size=count)
    wrong = generator.random(count) < 0.04
    wrong[:20] = False
    values[wrong] += generator.choice([-1, 1], wrong.sum()) * 10 ** generator.uniform(1, 2, wrong.sum())
    values[count // 2 :] += 8
    values[generator.random(count) < 0.05] = np.nan
    values[count // 3 : count // 3 + 40] = np.nan
    return times, values


def run(folder, rows, **given):
    """What the file `filter.onnx` of a folder makes of readings, the first ones one after another."""
    np.savez(folder / "given.npz", **given)
    files = [str(folder / name) for name in ("filter.onnx", "given.npz", "found.npz")]
    command = [sys.executable, "-I", "-c", RUN, *files[:2], str(rows), files[2]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(np.load(files[2]))


def assert_same(found, estimate):
    """To 1e-5 of standard errors."""
    deviation, errors = np.sqrt(estimate.variance), np.sqrt(np.stack([*estimate.state_variances.values()], axis=1))
    states = np.stack([*estimate.states.values()], axis=1)
    np.testing.assert_allclose(found["mean"] / deviation, estimate.mean / deviation, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["standard_error"], deviation, rtol=1e-5)
    np.testing.assert_allclose(found["weight"], estimate.weights, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found["outlier"], estimate.outliers)
    np.testing.assert_allclose(found["states"] / errors, states / errors, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["state_errors"], errors, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_steps_and_forecasts_are_those_of_the_filter(name, tmp_path):
    model, count, parts = CASES[name]
    generator, rows = np.random.default_rng(0), count + len(LATER)
    times, values = readings(count, generator)
    if "fill value" in parts:
        values[100:115] = -3.4e38  # for so long that it is believed
    known = {
        "sensor": generator.choice(["a", "b"], rows),
        "exog": generator.normal(size=(rows, 2)),
        "offset": generator.normal(size=rows),
        "noise": generator.random(rows),
        "observation": np.stack([np.ones(rows), generator.normal(size=rows)], axis=1),
    }
    known["noise"][:count][np.isnan(values)] = np.nan  # of a missing reading it may be missing too
    known = {each: known[each] for each in parts if each in known}
    kinds = parameter_kinds(StructuralModel.of(model), ("a", "b") if "sensor" in parts else ("",))
    found = RobustFilter(model, robust="Kalman" not in parts)
    first, later = (
        {each: column[part] for each, column in known.items()} for part in (slice(count), slice(count, rows))
    )
    found.fit(
        times, values, fixed={each: VALUES.get(each, 1e-3 if "season" in each else 1.0) for each in kinds}, **first
    )
    found.export(tmp_path / "filter.onnx")
    gaps = np.concatenate([np.diff(times, prepend=times[0]), LATER])
    given = known | ({"sensor": (known["sensor"] == "b").astype(np.int64)} if "sensor" in parts else {})
    columns = run(tmp_path, count, gap=gaps, value=np.append(values, np.nan * LATER), **given)
    estimate = found.filter()
    assert "Kalman" in parts or estimate.outliers.sum() > 5
    assert_same({each: column[:count] for each, column in columns.items()}, estimate)
    assert_same({each: column[count:] for each, column in columns.items()}, found.forecast(times[-1] + LATER, **later))


ROWS = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0.5], [0, 0.2, 0, 1], [0, 0, 1, 0], [1, 0, 1, 0]])
NOISES = [[1.0, 0.3], [0.3, 2.0]], [[0.5, 0.1, 0], [0.1, 1.0, 0.2], [0, 0.2, 2.0]]
SENSORS = {"gps": ROWS[:2], "radar": ROWS[2:]}
MOVES, SPREAD = np.kron(np.eye(2), [[0.0, 1.0], [0, 0]]), np.diag([0.1, 0.3, 0.1, 0.3])
BY_NAME = SENSORS, dict(zip(SENSORS, NOISES, strict=True))
DIAGONAL = SENSORS, {"gps": np.diag([1.0, 2]), "radar": np.diag([0.5, 1, 2])}
BY = {"control_matrix": np.eye(4)[:, [1, 3]]}
OF_MATRICES = {
    "irregular": ((MOVES, SPREAD, ROWS[:2], NOISES[0]), {}),
    "Kalman": ((MOVES, SPREAD, ROWS[:2], NOISES[0]), {"robust": False}),
    "sensors": ((MOVES - np.eye(4) / 100, SPREAD, *BY_NAME), BY),
    "components": ((MOVES, SPREAD, *DIAGONAL), {"weights": "component"}),
    "discrete": ((np.eye(4) + MOVES / 2, SPREAD, ROWS[:2], NOISES[0], 0.5), BY),
}


@pytest.mark.parametrize("name", OF_MATRICES)
def test_steps_of_matrices_are_those_of_update(name, tmp_path):
    """With outliers, a jump, missing rows and components. The first rows end the diffuse start."""
    (matrices, options), rng, first, count = OF_MATRICES[name], np.random.default_rng(0), 10, 300
    model = (LinearSDE.discrete if name == "discrete" else LinearSDE)(*matrices)
    live = RobustFilter(model, **options)
    gaps = rng.integers(0, 4, count) / 2 if name == "discrete" else rng.exponential(0.7, count)
    gaps[50] = 40.0
    times, shown = gaps.cumsum(), model.observation.numpy()
    z = rng.normal(size=(count, 4)).cumsum(0) @ shown.T + rng.normal(size=(count, len(shown)))
    z[rng.random(z.shape) < 0.04] += 60.0
    z[rng.random(z.shape) < 0.2] = np.nan
    z[30], z[100:115] = np.nan, np.nan
    z[:2] = 0.0
    z[200:] += 200.0 * shown.sum(1)
    control = rng.normal(size=(count, 2)) if "control_matrix" in options else None
    for k in range(first):
        live.update(times[k], z[k], control=None if control is None else control[k])
    live.export(tmp_path / "filter.onnx")
    given = {"steps": (2 * gaps).astype(int)} if name == "discrete" else {"gap": gaps}
    given |= {"reading": z} | ({} if control is None else {"control": control})
    found = run(tmp_path, count - first, **{name: x[first:] for name, x in given.items()})
    later = live.update(times[first:], z[first:], control=None if control is None else control[first:])
    expected = {"mean": later.mean, "standard_error": later.variance**0.5, "states": later.states}
    expected |= {"weight": later.weights, "outlier": later.outliers}
    expected["state_errors"] = np.sqrt(later.state_covariances.diagonal(axis1=1, axis2=2))
    for name, x in expected.items():
        np.testing.assert_allclose(found[name].reshape(x.shape), x, rtol=1e-9, atol=1e-8, err_msg=name)
    assert later.outliers.any() == options.get("robust", True)


def test_a_fast_component_costs_a_slow_one_no_digits(tmp_path):
    """Each has its own number of doublings: a slope that fades within a nanosecond, beside a day."""
    times, values = readings(60, np.random.default_rng(0))
    fixed = {
        "sigma2.irregular": 1.0,
        "sigma2.level": 1e-11,
        "sigma2.trend": 1e-9,
        "damping.trend": 1e-300,
        "season": 1e-12,
    }
    found = RobustFilter(Trend(damped=True) + Season(24e9)).fit(times[:50] * 1e9, values[:50], fixed=fixed)
    found.export(tmp_path / "filter.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "filter.onnx")
    state = np.array(json.loads(session.get_modelmeta().custom_metadata_map["state"]))
    for row in range(50, 60):
        given = {"gap": np.array((times[row] - times[row - 1]) * 1e9), "value": np.array(values[row])}
        mean, states, state = session.run(["mean", "states", "new_state"], {"state": state, **given})
        wanted = found.update(times[row] * 1e9, values[row])
        np.testing.assert_allclose(mean, wanted.mean[0], rtol=1e-9)
        np.testing.assert_allclose(states[2:], [float(x[0]) for x in wanted.states.values()][2:], rtol=1e-9, atol=1e-9)


def test_the_file_says_what_a_user_must_know(tmp_path):
    days = np.datetime64("2024-01-01") + np.arange(40) * np.timedelta64(12, "h")
    level = RobustFilter(Level(), time_unit="hour").fit(days, np.random.default_rng(0).normal(size=40).cumsum())
    level.update(np.datetime64("2024-02-01T06:00"), 1.0)
    level.export(str(tmp_path / "new" / "level.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "new" / "level.onnx")
    known = session.get_modelmeta().custom_metadata_map
    assert known["time_unit"] == "hour"
    assert known["last_time"].startswith("2024-02-01T06:00")
    read = {name: json.loads(known[name]) for name in ("parameters", "states", "sensors", "regressors", "robust")}
    assert read == {
        "parameters": level.parameters,
        "states": ["level"],
        "sensors": [""],
        "regressors": [],
        "robust": True,
    }
    given = {"state": np.array(json.loads(known["state"])), "gap": np.array(18.0), "value": np.array(2.5)}
    mean, *_ = session.run(["mean"], given)
    np.testing.assert_allclose(mean, level.update(np.datetime64("2024-02-02"), 2.5).mean[0], rtol=1e-12)
    missing = session.run(["mean", "weight", "outlier"], {**given, "value": np.array(np.nan)})
    assert np.isfinite(missing[0])
    assert np.isnan(missing[1])
    assert not missing[2]


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"fit: got no series yet, expected fit\(times, values\) first"):
        RobustFilter(Level()).export(tmp_path / "filter.onnx")
    level = RobustFilter(Level()).fit([0.0, 1.0, 3.0], [1.0, 2.0, 1.5])
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"path: got .*filter\.onnx, expected a place that can be written"):
        level.export(tmp_path / "file" / "filter.onnx")
    monkeypatch.setattr("rfa.checks.installed", lambda module: False)
    with pytest.raises(MissingExtra, match=r"onnx is not installed: pip install -e '\.\[onnx\]' in a clone"):
        level.export(tmp_path / "filter.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_start_of_matrices(tmp_path):
    """A file of a filter without readings begins with its start; where nothing is known it is refused."""
    model, start = LinearSDE(MOVES, SPREAD, ROWS[:2], NOISES[0]), (np.ones(4), np.eye(4))
    live = RobustFilter(model, start=start, start_at=0.0)
    live.export(tmp_path / "filter.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "filter.onnx")
    known = {name: json.loads(x) for name, x in session.get_modelmeta().custom_metadata_map.items() if x[0] in "[{"}
    assert known["state"] == known["start"]
    assert known["sensors"] == {"": 2}
    given = {"state": np.array(known["start"]), "gap": np.array(3.0), "reading": np.array([7.0, np.nan])}
    np.testing.assert_allclose(session.run(["states"], given)[0], live.update(3.0, given["reading"]).states, rtol=1e-10)
    unknown = RobustFilter(model)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="export: got 'a state of which nothing is known', expected readings, or a"
        ):
            unknown.export(tmp_path / "filter.onnx")
        unknown.update(0.0, [1.0, 2.0])  # not enough
    with pytest.raises(ValueError, match="export: got '2 tracks'"):
        RobustFilter(model, start=(np.ones((2, 4)), np.eye(4)), start_at=0.0).export(tmp_path / "filter.onnx")
