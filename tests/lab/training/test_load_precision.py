"""The precision of a saved model, as its configuration names it."""

import json

import pytest
import torch

from rfa.models import RFAForCausalLM, preset
from rfa.models.saved_files import read_model

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


def test_the_precision_by_its_older_name(tmp_path):
    saved(tmp_path, torch.bfloat16)
    changed(tmp_path, torch_dtype="bfloat16")
    assert read_model(tmp_path, RFAForCausalLM).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", 5, ["float32"]])
def test_no_other_precision(tmp_path, dtype):
    saved(tmp_path, torch.float32)
    changed(tmp_path, dtype=dtype)
    with pytest.raises(ValueError, match=r"dtype: got .* expected one of float16, bfloat16, float32, float64"):
        read_model(tmp_path, RFAForCausalLM)
