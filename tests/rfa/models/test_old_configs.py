"""Old `config.json` files, whose attention has flat names: one of each preset, and what its model computed.

`old_configs/presets.json` was written by the code of commit 52f6773. Each entry has the file, the shapes of one
attention layer's state, and logits in float64 of a model whose weights are sines, with the dynamics at their start.
"""

import json
from pathlib import Path

import pytest
import torch
from cover import cover, some
from transformers import AutoConfig

from rfa.models import PRESETS, RFAConfig, RFAForCausalLM, preset
from rfa.models.configuration import VERSION
from rfa.models.flat import FLAT_NAMES, KINDS, flat_record
from rfa.models.saved_files import read_config
from rfa.version import __version__

OLD = json.loads((Path(__file__).parent / "old_configs" / "presets.json").read_text("utf-8"))
READERS = {
    "transformers": AutoConfig.from_pretrained,
    "ours": read_config,
    "one file": lambda folder: RFAConfig.from_json_file(folder / "config.json"),
}
NEWER = {  # flat names that no old file has
    "clock": "times",
    "slow_modes": "rotate",
    "normalise_states": False,
    "taps": False,
    "output_gain": False,
    "gated_heads": 1.0,
}
NEWER_OF_A_KIND = {  # and not every kind has
    "sink": False,
    "learn_noise_floor": False,
    "process_noise_as": "rate",
    "noise_parts": 2,
    "source_prior": "uniform",
}
SIZES = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "train_length": 8}


def filled(config):
    model = RFAForCausalLM(config)
    with torch.no_grad():
        for place, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if ".dynamics." not in name:
                number = torch.arange(1, parameter.numel() + 1, dtype=torch.float64)
                parameter.copy_((0.5 * torch.sin((place + 1) * number)).reshape(parameter.shape))
    return model.double().eval()


def write(folder, record):
    (folder / "config.json").write_text(json.dumps(record), "utf-8")


def test_there_is_one_of_each():
    assert OLD.keys() <= PRESETS.keys()
    assert len(OLD) == 27
    assert all(
        entry["config"].keys() >= FLAT_NAMES - NEWER.keys() - NEWER_OF_A_KIND.keys() - {"dynamics"}
        for entry in OLD.values()
    )


@cover(1, name=OLD, read=READERS)
def test_an_old_file_is_the_preset(name, read, tmp_path):
    write(tmp_path, OLD[name]["config"])
    config = READERS[read](tmp_path)
    assert isinstance(config, RFAConfig)
    assert config.attention == preset(name, **SIZES).attention
    assert {size: getattr(config, size) for size in SIZES} == SIZES


@pytest.mark.parametrize("name", some(OLD, 14))
def test_an_old_file_gives_the_old_model(name, tmp_path):
    write(tmp_path, OLD[name]["config"])
    model = filled(AutoConfig.from_pretrained(tmp_path))
    shapes = {key: list(value.shape) for key, value in model.model.layers[0].attention.state_dict().items()}
    assert shapes == OLD[name]["attention"]
    with torch.no_grad():
        logits = model(torch.arange(11)[None] * 5 % 13).logits[0, -1]
    # banks and starts are of float32, and another machine's sines and exponentials may round them otherwise
    torch.testing.assert_close(logits, torch.tensor(OLD[name]["logits"], dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OLD)
def test_flat_and_nested_records_say_the_same(name):
    """For readers of result files, which are of either form."""
    old = OLD[name]["config"]
    flat = flat_record(preset(name, **SIZES).to_diff_dict())
    del flat["transformers_version"]
    newer = {"attention_dropout": 0.0, "num_key_value_heads": 4, "causal": True, VERSION: __version__, **NEWER}
    newer |= {key: value for key, value in NEWER_OF_A_KIND.items() if key in flat}
    assert {key: old[key] for key in flat if key in old} | newer == flat
    assert {"prior", "damping"} <= flat.keys()
    assert flat_record(old) == old


@pytest.mark.parametrize("kind", KINDS)
def test_a_flat_record_of_each_kind_has_what_results_read(kind):
    """A result's schema requires `prior` and `damping`; posterior routing has only one prior."""
    chosen = {
        "filter": {},
        "routing": {"aggregation": "routing"},
        "dot_product": {"score": "dot_product", "prior": "alibi"},
        "content": {"dynamics": "content"},
    }[kind]
    flat = flat_record(RFAConfig(**SIZES, **chosen).to_diff_dict())
    assert KINDS[kind].chosen_by.items() <= flat.items()
    assert {"prior", "damping"} <= flat.keys()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("b1-rope", {"gate": False}),
        ("b1-rope", {"horizon": 0.7}),
        ("b1-rope", {"initial_slopes": "alibi"}),
        ("x3-rotation-riccati", {"decay": "spectral"}),
        ("m2-sc-rfa", {"prior": "window"}),
        ("m2-sc-rfa", {"aggregation": "routing", "gate": False}),
        ("m2-sc-rfa", {"score": "cosine"}),
        ("m2-sc-rfa", {"aggregation": ["routing"]}),
    ],
    ids=str,
)
def test_a_damaged_old_file_is_refused(name, fault, tmp_path):
    write(tmp_path, OLD[name]["config"] | fault)
    for read in (AutoConfig.from_pretrained, read_config):
        with pytest.raises(ValueError, match=rf"^{list(fault)[-1]}: got ") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)
