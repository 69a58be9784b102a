"""The source distribution, and what the tests need beside it."""

import re
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_wheel_of_the_source_distribution_is_that_of_the_checkout(tmp_path):
    """It has what builds and uses the package, and nothing that reads files that it lacks."""
    pytest.importorskip("hatchling", reason="which builds the package")
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    (made,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    folders = {path.name for path in unpacked.iterdir() if path.is_dir()}
    assert folders == {"src", "examples", "recipes", "kernels"}
    (ours,), (theirs,) = (
        WheelBuilder(str(source)).build(directory=str(tmp_path / name))
        for source, name in ((ROOT, "checkout"), (unpacked, "sdist"))
    )
    with zipfile.ZipFile(ours) as checkout, zipfile.ZipFile(theirs) as sdist:
        assert {each.filename: each.CRC for each in checkout.infolist()} == {
            each.filename: each.CRC for each in sdist.infolist()
        }


def test_packages_without_which_tests_are_skipped_are_listed():
    """`tests/README.md` names each, so that a skipped test is no surprise."""
    listed = (ROOT / "tests" / "README.md").read_text("utf-8").replace("-", "_")
    files = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    needed = {name for text in files for name in re.findall(r'importorskip\("(\w+)', text)} - {"tomllib"}
    assert {"kernels", "hatchling"} <= needed
    assert {name for name in needed if not re.search(rf"\b{name}\b", listed)} == set()
