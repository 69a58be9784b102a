"""Loaders of public irregular sets, on a few made-up rows in their formats; nothing is fetched."""

import io
import math
import tarfile

import pytest
import torch

from rfa_lab.data import public_series
from rfa_lab.data.hub import Unreachable
from rfa_lab.data.public_series import load_ett, load_physionet2012, load_ushcn

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
    for load in (load_ett, load_physionet2012, load_ushcn):
        with pytest.raises(ValueError, match=r"^series: tried https://.* or give `path`"):
            load()
    assert not list((tmp_path / "series").glob("*.csv"))


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


@pytest.mark.parametrize(
    ("load", "given", "message"),
    [
        (load_ett, ["ETTh3"], r"^name: got 'ETTh3'"),
        (load_physionet2012, ["d"], r"^part: got 'd'"),
    ],
)
def test_names_that_are_none(load, given, message):
    with pytest.raises(ValueError, match=message):
        load(*given)


@pytest.mark.parametrize("line", ["00:07,HR", "seven,HR,1", "00:07,HR,high"])
def test_a_damaged_record(tmp_path, line):
    (tmp_path / "1.txt").write_text(f"Time,Parameter,Value\n{line}\n")
    with pytest.raises(ValueError, match=r"^series: got .* in line 2 of 1"):
        load_physionet2012("a", tmp_path)
    other = tmp_path / "other.csv"
    other.write_text("ID,Time,Value_0\n1,2,3\n")
    with pytest.raises(ValueError, match=r"^path: got columns"):
        load_ushcn(other)
