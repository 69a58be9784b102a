"""The run folder: what may be replaced, what is damaged, and a disk that is full."""

import errno
import json
import os
import resource

import pytest
import safetensors.torch
import torch

from rfa.training import RunFolder, Stopped, resume, train
from rfa.training.callbacks import read_metrics
from rfa.training.run_folder import write_whole
from training.runs import at_step, contents, ctrl_c, tiny_spec, weights, write_corpus


def test_an_existing_run_is_refused(corpus, finished):
    before = contents(finished)
    with pytest.raises(ValueError, match="exists, expected a new one, --resume or --overwrite"):
        train(tiny_spec(corpus), finished)
    assert contents(finished) == before


def test_overwrite(corpus, tmp_path):
    train(tiny_spec(corpus, max_steps=3), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("of the old run")
    assert train(tiny_spec(corpus, max_steps=2), tmp_path / "run", overwrite=True)["steps"] == 2
    assert not (tmp_path / "run" / "notes.txt").exists()
    assert not (tmp_path / "run" / "checkpoints" / "checkpoint-3").exists()
    assert max(line["step"] for line in read_metrics(RunFolder(tmp_path / "run"))) == 2


def test_bad_data_overwrite_nothing(finished, tmp_path):
    before = contents(finished)
    with pytest.raises(ValueError, match="text"):
        train(tiny_spec(write_corpus(tmp_path / "corpus", train=5)), finished, overwrite=True)
    assert contents(finished) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("foreign", ["thesis.tex", "run.json"])  # another program's run.json
def test_a_foreign_folder_is_never_deleted(corpus, tmp_path, overwrite, foreign):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / foreign).write_text('{"entry": "of another program"}')
    (tmp_path / "mine" / "years of work.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists"):
        train(tiny_spec(corpus, max_steps=1), tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "years of work.txt").read_text() == "precious"


def test_an_empty_folder_and_a_new_path_are_fine_a_file_is_not(tmp_path):
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty").path == tmp_path / "empty"
    assert RunFolder.create(tmp_path / "new" / "path").path.is_dir()
    (tmp_path / "file").write_text("text")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="no run folder"):
            RunFolder.create(tmp_path / "file", overwrite)
    assert (tmp_path / "file").read_text() == "text"


def damage(run, change):
    file = run / "run.json"
    file.write_text(change(file.read_text()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: "not JSON", "is damaged"),
        (lambda text: "[1, 2]", "is damaged"),
        (lambda text: "null", "is damaged"),
        (lambda text: "{}", "is damaged"),
        (lambda text: '{"format": 1}', "is damaged, it lacks config, data, finished, spec, steps"),
        (lambda text: '{"format": 1, "spec": {}, "data": {}, "config": {}, "steps": 0}', "spec: got|damaged"),
        (lambda text: '{"format": 1, "spec": null, "data": null, "config": {}, "steps": 0}', "spec: got|damaged"),
        (lambda text: text.replace('"fingerprint"', '"finger"'), "damaged"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "has format 2, expected 1"),
        (lambda text: text.replace('"m2-sc-rfa"', '"m9"'), "preset: got 'm9'"),
        (lambda text: text.replace('"length": 16', '"length": "long"'), "length|spec|damaged"),
    ],
)
def test_a_damaged_record(corpus, tmp_path, change, message):
    run = RunFolder.create(tmp_path / "run")
    with pytest.raises(Stopped):
        train(tiny_spec(corpus), run.path, progress=at_step(1, ctrl_c))
    damage(run.path, change)
    with pytest.raises(ValueError, match=message):
        resume(run.path)


