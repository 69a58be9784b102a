"""What a run writes: metrics, TensorBoard, checkpoints, its record."""

import json
import math

import numpy as np
import pytest
import torch
from cover import some
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rfa
from rfa.nn import HeadDynamics
from rfa_lab.data import prepare
from rfa_lab.evaluation import perplexities
from rfa_lab.training import RunFolder, TrainingSpec, train
from rfa_lab.training.callbacks import _per_head, read_metrics
from training.runs import MODEL, tiny_spec, write_corpus

DYNAMICS = {
    "decay",
    "process_noise",
    "key_noise",
    "query_noise",
    "noise_floor",
    "alpha",
    "robustness",  # nu_s
    "inverse_temperature",  # beta_s
}


def test_metrics_lines(finished):
    lines = read_metrics(RunFolder(finished))
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert [line["step"] for line in lines if "valid_loss" in line] == [3, 6, 8]
    for line in lines:
        assert line["tokens"] == line["step"] * 4 * 16
        assert line["epoch"] == pytest.approx(line["step"] / 25, abs=1e-6)
        assert set(line["dynamics"]) == {"0", "1"}
        assert all(set(heads) >= DYNAMICS for heads in line["dynamics"].values())
        assert all(len(values) == 4 for heads in line["dynamics"].values() for values in heads.values())
        assert all(key in line for key in ("grad_norm", "learning_rate")) or "valid_loss" in line
        if "valid_loss" in line:
            assert line["valid_perplexity"] == pytest.approx(math.exp(line["valid_loss"]))


def test_the_last_dynamics_are_the_models(finished):
    """As the operator takes them, and alpha = eta^2 - sigma^2 / (2 mu)."""
    model = RunFolder(finished).load_model()
    logged = read_metrics(RunFolder(finished))[-1]["dynamics"]
    for layer, module in model.head_dynamics().items():
        values = {name: value.tolist() for name, value in module().items() if name != "frequency"}
        mu, eta2, sigma2 = (values[name][2] for name in ("decay", "key_noise", "process_noise"))
        for name, value in values.items():
            assert logged[str(layer)][name] == pytest.approx(value, rel=1e-5)  # six digits are written
        assert mu > 0
        assert logged[str(layer)]["alpha"][2] == pytest.approx(eta2 - sigma2 / (2 * mu), rel=1e-4)
        assert logged[str(layer)]["alpha"][0] is None  # the head that does not decay never settles


def test_parts_of_the_noise_are_logged_one_by_one():
    dynamics = HeadDynamics(torch.zeros(4, 2), torch.zeros(4), noise="time_dependent", noise_parts=2)()
    logged = _per_head(dynamics)
    assert logged["rate_1"] == pytest.approx(dynamics["noise"].rate[:, 1].tolist(), rel=1e-5)
    assert {len(values) for values in logged.values()} == {4}


def test_tensorboard_holds_the_same(finished):
    board = EventAccumulator(str(finished / "tensorboard"))
    board.Reload()
    lines = read_metrics(RunFolder(finished))
    for name in ("loss", "grad_norm", "learning_rate", "valid_loss", "valid_perplexity"):
        expected = [(line["step"], line[name]) for line in lines if name in line]
        found = [(event.step, event.value) for event in board.Scalars(name)]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    found = {event.step: event.value for event in board.Scalars("layer 1/robustness/head 2")}
    expected = {line["step"]: line["dynamics"]["1"]["robustness"][2] for line in lines}
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("accumulate", "steps"), some([(3, [9, 18]), (1, [25, 50]), (2, [13, 26]), (40, [1, 2])], 2))
def test_validation_after_each_epoch(corpus, tmp_path, accumulate, steps):
    """25 batches an epoch; where they do not divide, the epoch's last step is of fewer batches."""
    spec = tiny_spec(corpus, "b1-rope", max_steps=None, eval_steps=None, epochs=2.0, accumulate=accumulate)
    record = train(spec, tmp_path / "run")
    lines = read_metrics(RunFolder(tmp_path / "run"))
    assert record["steps"] == steps[-1]
    assert [line["step"] for line in lines if "valid_loss" in line] == steps
    assert record["result"]["tokens"] == 2 * 100 * 16


def test_the_validation_loss_is_over_every_validation_block(tmp_path):
    valid = 37  # 2 blocks, no whole batch
    corpus = write_corpus(tmp_path / "corpus", valid=valid)
    record = train(tiny_spec(corpus, "b1-rope", max_steps=2), tmp_path / "run")
    stream = prepare(str(corpus), "bytes").streams["valid"]
    (row,) = perplexities(RunFolder(tmp_path / "run").load_model(), stream, [16])
    assert row["targets"] == (valid + 1) // 16 * 15
    assert record["result"]["valid_loss"] == pytest.approx(row["loss"], abs=1e-5)
    assert record["result"]["valid_perplexity"] == pytest.approx(row["perplexity"], rel=1e-4)


def test_valid_tokens(corpus, tmp_path):
    record = train(tiny_spec(corpus, "b1-rope", max_steps=2, valid_tokens=70), tmp_path / "run")
    stream = prepare(str(corpus), "bytes").streams["valid"]
    blocks = len(stream) // 16
    spread = [(2 * place + 1) * blocks // 8 for place in range(4)]  # 70 // 16 blocks, in the middle of fourths
    assert len(set(spread)) == 4 < blocks
    kept = np.concatenate([stream[16 * block : 16 * block + 16] for block in spread])
    (row,) = perplexities(RunFolder(tmp_path / "run").load_model(), kept, [16])
    assert record["result"]["valid_loss"] == pytest.approx(row["loss"], abs=1e-5)


def test_record(finished, corpus):
    record = json.loads((finished / "run.json").read_text())
    assert TrainingSpec.from_dict(record["spec"]) == tiny_spec(corpus)
    assert record["config"]["vocab_size"] == 257
    assert record["config"]["train_length"] == 16
    assert record["config"]["attention"]["prior"] == "lyapunov"
    assert {name: record["config"][name] for name in MODEL} == MODEL
    data = prepare(str(corpus), "bytes", splits=("train", "valid"))
    assert record["data"]["fingerprint"] == data.fingerprint
    assert record["data"]["tokens"] == {"train": 1601, "valid": 401}
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["rfa"] == rfa.__version__
    assert record["config"]["eos_token_id"] == 256
    result = record["result"]
    model = RunFolder(finished).load_model()
    assert record["finished"] is True
    assert record["steps"] == 8
    assert result["tokens"] == 8 * 4 * 16
    assert result["tokens_per_second"] > 0
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["valid_perplexity"] == pytest.approx(np.exp(result["valid_loss"]))
    assert result["valid_loss"] == read_metrics(RunFolder(finished))[-1]["valid_loss"]
