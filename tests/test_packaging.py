"""The source distribution, and what the tests need beside it."""

import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from rfa.version import source_commit, source_digest

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
    assert folders == {"src", "examples", "recipes", "packaging"}
    (ours,), (theirs,) = (
        WheelBuilder(str(source)).build(directory=str(tmp_path / name))
        for source, name in ((ROOT, "checkout"), (unpacked, "sdist"))
    )
    with zipfile.ZipFile(ours) as checkout, zipfile.ZipFile(theirs) as sdist:
        named = [each for each in checkout.namelist() if each.endswith("commit.txt")]
        commit = source_commit(ROOT / "src" / "rfa")
        assert named == ([] if commit is None else ["rfa/commit.txt"])
        assert [checkout.read(each).decode().strip() for each in named] == [commit] * len(named)
        assert contents(checkout) == contents(sdist)


def test_the_lower_bounds_are_the_versions_that_make_test_oldest_installs():
    """Of every requirement of the library and its extras; of `dev`, those that tests import.

    fugue and statsforecast keep pandas below 3: they are no part of that environment.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "packaging" / "oldest.txt").read_text(), re.M))
    bounds = {}
    del extras["fugue"], extras["statsforecast"]
    for name, texts in {"": project["dependencies"], **extras}.items():
        of = re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(texts), re.M)
        bounds |= {key: bound for key, bound in of if name != "dev" or key in pinned}
    assert {*pinned} == {*bounds}
    for name, bound in bounds.items():
        assert f"{pinned[name]}.0".startswith(f"{bound}."), name


def contents(wheel):
    """The bytes of each file by its name; the list of files is compared without its order."""
    found = {name: wheel.read(name) for name in wheel.namelist()}
    (record,) = (name for name in found if name.endswith("RECORD"))
    return {**found, record: b"".join(sorted(found[record].splitlines()))}


def git(folder, *command):
    given = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.c", *command]
    return subprocess.run(given, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_the_checkouts_own_or_the_one_it_was_built_at(tmp_path, monkeypatch):
    """None inside another repository; marked where the source differs from the commit."""
    package = tmp_path / "src" / "rfa"
    package.mkdir(parents=True)
    assert source_commit(package) is None
    git(tmp_path, "init", "-q")
    (package / "a.py").write_text("")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert source_commit(package) == head
    (package / "a.py").write_text("changed")
    assert source_commit(package) == f"{head}-dirty"
    installed = tmp_path / "venv" / "site-packages" / "rfa"
    installed.mkdir(parents=True)
    assert source_commit(installed) is None
    (installed / "commit.txt").write_text("0123abcd\n")
    assert source_commit(installed) == "0123abcd"
    monkeypatch.setenv("PATH", "")  # no git
    assert source_commit(package) is None


def test_where_no_commit_is_known_the_files_have_a_name(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "ops").mkdir(parents=True)
        (tmp_path / name / "ops" / "run.h").write_text("1")
        (tmp_path / name / "notes.txt").write_text(name)  # no source
    first = source_digest(tmp_path / "a")
    assert re.fullmatch("files-[0-9a-f]{12}", first)
    assert source_digest(tmp_path / "b") == first
    (tmp_path / "b" / "ops" / "run.h").write_text("2")
    assert source_digest(tmp_path / "b") != first
    (tmp_path / "a" / "ops" / "run.h").rename(tmp_path / "a" / "run.h")
    assert source_digest(tmp_path / "a") != first
    (tmp_path / "b" / ".#a.py").symlink_to("nobody@nowhere")  # an editor's lock: what cannot be read has no part
    assert source_digest(tmp_path / "b") is not None
    assert source_digest(tmp_path / "nowhere") is None


def test_packages_without_which_tests_are_skipped_are_listed():
    """`tests/README.md` names each, so that a skipped test is no surprise."""
    listed = (ROOT / "tests" / "README.md").read_text("utf-8").replace("-", "_")
    files = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    needed = {name for text in files for name in re.findall(r'importorskip\("(\w+)', text)} - {"tomllib"}
    assert {"kernels", "hatchling"} <= needed
    assert {name for name in needed if not re.search(rf"\b{name}\b", listed)} == set()


def test_the_workflows_call_targets_of_the_makefile():
    """And run the tests on the oldest Python that the package allows."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    jobs = {}
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        jobs |= yaml.safe_load(path.read_text("utf-8"))["jobs"]
    commands = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    called = set(re.findall(r"\bmake ([a-z-]+)", commands))
    assert called >= {"test", "test-all"}
    assert called <= targets, called - targets
    (oldest,) = re.findall(r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert oldest in jobs["changes"]["strategy"]["matrix"]["python"]
