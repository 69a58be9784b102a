"""Files of a run that changed, are lost, foreign or hostile: a line names each that is refused, and none runs code."""

import io
import json
import os
import pickle

import pytest
import torch
from cover import some

from rfa.models import RFAForCausalLM, preset
from rfa.models.saved_files import DIGESTS, check_digests, read_model, write_digests
from rfa_lab.training import resume
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


def flip(file):
    """One bit of a file, most of which is numbers."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def put(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def put_pickle(file, marker, write=pickled):
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(write(marker))


def without_digests(folder):
    found = sorted(folder.rglob(DIGESTS))
    for digests in found:
        digests.unlink()
    return len(found)


NUMBERS = "holds other things than tensors and numbers"
SHARDED = "a sharded state, expected a full one"
STATE = "trainer_state.json"
CHECKPOINT = {  # how a checkpoint is damaged, and what is said
    "flipped optimiser": (lambda c, _: flip(c / "optimizer.pt"), "optimizer.pt is not as it was saved"),
    "unknown state": (lambda c, _: put(c / STATE, colour="red"), "colour"),
    "another path": (lambda c, _: put(c / STATE, best_model_checkpoint="/etc"), "best_model_checkpoint: got '/etc'"),
    "foreign optimiser": (lambda c, _: torch.save({"a": 1}, c / "optimizer.pt"), "optimizer.pt holds no optimiser's"),
    "code in a generator": (lambda c, m: put_pickle(c / "rng_state_1.pth", m), f"rng_state_1.pth {NUMBERS}"),
    "code in an optimiser": (lambda c, m: put_pickle(c / "optimizer.pt", m, saved), f"optimizer.pt {NUMBERS}"),
    "shards": (lambda c, m: put_pickle(c / "optimizer_0" / ".metadata", m), SHARDED),
}


@pytest.mark.parametrize("damage", CHECKPOINT)
def test_a_checkpoint(stopped, refused, marker, damage):
    checkpoint = stopped.checkpoints / "checkpoint-5"
    act, said = CHECKPOINT[damage]
    if not damage.startswith("flipped"):  # whoever made the damage could have made its digest
        (checkpoint / DIGESTS).unlink()
    act(checkpoint, marker)
    before = contents(stopped.path)
    refused("train", "--resume", "--out", stopped.path, says=said)
    with pytest.raises(ValueError, match="checkpoint-5 is damaged, delete it to go on from the one before: it"):
        resume(stopped.path)
    kept = contents(stopped.path)
    assert kept.pop("run.json")  # which notes that it was tried
    assert kept == {file: content for file, content in before.items() if file != "run.json"}


def more_weights(run, _):
    (run.model / "model2.safetensors").write_bytes((run.model / "model.safetensors").read_bytes())


def distributed_weights(run, marker):
    """transformers would take them instead, by a reader of its own."""
    (run.model / "model.safetensors").rename(run.model / "shard-00000-model-00001-of-00001.safetensors")
    put_pickle(run.model / ".metadata", marker)


def code_of_the_model(run, marker):
    put(run.model / "config.json", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})
    (run.model / "mine.py").write_text(CODE.format(marker=str(marker)))


def code_of_the_tokenizer(run, marker):
    put(run.tokenizer / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "mine.Tokenizer"]})
    (run.tokenizer / "mine.py").write_text(CODE.format(marker=str(marker)))


WITH_DIGESTS = {
    "flipped weights": (lambda r, _: flip(r.model / "model.safetensors"), "model.safetensors is not as it was saved"),
    "more weights": (more_weights, "model2.safetensors has no sha256 in digests.json"),
}
MODEL = {
    **WITH_DIGESTS,
    "pickled tokenizer": (lambda r, m: put_pickle(r.tokenizer / "tokenizer.json", m), "the tokenizer in"),
    "distributed weights": (distributed_weights, "it lacks model.safetensors"),
    "code of the model": (code_of_the_model, "config.json: got auto_map"),
    "code of the tokenizer": (code_of_the_tokenizer, "tokenizer_config.json: got auto_map"),
}


@pytest.mark.parametrize("damage", MODEL)
def test_a_model_or_a_tokenizer(run, refused, marker, damage):
    act, said = MODEL[damage]
    if damage not in WITH_DIGESTS:
        without_digests(run.path)
    act(run, marker)
    refused("generate" if len(damage) % 2 else "evaluate", run.path, says=said)


def test_files_that_nobody_asked_for_are_not_read(run, rfa, marker):
    """Beside the model, as transformers would look for them."""
    names = ("training_args.bin", "pytorch_model.bin", "optimizer.pt", ".metadata", "tokenizer.model")
    for folder in (run.model, run.tokenizer):
        for name in names:
            (folder / name).write_bytes(pickled(marker))
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(CODE.format(marker=str(marker)))
    without_digests(run.path)
    before = contents(run.path)
    assert rfa("generate", run.path, "--max-new-tokens", "2")[0] == 0
    assert rfa("evaluate", run.path, "--lengths", "8")[0] == 0
    assert not marker.exists()
    assert contents(run.path) == before


def test_a_recipe(refused, marker, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"name: !!python/object/new:os.mkdir [{str(marker)!r}]")
    refused("experiment", "recipe.yaml", "--out", "out", says="recipe.yaml: no YAML: could not determine a constructor")


@pytest.mark.parametrize("lost", some(["optimizer.pt", "model.safetensors", "trainer_state.json"], 1))
def test_an_incomplete_newest_checkpoint_is_passed_over(stopped, lost):
    (stopped.checkpoints / "checkpoint-5" / lost).unlink()
    assert stopped.latest_checkpoint().name == "checkpoint-3"
    assert resume(stopped.path)["finished"]


def test_a_process_that_was_killed_while_it_saved(stopped):
    """Its folder has another name, and no digests where it was not whole."""
    begun = stopped.checkpoints / ".saving" / "checkpoint-6"
    begun.mkdir(parents=True)
    (begun / "model.safetensors").write_bytes(b"half")
    assert stopped.latest_checkpoint().name == "checkpoint-5"
    assert resume(stopped.path)["finished"]
    assert not begun.exists()


def test_digests_that_are_none(run):
    for content in ("{", "[" * 100_000, '{"config.json": 5}', '{"../mine.tex": "ab"}'):
        (run.model / DIGESTS).write_text(content)
        with pytest.raises(ValueError, match=r"is damaged|is not as it was saved|is gone"):
            check_digests(run.model)


def test_a_lost_file_and_one_that_came_later(tmp_path):
    for name in ("a", "below/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_digests(tmp_path)
    (tmp_path / "later").write_text("somebody's own")
    check_digests(tmp_path)
    (tmp_path / "below" / "c").unlink()
    check_digests(tmp_path, ["a"])
    with pytest.raises(ValueError, match="below/c is gone"):
        check_digests(tmp_path)


def save_tiny(folder, precision, **changes):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 11}
    model = RFAForCausalLM(preset("m2-sc-rfa", **sizes)).to(precision)
    model.save_pretrained(folder)
    put(folder / "config.json", **changes)
    return model


def test_the_precision_is_the_saved_one(tmp_path):
    dtype = torch.bfloat16
    expected = save_tiny(tmp_path, dtype).state_dict()
    model = read_model(tmp_path, RFAForCausalLM)
    assert model.dtype == model.config.dtype == model.lm_head.weight.dtype == dtype
    for name, tensor in model.state_dict().items():  # the dynamics are of single precision in every model
        assert torch.equal(tensor.float(), expected[name].float()), name


def test_no_other_precision(tmp_path):
    save_tiny(tmp_path, torch.float32, dtype="int8")
    with pytest.raises(ValueError, match=r"dtype: got .* expected one of float16, bfloat16, float32, float64"):
        read_model(tmp_path, RFAForCausalLM)
