"""One loading, everything of a record: each part equals the function that it comes from."""

import json

import numpy as np
import pytest
from training.runs import contents, text, tiny_spec

from rfa_lab.data import prepare
from rfa_lab.evaluation import attention_maps, evaluate, full_evaluation, perplexities
from rfa_lab.training import RunFolder, train

BOOKS = {"Mine_A.txt": 900, "Mine_B.txt": 40, "Yours_C.txt": 700}


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """A run whose test split has three documents."""
    folder = tmp_path_factory.mktemp("books")
    for split, documents in {"train": {"a.txt": 1600}, "valid": {"a.txt": 400}, "test": BOOKS}.items():
        (folder / split).mkdir()
        for seed, (name, characters) in enumerate(documents.items()):
            (folder / split / name).write_text(text(characters, seed) + "".join(map(chr, range(65, 123))))
    run = tmp_path_factory.mktemp("runs") / "run"
    train(tiny_spec(folder, length=32, max_steps=2), run)
    return folder, run


def test_everything(books, tmp_path):
    folder, run = books
    before, seen = contents(run), {}
    result = full_evaluation(
        run,
        lengths=[64, 32, 256],
        protocols={"blocks": None, "matched": 900},
        attention=tmp_path / "maps.npz",
        progress=lambda stage, done, total: seen.update({stage.name: (done, total)}),
    )
    assert contents(run) == before
    assert json.loads(json.dumps(result)) == result
    assert list(seen) == ["text", "blocks", "matched"]
    assert all(done == total for done, total in seen.values())
    model, data = RunFolder(run).load_model(), prepare(str(folder), "bytes")
    stream = data.streams["test"]
    for protocol, scored in (("blocks", None), ("matched", 900)):
        found = result["evaluations"][protocol]
        assert found["rows"] == perplexities(model, stream, [32, 64, 256], protocol, scored=scored)
        for row in found["rows"]:
            parts = [book[str(row["length"])] for book in found["books"].values()]
            assert sum(targets for _, targets in parts) == row["targets"]
            assert sum(loss for loss, _ in parts) == pytest.approx(row["loss"] * row["targets"], rel=1e-12)
    assert list(result["evaluations"]["blocks"]["books"]) == list(BOOKS)
    scored = [row["targets"] for row in result["evaluations"]["matched"]["rows"]]
    assert scored == [3 * 256] * 3  # of some 2,000 tokens: three segments of the longest length
    assert {"Mine_A.txt", "Yours_C.txt"} <= set(result["evaluations"]["matched"]["books"])
    start = (len(stream) - 256) // 2
    maps, summary = attention_maps(model, stream[start : start + 256], 32)
    assert result["attention"] == "maps.npz"
    assert result["attention_summary"] == {**summary, "start": start}
    with np.load(tmp_path / "maps.npz") as file:
        assert file["weights"].shape == (4, 128, 128)
        for name, of in maps.items():
            np.testing.assert_array_equal(file[name], of)
    assert [path.name for path in tmp_path.iterdir()] == ["maps.npz"]
    evaluated = evaluate(run, lengths=[32, 64, 256])
    assert (evaluated["preset"], evaluated["seed"], evaluated["train_length"]) == ("m2-sc-rfa", 0, 32)
    assert (evaluated["parameters"], evaluated["tokens"]) == (model.num_parameters(), len(stream))
    assert evaluated["data"] == f"{folder} (test split)"
    assert evaluated["books"] == result["evaluations"]["blocks"]["books"]
    assert (evaluated["fingerprint"], evaluated["environment"]) == (result["fingerprint"], result["environment"])


def test_bad_input_before_any_work(books, monkeypatch):
    monkeypatch.setattr(RunFolder, "load_model", lambda *_: pytest.fail("too late"))
    for given, message in (
        ({"lengths": []}, r"lengths: got \[\], expected at least one"),
        ({"lengths": [1]}, "lengths: got 1, expected at least 2"),
        ({"protocols": {"blocks": None, "sliding": None}}, "protocol: got 'sliding'"),
        ({"protocols": {"blocks": 31}}, r"scored \(blocks\): got 31, expected at least 32"),
        ({"lengths": [32, 4096]}, "got 4096 for a text of"),
    ):
        with pytest.raises(ValueError, match=message):
            full_evaluation(books[1], **{"lengths": [32], "protocols": {"blocks": None}, **given})
