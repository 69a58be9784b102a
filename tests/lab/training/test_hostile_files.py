"""No file of a run folder, a recipe, a result or a corpus runs code: each is refused with a line, or not read."""

import io
import json
import os
import pickle

import numpy as np
import pytest
import torch
from cover import cover

from training.runs import contents, messages

CODE = "import os\nos.mkdir({marker!r})\n"


class Payload:
    """What runs when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "it ran"


@pytest.fixture
def refused(rfa, marker):
    """A command that must end with a line on standard error and exit status 2, the payload not run."""

    def call(*arguments, says):
        status, out, err = rfa(*arguments)
        assert not marker.exists()
        assert (status, out, len(messages(err))) == (2, "", 1), err
        assert messages(err)[0].startswith("rfa: ")
        assert says in err

    return call


def pickled(marker):
    return pickle.dumps(Payload(marker))


def saved(marker):
    buffer = io.BytesIO()
    torch.save({"python": Payload(marker), "state": {}, "param_groups": [], "last_epoch": 1}, buffer)
    return buffer.getvalue()


def test_the_payload_would_run(marker):
    torch.load(io.BytesIO(saved(marker)), weights_only=False)
    assert marker.is_dir()


def numbers(name):
    return f"{name} holds other things than tensors and numbers"


@cover(
    1, write=[pickled, saved], name=["rng_state.pth", "rng_state_1.pth", "optimizer.pt", "scheduler.pt", "scaler.pt"]
)
def test_a_checkpoint(stopped, refused, marker, name, write):
    checkpoint = stopped.checkpoints / "checkpoint-5"
    (checkpoint / "digests.json").unlink(missing_ok=True)  # whoever made the payload could have made its digest
    (checkpoint / name).write_bytes(write(marker))
    refused("train", "--resume", "--out", stopped.path, says=numbers(name))


@pytest.mark.parametrize("name", [".metadata", "optimizer_0/.metadata", "global_step5/mp_rank_00_model_states.pt"])
def test_a_sharded_checkpoint(stopped, refused, marker, name):
    file = stopped.checkpoints / "checkpoint-5" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(pickled(marker))
    refused("train", "--resume", "--out", stopped.path, says="a sharded state, expected a full one")


def put(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def only_pickled_weights(run, marker):
    (run.model / "model.safetensors").unlink()
    (run.model / "pytorch_model.bin").write_bytes(saved(marker))


def distributed_weights(run, marker):
    """transformers would take them instead, by a reader of its own."""
    (run.model / "model.safetensors").rename(run.model / "shard-00000-model-00001-of-00001.safetensors")
    (run.model / ".metadata").write_bytes(pickled(marker))


def code_of_the_model(run, marker):
    put(run.model / "config.json", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})
    (run.model / "mine.py").write_text(CODE.format(marker=str(marker)))


def code_of_the_tokenizer(run, marker):
    put(run.tokenizer / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "mine.Tokenizer"]})
    (run.tokenizer / "mine.py").write_text(CODE.format(marker=str(marker)))


def pickled_tokenizer(run, marker):
    (run.tokenizer / "tokenizer.json").write_bytes(pickled(marker))


MODELS = {
    only_pickled_weights: "it lacks model.safetensors",
    distributed_weights: "it lacks model.safetensors",
    code_of_the_model: "config.json: got auto_map",
    code_of_the_tokenizer: "tokenizer_config.json: got auto_map",
    pickled_tokenizer: "the tokenizer in",
}


@cover(1, command=["generate", "evaluate"], plant=MODELS)
def test_a_model_or_a_tokenizer(run, refused, marker, plant, command):
    for digests in run.path.rglob("digests.json"):
        digests.unlink()
    plant(run, marker)
    refused(command, run.path, says=MODELS[plant])


def test_files_that_nobody_asked_for_are_not_read(run, rfa, marker):
    """Beside the model, as transformers would look for them."""
    names = ("training_args.bin", "pytorch_model.bin", "optimizer.pt", ".metadata", "tokenizer.model")
    for folder in (run.model, run.tokenizer):
        for name in names:
            (folder / name).write_bytes(pickled(marker))
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(CODE.format(marker=str(marker)))
    for digests in run.path.rglob("digests.json"):
        digests.unlink()
    before = contents(run.path)
    assert rfa("generate", run.path, "--max-new-tokens", "2")[0] == 0
    assert rfa("evaluate", run.path, "--lengths", "8")[0] == 0
    assert not marker.exists()
    assert contents(run.path) == before


def test_a_recipe(refused, marker, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"name: !!python/object/new:os.mkdir [{str(marker)!r}]")
    refused("experiment", "recipe.yaml", "--out", "out", says="recipe.yaml: no YAML: could not determine a constructor")


def test_tokens_in_the_cache(run, refused, marker, monkeypatch, tmp_path):
    """The cache is trusted, its kernels run; its tokens are numbers all the same."""
    monkeypatch.setenv("RFA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rfa_lab.data.stream.cached_file", lambda path, write: tmp_path / "tokens.npy")
    np.save(tmp_path / "tokens.npy", np.array([Payload(marker)], dtype=object), allow_pickle=True)
    refused("evaluate", run.path, says="Python objects in dtype")
