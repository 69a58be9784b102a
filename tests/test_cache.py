import errno
import resource

import filelock
import pytest

from rfa.files import cache_folder, cached_file


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RFA_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder(tmp_path / "x") == tmp_path / "x"
    monkeypatch.delenv("RFA_CACHE")
    assert cache_folder().name == "rfa"


def write_good(file):
    file.write(b"good" * 1000)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"Good" + path.read_bytes()[4:]),
        lambda path: path.unlink(),
        lambda path: path.with_name("file.sha256").write_bytes(b"\xff"),
    ],
)
def test_written_once_and_again_when_damaged(tmp_path, damage):
    calls = []

    def write(file):
        calls.append(1)
        write_good(file)

    path = tmp_path / "new" / "file"
    for _ in range(3):
        assert cached_file(path, write).read_bytes() == b"good" * 1000
    assert len(calls) == 1
    damage(path)
    for _ in range(2):
        assert cached_file(path, write).read_bytes() == b"good" * 1000
    assert len(calls) == 2


def test_a_real_write_error_leaves_nothing_partial(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            cached_file(tmp_path / "file", lambda file: file.write(bytes(200_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("error", [NotImplementedError, OSError(errno.ENOLCK, "No locks available")])
def test_right_without_locks(tmp_path, monkeypatch, error):
    def refuse(self):
        raise error

    monkeypatch.setattr(filelock.FileLock, "__enter__", refuse)
    assert cached_file(tmp_path / "file", write_good).read_bytes() == b"good" * 1000
    assert cached_file(tmp_path / "file", refuse).exists()
