import numpy as np
import pytest

from rfa_lab.data import prepare


@pytest.fixture
def folder(tmp_path):
    for index in range(5):
        (tmp_path / f"A{index}_book.txt").write_text(f"text {index} of this corpus\n" * 50)
    return tmp_path


def test_prepare(folder, tmp_path):
    seen = []
    data = prepare(
        str(folder), "bpe:270", "author:test=A1;valid=A3", cache_dir=tmp_path / "c", progress=lambda *a: seen.append(a)
    )
    assert data.corpus == str(folder)
    assert len(data.tokenizer) == 270
    assert data.tokenizer.decode(data.streams["test"]) == "text 1 of this corpus\n" * 50 + "<|endoftext|>"
    assert data.tokenizer.decode(data.streams["valid"]).startswith("text 3")
    assert (data.streams["train"] == 269).sum() == 3
    total = sum(path.stat().st_size for path in folder.glob("*.txt"))
    trained_on = total - sum((folder / f"A{index}_book.txt").stat().st_size for index in (1, 3))
    first = seen.index((trained_on, trained_on))  # the end of the tokenizer's training; then comes the reading
    for part, size in ((seen[: first + 1], trained_on), (seen[first + 1 :], total)):
        assert part[-1] == (size, size)
        assert [done for done, _ in part] == sorted(done for done, _ in part)

    again = prepare(str(folder), "bpe:270", "author:test=A1;valid=A3", cache_dir=tmp_path / "c")
    assert again.fingerprint == data.fingerprint
    assert all(np.array_equal(again.streams[split], stream) for split, stream in data.streams.items())
    (folder / "A1_book.txt").write_text("other text\n")
    other = prepare(str(folder), "bpe:270", "author:test=A1;valid=A3", cache_dir=tmp_path / "c")
    assert other.fingerprint != data.fingerprint


def test_only_the_splits_asked_for(folder, tmp_path):
    data = prepare(str(folder), "bytes", splits=("test",), cache_dir=tmp_path / "c")
    assert list(data.streams) == ["test"]
    assert len(list((tmp_path / "c").rglob("*.npy"))) == 1
    with pytest.raises(ValueError, match="got 'dev'"):
        prepare(str(folder), "bytes", splits=("dev",), cache_dir=tmp_path / "c")
