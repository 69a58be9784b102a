"""Public irregular sets on made-up rows, and windows of a table whose readings tell their place; nothing is fetched."""

import io
import math
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from rfa_lab.data import public_series
from rfa_lab.data.hub import Unreachable
from rfa_lab.data.public_series import TableSetting, load_ett, load_physionet2012, load_ushcn

PATIENT = "Time,Parameter,Value\n00:00,RecordID,1\n00:00,Age,54\n00:07,HR,73\n00:07,Temp,-1\n01:30,HR,77\n01:30,HR,78\n"

OTHER = "Time,Parameter,Value\n00:00,RecordID,2\n47:59,Temp,36.5\n"

USHCN = "ID,Time,Value_0,Value_1,Mask_0,Mask_1\n5,0.5,1.25,0,1,0\n5,2,0,-3,0,1\n9,1,7,8,1,1\n"


def assert_patients(found):
    assert (found.channels, found.unit) == (("HR", "Temp"), "hours")
    first, second = found.series
    assert (first.name, second.name) == ("1", "2")
    assert first.times.tolist() == pytest.approx([7 / 60, 1.5])
    assert first.values[:, 0].tolist() == [73.0, 78.0]  # the last of two readings at one time
    assert first.values[:, 1].isnan().all()  # -1 is missing
    assert second.times.item() == pytest.approx(47 + 59 / 60)
    assert math.isnan(second.values[0, 0])


def test_physionet_from_a_folder(tmp_path):
    (tmp_path / "1.txt").write_text(PATIENT)
    (tmp_path / "2.txt").write_text(OTHER)
    assert_patients(load_physionet2012("a", tmp_path))
    with pytest.raises(ValueError, match=r"^path: got .* without \.txt files"):
        load_physionet2012("a", tmp_path / "none")


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """Answers of the network, and the addresses that were asked for."""
    asked, answers = [], []
    monkeypatch.setenv("RFA_CACHE", str(tmp_path))
    monkeypatch.setattr(public_series, "download", lambda address, _: asked.append(address) or answers[0])
    return asked, answers


def test_physionet_fetched_once_and_read_from_its_archive(fetched):
    asked, answers = fetched
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in (("set-a/1.txt", PATIENT), ("set-a/2.txt", OTHER)):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    answers.append(packed.getvalue())
    for _ in range(2):
        assert_patients(load_physionet2012("a"))
    assert asked == ["https://physionet.org/files/challenge-2012/1.0.0/set-a.tar.gz?download"]


def test_a_damaged_archive(fetched):
    fetched[1].append(b"no archive")
    with pytest.raises(ValueError, match=r"^series: .* is damaged"):
        load_physionet2012("b")


def test_no_network(monkeypatch, tmp_path):
    def unreachable(address, _):
        raise Unreachable(f"{address}, got URLError")

    monkeypatch.setenv("RFA_CACHE", str(tmp_path))
    monkeypatch.setattr(public_series, "download", unreachable)
    with pytest.raises(ValueError, match=r"^series: tried https://.* or give `path`"):
        load_ett()


def test_ushcn(tmp_path):
    path = tmp_path / "ushcn.csv"
    path.write_text(USHCN)
    found = load_ushcn(path)
    assert (found.channels, found.unit) == (("Value_0", "Value_1"), "days")
    first, second = found.series
    assert (first.name, first.times.tolist()) == ("5", [0.5, 2.0])
    assert torch.equal(first.values.nan_to_num(9.0), torch.tensor([[1.25, 9.0], [9.0, -3.0]]).double())
    assert second.values.tolist() == [[7.0, 8.0]]


def test_ett(tmp_path):
    path = tmp_path / "ETTh1.csv"
    rows = [f"2016-07-01 0{hour}:00:00,{','.join(str(hour + i) for i in range(7))}" for hour in range(3)]
    path.write_text("date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n" + "\n".join(rows) + "\n")
    found = load_ett("ETTh1", path)
    assert (found.unit, found.times.tolist(), found.values.shape) == ("h", [0.0, 1.0, 2.0], (3, 7))
    assert found.values[:, -1].tolist() == [6.0, 7.0, 8.0]


@pytest.mark.parametrize("line", ["00:07,HR", "seven,HR,1", "00:07,HR,high"])
def test_a_damaged_record(tmp_path, line):
    (tmp_path / "1.txt").write_text(f"Time,Parameter,Value\n{line}\n")
    with pytest.raises(ValueError, match=r"^series: got .* in line 2 of 1"):
        load_physionet2012("a", tmp_path)
    other = tmp_path / "other.csv"
    other.write_text("ID,Time,Value_0\n1,2,3\n")
    with pytest.raises(ValueError, match=r"^path: got columns"):
        load_ushcn(other)


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
        ({"forecasts": 25}, "forecasts: got 25, expected at most 24"),
        ({"dropped": 1.0}, "dropped: got 1.0"),
        ({"dropped_least": 0.1}, "dropped_least: got 0.1"),
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
    public_series._standardised.cache_clear()
    with pytest.raises(ValueError, match=r"^table: got 'channels \[6\] that do not change"):
        drawn(TableSetting(path=str(path)))
    with pytest.raises(ValueError, match=r"^split: got 'vaild'"):
        drawn(TableSetting(path=str(path)), "vaild")
