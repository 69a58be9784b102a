"""Probes of models that copy, that copy from nearby only, and that ignore the past."""

import math

import numpy as np
import pytest
import torch

from rfa_lab.data import load_tokenizer
from rfa_lab.evaluation import probe
from rfa_lab.evaluation.probes import CANDIDATES, _layout, make_trial

from .test_perplexity import tiny

VOCABULARY = 257
BYTES = load_tokenizer("bytes")
GIVEN = {"train_length": 128, "longest": 512, "tokenizer": BYTES}


@pytest.fixture(scope="module")
def stream():
    return np.random.default_rng(0).permutation(np.repeat(np.arange(256), 40)).astype(np.uint16)


class Copies(torch.nn.Module):
    """Sure of the token that followed the last `suffix` tokens when they stood in the last `window` tokens before."""

    def __init__(self, suffix, window=10**6, sure=20.0):
        super().__init__()
        self.suffix, self.window, self.sure, self.device = suffix, window, sure, torch.device("cpu")
        self.config = type("Config", (), {"vocab_size": VOCABULARY})
        self.lm_head = torch.nn.Identity()

    def model(self, ids, use_cache):
        logits = torch.zeros(*ids.shape, VOCABULARY)
        for row, tokens in enumerate(ids.tolist()):
            seen = {}
            for place in range(self.suffix - 1, len(tokens)):
                suffix = tuple(tokens[place - self.suffix + 1 : place + 1])
                if suffix in seen and place - seen[suffix] <= self.window:
                    logits[row, place, tokens[seen[suffix] + 1]] = self.sure
                seen[suffix] = place
        return type("Output", (), {"last_hidden_state": logits})


class LastToken(Copies):
    """Knows the last token only."""

    def model(self, ids, use_cache):
        table = 3 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))
        return type("Output", (), {"last_hidden_state": table[ids]})


SURE = 20 - math.log(math.exp(20) + VOCABULARY - 1)


@pytest.mark.parametrize("kind", ["passkey", "repeat"])
def test_the_loss_without_the_first_copy(stream, kind):
    """It is the most that a copy can gain, and a model that is sure of it gains all but the loss that is left."""
    model = LastToken(2)
    rows = probe(kind, model, stream, **GIVEN, trials=5, seed=3)["rows"]
    layout = _layout(kind, stream, 128, BYTES)
    for row in rows:
        trials = [make_trial(layout, stream, row["distance"], (3, row["distance"], k)) for k in range(5)]
        ids = torch.from_numpy(np.stack([trial.control for trial in trials]))
        known = model.model(ids, False).last_hidden_state[:, -layout.key - 1 : -1].log_softmax(-1)
        losses = -known.gather(-1, ids[:, -layout.key :, None])[..., 0]
        np.testing.assert_allclose(row["loss_by_token"], losses.mean(0), rtol=1e-6)
    copies = probe("repeat", Copies(2), stream, **GIVEN, trials=5, seed=3)["rows"][0]
    assert copies["loss_by_token"] == pytest.approx([math.log(VOCABULARY)] * 16, rel=0.3)  # near a uniform guess
    assert all(gain <= loss for gain, loss in zip(copies["by_token"], copies["loss_by_token"], strict=True))


def test_trials(stream):
    layout = _layout("passkey", stream, 128, BYTES)
    for distance in (32, 64, 500):
        trial = make_trial(layout, stream, distance, (0, distance, 1))
        assert len(trial.ids) == len(trial.control) == layout.lead + len(layout.cue) + distance + layout.key
        key, first = trial.ids[-3:], len(trial.ids) - 3 - distance
        np.testing.assert_array_equal(trial.ids[first : first + 3], key)
        np.testing.assert_array_equal(np.flatnonzero(trial.ids != trial.control), np.arange(first, first + 3))
        assert bytes(trial.ids[first - len(layout.cue) : first].tolist()).decode() == " The secret words are"
        np.testing.assert_array_equal(trial.ids[-3 - len(layout.cue) : -3], layout.cue)
        assert len({*trial.candidates, *key[1:], *trial.control[first : first + 3]}) == CANDIDATES + 5
        assert trial.candidates[0] == key[0]
        assert all(chr(token).isalpha() for token in (*trial.candidates, *key))
        again = make_trial(layout, stream, distance, (0, distance, 1))
        assert all(np.array_equal(mine, other) for mine, other in zip(trial, again, strict=True))
        assert not np.array_equal(make_trial(layout, stream, distance, (0, distance, 2)).ids, trial.ids)


def test_a_model_that_copies_finds_the_passkey(stream):
    result = probe("passkey", Copies(4), stream, **GIVEN)
    assert [row["distance"] for row in result["rows"]] == [32, 64, 128, 256, 512]
    assert (result["chance"], result["key_tokens"], result["trials"]) == (1 / 16, 3, 64)
    for row in result["rows"]:
        # sure of x_k after x, and after y of y_1, whose place x_1 does not take: then it has never seen x
        first = SURE - (0 - math.log(math.exp(20) + VOCABULARY - 1))
        assert row["by_token"] == pytest.approx([first, SURE + math.log(VOCABULARY), SURE + math.log(VOCABULARY)])
        assert row["score"] == pytest.approx(np.mean(row["by_token"]))
        assert row["accuracy"] == 1
        assert row["stderr"] == pytest.approx(0, abs=1e-6)
        assert len(row["scores"]) == 64


@pytest.mark.parametrize("name", ["b1-rope", "m2-sc-rfa"])
def test_a_model_by_hand(stream, name):
    """One trial after the other, from the model's own logits."""
    model = tiny(name, vocab_size=VOCABULARY)
    seen = []
    given = {**GIVEN, "longest": 64, "trials": 3, "seed": 5}
    result = probe("passkey", model, stream, **given, progress=lambda *step: seen.append(step))
    layout = _layout("passkey", stream, 128, BYTES)
    for row in result["rows"]:
        for trial, score in enumerate(row["scores"]):
            made = make_trial(layout, stream, row["distance"], (5, row["distance"], trial))
            expected = 0.0
            for sign, ids in ((1, made.ids), (-1, made.control)):
                with torch.no_grad():
                    logits = model(torch.from_numpy(ids)[None]).logits[0, -4:-1].double().log_softmax(-1)
                expected += sign * float(logits[range(3), made.ids[-3:]].mean())
            assert score == pytest.approx(expected, abs=1e-5)  # float32 logits of order 1
        assert row["stderr"] == pytest.approx(np.std(row["scores"], ddof=1) / 3**0.5)
    assert seen[-1][0] == seen[-1][1]
    assert result == probe("passkey", model, stream, **given)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("needle", {}, "kind: got 'needle', expected one of passkey, repeat"),
        ("passkey", {"trials": 1}, "trials: got 1, expected at least 2"),
        ("passkey", {"train_length": 16, "longest": 16}, "longest: got 16 for a training length of 16"),
    ],
)
def test_bad_input(stream, kind, changes, message):
    with pytest.raises(ValueError, match=message):
        probe(kind, Copies(4), stream, **{**GIVEN, **changes})
