"""What is read from a run: digests of its files, the precision of a model, nothing said by transformers."""

import json
from contextlib import suppress

import pytest
import torch
from cover import some
from transformers.utils import logging

from rfa.models import RFAForCausalLM, preset
from rfa.models.saved_files import DIGESTS, check_digests, quiet_transformers, read_model, write_digests
from rfa_lab.training import resume
from training.runs import contents

OF_A_CHECKPOINT = ["config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", DIGESTS]

OF_A_CHECKPOINT += ["trainer_state.json", "training_args.bin", "generation_config.json"]


def flip(file):
    """One bit of a file, most of which is numbers."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", some(OF_A_CHECKPOINT, 3))
def test_a_flipped_bit_in_a_checkpoint(stopped, name):
    checkpoint = stopped.checkpoints / "checkpoint-5"
    assert sorted(contents(checkpoint)) == sorted(OF_A_CHECKPOINT)
    flip(checkpoint / name)
    before = contents(stopped.path)
    with pytest.raises(ValueError, match=rf"checkpoint-5 is damaged, delete it .* before: it .*{name}") as error:
        resume(stopped.path)
    assert "\n" not in str(error.value)
    kept = contents(stopped.path)
    assert kept.pop("run.json")  # which notes that it was tried
    assert kept == {file: content for file, content in before.items() if file != "run.json"}


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/config.json", "tokenizer/tokenizer.json"])
def test_a_flipped_bit_in_what_is_evaluated(run, name):
    flip(run.path / name)
    with pytest.raises(ValueError, match=rf"cannot be read \(ValueError: {name.split('/')[1]} is not as it was saved"):
        run.load_tokenizer() if name.startswith("tokenizer") else run.load_model()


def without_digests(run):
    found = sorted(run.path.rglob(DIGESTS))
    for digests in found:
        digests.unlink()
    return len(found)


def test_what_an_older_version_saved_still_loads(stopped):
    assert without_digests(stopped) == 3  # of the tokenizer and two checkpoints
    assert resume(stopped.path)["finished"]
    assert without_digests(stopped) == 3  # of new checkpoints and the model
    assert stopped.load_model().num_parameters() == stopped.read()["result"]["parameters"]
    assert stopped.load_tokenizer().eos_token_id == 256


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, '{"config.json": 5}', '{"../mine.tex": "ab"}'])
def test_digests_that_are_none(run, content):
    (run.model / DIGESTS).write_text(content)
    with pytest.raises(ValueError, match=r"is damaged|is not as it was saved|is gone"):
        check_digests(run.model)


def test_a_lost_file_and_one_that_came_later(tmp_path):
    for name in ("a", "b", "below/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_digests(tmp_path)
    (tmp_path / "later").write_text("somebody's own")
    check_digests(tmp_path)
    (tmp_path / "below" / "c").unlink()
    check_digests(tmp_path, ["a"])
    with pytest.raises(ValueError, match=r"later has no sha256 in digests.json"):
        check_digests(tmp_path, ["a", "later"])
    with pytest.raises(ValueError, match="below/c is gone"):
        check_digests(tmp_path)


def more_weights(model):
    (model / "model2.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    return "model2.safetensors"


def no_digest_of_the_configuration(model):
    digests = json.loads((model / DIGESTS).read_text())
    del digests["config.json"]
    (model / DIGESTS).write_text(json.dumps(digests))
    return "config.json"


@pytest.mark.parametrize("change", [more_weights, no_digest_of_the_configuration])
def test_no_file_without_a_digest_is_read_beside_those_that_have_one(run, change):
    name = change(run.model)
    with pytest.raises(ValueError, match=f"{name} has no sha256 in digests.json"):
        run.load_model()


def test_a_process_that_was_killed_while_it_saved(stopped):
    """Its folder has another name, and no digests where it was not whole."""
    half = stopped.checkpoints / ".saving" / "checkpoint-6"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    assert stopped.latest_checkpoint().name == "checkpoint-5"
    assert resume(stopped.path)["finished"]
    assert not half.exists()


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 11}


def saved(folder, dtype):
    model = RFAForCausalLM(preset("m2-sc-rfa", **SIZES)).to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_precision_is_the_saved_one(tmp_path, dtype):
    expected = saved(tmp_path, dtype).state_dict()
    model = read_model(tmp_path, RFAForCausalLM)
    assert model.dtype == model.config.dtype == dtype
    assert model.lm_head.weight.dtype == dtype
    for name, tensor in model.state_dict().items():  # the dynamics are of single precision in every model
        assert torch.equal(tensor.float(), expected[name].float()), name


def changed(folder, **values):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["dtype"]
    file.write_text(json.dumps(config | values))


@pytest.mark.parametrize("dtype", ["int8", 5, ["float32"]])
def test_no_other_precision(tmp_path, dtype):
    saved(tmp_path, torch.float32)
    changed(tmp_path, dtype=dtype)
    with pytest.raises(ValueError, match=r"dtype: got .* expected one of float16, bfloat16, float32, float64"):
        read_model(tmp_path, RFAForCausalLM)


def test_transformers_are_quiet_inside_and_as_before_afterwards(monkeypatch):
    def current():
        return logging.get_verbosity(), logging.is_progress_bar_enabled()

    before = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    with suppress(KeyError), quiet_transformers():
        assert current() == (logging.ERROR, False)
        raise KeyError
    assert current() == (logging.INFO, True)
    logging.set_verbosity(before)