def test_no_run_there(tmp_path):
    for use in (resume, lambda path: RunFolder(path).load_model()):
        with pytest.raises(ValueError, match=r"holds no run\.json"):
            use(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


@pytest.fixture
def run(corpus, tmp_path):
    train(tiny_spec(corpus, max_steps=2), tmp_path / "run")
    return RunFolder(tmp_path / "run")


@pytest.mark.parametrize("file", ["model/model.safetensors", "model/config.json"])
@pytest.mark.parametrize("how", ["cut", "empty", "gone"])
def test_a_damaged_model(run, file, how):
    path = run.path / file
    content = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(content[: len(content) // 2] if how == "cut" else b"")
    with pytest.raises(ValueError, match=r"the model in .* cannot be read") as error:
        run.load_model()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", '{"version": "1.0"', "{}", "null"])
def test_a_damaged_tokenizer(run, content):
    (run.tokenizer / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read") as error:
        run.load_tokenizer()
    assert "\n" not in str(error.value)


def test_a_missing_model(corpus, tmp_path):
    with pytest.raises(SystemExit):
        train(tiny_spec(corpus), tmp_path / "run", progress=at_step(1, lambda: (_ for _ in ()).throw(SystemExit)))
    with pytest.raises(ValueError, match="holds no model yet"):
        RunFolder(tmp_path / "run").load_model()


def test_an_unfinished_run_has_its_newest_checkpoints_model(corpus, tmp_path):
    with pytest.raises(Stopped):
        train(tiny_spec(corpus), tmp_path / "run", progress=at_step(5, ctrl_c))
    saved = safetensors.torch.load_file(tmp_path / "run" / "checkpoints" / "checkpoint-5" / "model.safetensors")
    model = RunFolder(tmp_path / "run").load_model()
    assert torch.equal(model.model.embed_tokens.weight, saved["model.embed_tokens.weight"])


@pytest.mark.parametrize("before", [None, "file", "folder"])
def test_write_whole_leaves_what_was_there(tmp_path, before):
    target = tmp_path / "target"
    if before == "folder":
        target.mkdir()
        (target / "old").write_text("old")
    elif before:
        target.write_text("old")
    kept = contents(tmp_path)

    def fail(path):
        path.mkdir()
        (path / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(target, fail)
    assert contents(tmp_path) == kept
    assert [path.name for path in tmp_path.iterdir()] == (["target"] if before else [])


# A full disk, after the checkpoint of step 3 and before that of step 6. A limit on the size of files makes real writes
# fail where they would on a full disk: with 30 kB the model, with 90 kB only the optimiser's state.


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(kind, monkeypatch):
    if isinstance(kind, int):
        return resource.setrlimit(resource.RLIMIT_FSIZE, (kind, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    monkeypatch.setattr(
        *{"torch.save": (torch, "save"), "rename": (os, "replace"), "mkdir": (os, "makedirs")}[kind], no_space
    )


@pytest.fixture
def unlimited():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("kind", [30_000, 90_000, "torch.save", "rename", "mkdir"])
def test_full_disk_while_saving(corpus, finished, tmp_path, monkeypatch, unlimited, kind):
    spec = tiny_spec(corpus)
    with monkeypatch.context() as patch, pytest.raises(OSError):  # noqa: PT011 (its text is the system's)
        train(spec, tmp_path / "run", progress=at_step(5, lambda: full_disk(kind, patch)))
    unlimited()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-3"]
    assert RunFolder(tmp_path / "run").latest_checkpoint().name == "checkpoint-3"
    assert not [name for name in contents(tmp_path / "run") if "/." in name or name.startswith(".")]
    resume(tmp_path / "run")
    for name, value in weights(finished).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, atol=1e-4, rtol=0)


def test_full_disk_while_the_model_is_saved_at_the_end(corpus, tmp_path, unlimited):
    spec = tiny_spec(corpus, eval_steps=100)

    def at_the_end(step, steps, figures):
        if step == steps:
            full_disk(3000, None)

    with pytest.raises(OSError):  # noqa: PT011
        train(spec, tmp_path / "run", progress=at_the_end)
    unlimited()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"] is False
    assert resume(tmp_path / "run")["finished"]


def test_full_disk_on_resume_loses_no_metrics(corpus, tmp_path, unlimited):
    with pytest.raises(Stopped):
        train(tiny_spec(corpus), tmp_path / "run", progress=at_step(5, ctrl_c))
    before = read_metrics(RunFolder(tmp_path / "run"))
    full_disk(100, None)
    with pytest.raises(OSError):  # noqa: PT011
        resume(tmp_path / "run")
    unlimited()
    assert read_metrics(RunFolder(tmp_path / "run")) == before
    assert resume(tmp_path / "run")["finished"]
    steps = [line["step"] for line in read_metrics(RunFolder(tmp_path / "run")) if "loss" in line]
    assert steps == list(range(1, 9))
