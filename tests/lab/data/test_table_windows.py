"""Windows of a table: a made-up table whose readings tell their place."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rfa_lab.data import table_windows
from rfa_lab.data.table_windows import TableSetting

ROWS = 20 * 30 * 24


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Channel 0 counts the rows; the others have deviations of their own."""
    path = tmp_path_factory.mktemp("ett") / "table.csv"
    hours = np.arange(ROWS)
    dates = np.datetime64("2016-07-01T00", "h") + hours
    rows = [
        f"{str(date).replace('T', ' ')}:00:00,{k}," + ",".join(f"{c * (k % 7):.1f}" for c in range(1, 7))
        for k, date in zip(hours, dates, strict=True)
    ]
    path.write_text("date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n" + "\n".join(rows) + "\n")
    return str(path)


def drawn(setting, split="train", series=50):
    return setting.batch(series, torch.Generator().manual_seed(0), split)


def places(batch):
    """The row of the table that each target or reading stands in."""
    train = np.arange(12 * 30 * 24)
    known = torch.where(batch.values.isnan(), batch.targets, batch.values)[..., 0]
    return known * train.std() + train.mean()


@pytest.mark.parametrize(
    ("split", "first", "last"), [("train", 0, 8640), ("valid", 8544, 11520), ("test", 11424, 14400)]
)
def test_windows_are_rows_of_their_split(table, split, first, last):
    batch = drawn(TableSetting(path=table, horizon=48), split)
    found = places(batch)
    assert batch.values.shape == (50, 144, 7)
    torch.testing.assert_close(found - found[:, :1], batch.times, atol=1e-6, rtol=0)
    many = places(drawn(TableSetting(path=table, horizon=48), split, 4000))
    assert first <= float(many.min()) + 1e-6 < first + 5  # the first windows begin in the split before
    assert float(found.max()) < last - 1 + 1e-6
    assert batch.values[:, :96].isfinite().all()
    assert batch.targets[:, 96:].isfinite().all()
    assert batch.values[:, 96:].isnan().all()
    assert batch.targets[:, :96].isnan().all()
    train = drawn(TableSetting(path=table, horizon=48), "train", 4000).targets[:, 96:]
    torch.testing.assert_close(train[..., 1:].std((0, 1)), torch.ones(6).double(), atol=0.01, rtol=0)


def test_rows_are_dropped_and_forecasts_drawn(table):
    batch = drawn(TableSetting(path=table, dropped=0.9, forecasts=5))
    assert batch.times.shape == (50, 10 + 5)
    assert (batch.times.diff(dim=1) > 0).all()
    assert float(batch.times[:, :10].max()) <= 95
    assert float(batch.times[:, 10:].min()) >= 96
    assert float(batch.times.max()) <= 119
    found = places(batch)
    torch.testing.assert_close(found - found[:, :1], batch.times - batch.times[:, :1], atol=1e-6, rtol=0)
    mixed = TableSetting(path=table, dropped=0.9, dropped_least=0.2, forecasts=5)
    kept = [mixed.batch(2, torch.Generator().manual_seed(seed)).times.shape[1] - 5 for seed in range(40)]
    assert (min(kept) < 20, max(kept) > 65, set(kept) <= set(range(9, 79))) == (True, True, True)


def test_spikes_are_errors_of_single_readings(table):
    clean = drawn(TableSetting(path=table), series=400)
    wrong = drawn(TableSetting(path=table, spikes=0.1, size=10.0), series=400)
    error = (wrong.values - clean.values)[:, :96]
    hit = error != 0
    assert hit.double().mean().item() == pytest.approx(0.1, abs=0.003)  # 270,000 readings: five standard errors
    assert error[hit].std().item() == pytest.approx(10.0, rel=0.03)
    assert wrong.targets[:, 96:].equal(clean.targets[:, 96:])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"table": "ETTh9"}, "table: got 'ETTh9'"),
        ({"seen": 1}, "seen: got 1"),
        ({"forecasts": 25}, "forecasts: got 25, expected at most 24"),
        ({"dropped": 1.0}, "dropped: got 1.0"),
        ({"dropped_least": 0.1}, "dropped_least: got 0.1"),
        ({"spikes": -0.1}, "spikes: got -0.1"),
    ],
)
def test_bad_numbers(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        TableSetting(**given)


def test_missing_and_constant_channels(table, tmp_path):
    lines = Path(table).read_text().splitlines()
    lines[100] = ",".join(["" if k == 2 else cell for k, cell in enumerate(lines[100].split(","))])
    path = tmp_path / "gap.csv"
    path.write_text("\n".join(lines) + "\n")
    found = drawn(TableSetting(path=str(path), horizon=48), series=400)
    nothing = torch.where(found.values.isnan(), found.targets, found.values).isnan()
    assert 0 < int(nothing.sum()) < 400  # the empty cell of some windows
    assert not nothing[..., [0, *range(2, 7)]].any()
    path.write_text("\n".join([lines[0], *(line.rsplit(",", 1)[0] + ",5" for line in lines[1:])]) + "\n")
    table_windows._standardised.cache_clear()
    with pytest.raises(ValueError, match=r"^table: got 'channels \[6\] that do not change"):
        drawn(TableSetting(path=str(path)))
    with pytest.raises(ValueError, match=r"^split: got 'vaild'"):
        drawn(TableSetting(path=str(path)), "vaild")


def test_a_table_that_is_too_short(table, tmp_path, monkeypatch):
    monkeypatch.setitem(table_windows.TABLES, "ETTh1", 4)
    with pytest.raises(ValueError, match=r"^table: got '14400 rows', expected at least 57600"):
        drawn(TableSetting(path=table), "test")
