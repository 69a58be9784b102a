"""Checkpoints and configurations that do not fit: an error that names what is wrong, and no parameters at random."""

import json
import pickle
import re
from contextlib import nullcontext

import pytest
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from transformers.distributed import DistributedConfig

from rfa.models import RFAConfig, RFAForCausalLM, RFATimeSeriesConfig
from rfa.version import __version__

from .small import small


@pytest.fixture
def folder(tmp_path):
    small("m2-sc-rfa").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), encoding="utf-8")


def change(folder, function):
    path = folder / "model.safetensors"
    state = load_file(path)
    function(state)
    save_file(state, path, metadata={"format": "pt"})


ROBUSTNESS = "model.layers.1.attention.dynamics.raw_robustness"
FAULTS = {
    "a parameter is missing": (lambda state: state.pop(ROBUSTNESS), {}, rf"without .*{re.escape(ROBUSTNESS[6:])}"),
    "another head": (
        lambda state: state.update({"lm_head.other": state["model.norm.weight"].clone()}),
        {},
        r"with the unknown lm_head\.other \(1 in all\)",
    ),
    "another configuration": (None, {"num_hidden_layers": 3}, r"without .*layers\.2\..*, \.\.\. \(\d\d in all\)"),
}


@pytest.mark.parametrize("reader", [AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit(folder, reader, fault):
    function, fields, says = FAULTS[fault]
    if function is not None:
        change(folder, function)
    rewrite(folder, **fields)
    with pytest.raises(ValueError, match=rf"^checkpoint: got .*{says}"):
        reader.from_pretrained(folder)
    _, info = reader.from_pretrained(folder, output_loading_info=True)  # the caller judges
    assert info["missing_keys"] or info["unexpected_keys"]


class Code:
    """What a pickle could run."""

    def __reduce__(self):
        return pytest.fail, ("code was run",)


@pytest.mark.parametrize("alone", [True, False])
def test_a_pickle_is_not_run(folder, alone):
    """Beside safetensors it is not read."""
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Code()}))
    if alone:
        (folder / "model.safetensors").unlink()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed") if alone else nullcontext():
        RFAForCausalLM.from_pretrained(folder)


HUGE = {"vocab_size": 10**12, "hidden_size": 10**12, "num_hidden_layers": 10**7, "num_attention_heads": 10**9}
HUGE |= {"intermediate_size": 10**12, "train_length": 10**15, "num_labels": 10**12}


@pytest.mark.parametrize("name", HUGE)
def test_sizes_beyond_all_memory(folder, name):
    rewrite(folder, **{name: HUGE[name]})
    with pytest.raises(ValueError, match=f"^{name}: got {HUGE[name]}, expected at most"):
        RFAForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_missing(tmp_path, tied):
    """Its own class does not draw it at random. Another class may."""
    small("m2-sc-rfa", tie_word_embeddings=tied).save_pretrained(tmp_path)
    name = "lm_head.bias" if tied else "lm_head.weight"
    change(tmp_path, lambda state: state.pop(name))
    with pytest.raises(ValueError, match=rf"^checkpoint: got .*without {name} \(1 in all\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"^checkpoint: got .*without {name} \(1 in all\)"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, causal=False)  # it has the same head
    if tied:
        with pytest.raises(ValueError, match=rf"^checkpoint: got .*without {name} \(1 in all\)"):
            RFAForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)


@pytest.mark.parametrize(
    "given",
    [
        {"tp_plan": "auto"},
        {"tp_size": 2},
        {"distributed_config": DistributedConfig(tp_plan={"model.embed_tokens": "rowwise"})},
        {"distributed_config": DistributedConfig(tp_size=1)},
    ],
)
def test_a_plan_of_tensor_parallel_is_not_ignored(folder, given):
    with pytest.raises(ValueError, match=r"^tp_\w+: got .*, expected None: rfa.parallel.fully_sharded"):
        AutoModelForCausalLM.from_pretrained(folder, **given)


@pytest.mark.parametrize("version", ["99.0.0", "0.99", "tomorrow"])
def test_a_file_of_a_newer_version(folder, version):
    assert json.loads((folder / "config.json").read_text("utf-8"))["rfa_version"] == __version__
    rewrite(folder, rfa_version=version)
    for read in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(
            ValueError, match=f"^rfa_version: got '{version}', expected at most {__version__}, the inst"
        ):
            read.from_pretrained(folder)
    with pytest.raises(ValueError, match=f"^rfa_version: got '{version}'"):
        RFATimeSeriesConfig(rfa_version=version)


@pytest.mark.parametrize("version", [f"{__version__}.post1", "0.0.1"])
def test_other_versions_are_read(folder, version):
    assert RFAConfig.from_dict({"rfa_version": version, "hidden_size": 64}).hidden_size == 64
