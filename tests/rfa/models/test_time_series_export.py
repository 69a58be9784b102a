"""A step of the time-series model, in PyTorch and as a file of ONNX, beside the model on the readings that are kept."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from cover import cover, slow

from rfa.checks import MissingExtra
from rfa.models import RFAForTimeSeries, RFATimeSeriesConfig
from rfa.models.time_series import SeriesStep

KEPT, CHANNELS = 8, 2
RUN = """
import sys

sys.modules.update(dict.fromkeys(["rfa", "torch", "onnx", "pandas"]))  # an import of one of them raises
import numpy as np
import onnxruntime

file, given, found = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
given, rows = dict(np.load(given)), []
times, values = np.zeros(8), np.full((8, 2), np.nan, dtype=np.float32)
for row in range(len(given["time"])):
    inputs = {name: np.asarray(column[row]) for name, column in given.items()}
    *output, times, values = session.run(None, {"kept_times": times, "kept_values": values, **inputs})
    rows.append(output)
np.save(found, np.array(rows))
"""


def network(preset, **fields):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "span": 20.0, "channels": CHANNELS}
    return RFAForTimeSeries(RFATimeSeriesConfig(preset=preset, **sizes, **fields)).eval()


def steps(count):
    """Times from 1e6 on with gaps, values with missing entries, missing rows and outliers, and times that are asked."""
    generator = np.random.default_rng(0)
    gaps = generator.exponential(size=count)
    gaps[generator.random(count) < 0.03] *= 100
    values = generator.normal(size=(count, CHANNELS)).astype(np.float32)
    values[generator.random(count) < 0.05] *= 1000
    values[generator.random((count, CHANNELS)) < 0.2] = np.nan
    values[0] = 1.0
    times = 1e6 + gaps.cumsum()
    return {"time": times, "value": values, "query_time": times + 3 * generator.random(count).round() * gaps}


@torch.no_grad()
def expected(model, time, value, query_time):
    """What the model says of the last readings at each step, `(steps, parts, channels)`."""
    seen = ~np.isnan(value).all(1)
    times = np.concatenate([time[0] + np.arange(-KEPT, 0), time[seen]])  # rows of NaN are no readings
    values = np.concatenate([np.full((KEPT, CHANNELS), np.nan, dtype=np.float32), value[seen]])
    rows = seen.cumsum()[:, None] + np.arange(KEPT)
    given = (torch.from_numpy(x) for x in (times[rows], values[rows], query_time[:, None]))
    found = [model(*part[:2], query_times=part[2]) for part in zip(*(x.split(500) for x in given), strict=True)]
    parts = [[x for x in (f.location, f.deviation, f.degrees_of_freedom) if x is not None] for f in found]
    return torch.cat([torch.cat(each, dim=1) for each in parts]).numpy()


def assert_same(found, wanted):
    """To 1e-5 of the deviation, and of itself."""
    deviation = wanted[:, 1:2]
    np.testing.assert_allclose(found[:, :1] / deviation, wanted[:, :1] / deviation, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[:, 1:], wanted[:, 1:], rtol=1e-5)


@cover(
    1,
    preset=["rfa", "m2-sc-rfa", "b2-alibi", "x3-rotation-riccati"],
    causal=[True, False],
    scaling=["window", "training"],
    likelihood=["student_t", "gaussian"],
)
def test_a_step_is_the_model_on_the_readings_that_are_kept(preset, causal, scaling, likelihood):
    fields = {"causal": causal, "scaling": scaling, "likelihood": likelihood}
    model, given = network(preset, **fields), steps(20)
    step = SeriesStep(model)
    times, values = torch.zeros(KEPT, dtype=torch.float64), torch.full((KEPT, CHANNELS), math.nan)
    found = []
    with torch.no_grad():
        for row in zip(*(torch.from_numpy(column) for column in given.values()), strict=True):
            *output, times, values = step(times, values, *row)
            found.append(torch.stack(output))
    assert_same(torch.stack(found).numpy(), expected(model, **given))


@slow
@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("rfa", {}),
        ("m2-sc-rfa", {"scaling": "training", "likelihood": "gaussian"}),
        ("b1-rope", {}),
    ],
)
def test_ten_thousand_steps_in_onnxruntime(preset, fields, tmp_path):
    """Where there is neither this library nor PyTorch: a minute each."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, given = network(preset, **fields), steps(10_000)
    model.export(tmp_path / "step.onnx", KEPT)
    np.savez(tmp_path / "given.npz", **given)
    files = [str(tmp_path / name) for name in ("step.onnx", "given.npz", "found.npy")]
    done = subprocess.run([sys.executable, "-I", "-c", RUN, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_same(np.load(tmp_path / "found.npy"), expected(model, **given))


@slow
def test_a_preset_that_scans_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match="preset: got 'c8-fox-clock', expected one that ONNX can express"):
        network("c8-fox-clock").export(tmp_path / "step.onnx", KEPT)
    assert not [*tmp_path.iterdir()]


def test_what_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for readings in (1, True):
        with pytest.raises(ValueError, match=f"readings: got {readings}, expected a whole number >= 2"):
            network("rfa").export(tmp_path / "step.onnx", readings)
    with pytest.raises(ValueError, match=r"path: got .*step\.onnx, expected a place that can be written"):
        network("rfa").export(tmp_path / "file" / "step.onnx", KEPT)
    monkeypatch.setattr("rfa.checks.installed", lambda module: module != "onnxscript")
    with pytest.raises(MissingExtra, match=r"onnxscript is not installed: pip install -e '\.\[onnx\]' in a clone"):
        network("rfa").export(tmp_path / "step.onnx", KEPT)
