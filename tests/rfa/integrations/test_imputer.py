"""The network that imputes with PyPOTS' interface."""

import numpy as np
import pytest
import torch

from rfa.integrations.imputer import RFANetworkImputer, _hidden
from rfa.models import RFAForTimeSeries

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def waves(samples, seed, missing=0.3, steps=10):
    """Two channels that mirror each other, at irregular times; with gaps, and without."""
    random = np.random.default_rng(seed)
    times = (0.5 + 0.6 * random.random((samples, steps))).cumsum(1)
    phase = 2 * np.pi * random.random((samples, 1))
    truth = 5 + np.stack([np.sin(times + phase), -np.sin(times + phase)], -1)
    holes = random.random(truth.shape) < missing
    holes[:, 4:6] = True
    return {"X": np.where(holes, np.nan, truth), "X_ori": truth, "times": times}


@pytest.fixture(scope="module")
def fitted():
    return RFANetworkImputer(epochs=30, learning_rate=2e-2, **SMALL).fit(waves(128, 0))


def interpolated(given):
    """By straight lines in time, channel by channel."""
    found = given["X"].copy()
    for window, times in zip(found, given["times"], strict=True):
        for channel in window.T:
            seen = ~np.isnan(channel)
            channel[~seen] = np.interp(times[~seen], times[seen], channel[seen])
    return found


def test_it_learns_what_one_channel_says_of_the_other_and_keeps_readings(fitted):
    given = waves(128, 1)
    result = fitted.predict(given)
    found, holes = result["imputation"], np.isnan(given["X"])
    np.testing.assert_array_equal(found[~holes], given["X"][~holes])
    np.testing.assert_array_equal(fitted.impute(given), found)
    single = holes & ~holes.all(-1, keepdims=True)  # the other channel is seen
    error = np.mean((found - given["X_ori"])[single] ** 2)
    lines = np.mean((interpolated(given) - given["X_ori"])[single] ** 2)
    assert error < 0.75 * lines  # 0.58 of it after two seconds of training
    assert (result["deviation"][~holes] == 0).all()
    inside = np.abs(found - given["X_ori"])[holes] < 2 * result["deviation"][holes]
    assert inside.mean() > 0.85
    assert fitted.losses[-1] < fitted.losses[0]


def test_a_window_is_filled_from_itself_alone_and_in_its_own_units(fitted):
    """Other windows of the batch change nothing; an affine change of values is one of the result."""
    given = waves(40, 2, missing=0.1)  # windows with enough readings for a scale of their own
    found = fitted.impute(given)
    alone = {name: given[name][35:36] for name in ("X", "times")}
    np.testing.assert_allclose(fitted.impute(alone), found[35:36], rtol=1e-4)
    moved = fitted.impute({**given, "X": 100 * given["X"] + 7, "times": given["times"] + 50})
    np.testing.assert_allclose(moved, 100 * found + 7, rtol=1e-4)


def test_the_state_is_a_model_of_transformers(fitted, tmp_path):
    fitted.save_pretrained(tmp_path)
    given = waves(3, 3)
    again = RFANetworkImputer.from_pretrained(tmp_path, batch_size=2)
    np.testing.assert_allclose(again.impute(given), fitted.impute(given), rtol=1e-6)  # batches of 2 and 3 round apart
    assert not RFAForTimeSeries.from_pretrained(tmp_path).config.causal


def test_the_best_weights_on_a_validation_set_are_kept():
    """A rate at which errors rise and fall; the seed decides everything, and the caller's random state stays."""
    valid = waves(32, 5)
    errors = []
    state = torch.random.get_rng_state()
    for epochs in (1, 2, 3, 4):  # the schedule is that of four epochs, so patience alone ends one earlier
        trained = RFANetworkImputer(epochs=4, learning_rate=5e-2, patience=epochs, **SMALL).fit(waves(64, 4), valid)
        holes = np.isnan(valid["X"])
        errors.append(np.mean((trained.impute(valid) - valid["X_ori"])[holes] ** 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert errors == sorted(errors, reverse=True)  # more epochs can only find better weights
    again = RFANetworkImputer(epochs=4, learning_rate=5e-2, patience=4, **SMALL).fit(waves(64, 4), valid)
    np.testing.assert_array_equal(again.impute(valid), trained.impute(valid))


def test_at_least_one_reading_is_hidden_and_one_is_seen():
    torch.manual_seed(0)
    values = torch.full((400, 6, 2), torch.nan)
    values[:, 1, 0] = values[:, 4, 1] = 1.0
    values[::2] = 1.0
    hidden, seen = _hidden(values, 0.2), ~values.isnan()
    assert not (hidden & ~seen).any()
    assert hidden.flatten(1).any(1).all()
    assert (seen & ~hidden).flatten(1).any(1).all()
    blocks = (hidden == hidden[..., :1]).all((1, 2))[::2]
    assert 0.4 < blocks.float().mean() < 0.75  # blocks hide all features of a row


def test_what_is_wrong_is_named(fitted):
    given = waves(4, 6)
    expected = {
        r"test_set: got 'ndarray', expected a dictionary with X": given["X"],
        r"X: got \(4, 10\), expected \(samples, steps, features\)": {"X": given["X"][..., 0]},
        r"times: got \(3,\), expected \(10,\) or \(4, 10\)": {"X": given["X"], "times": [1, 2, 3]},
        r"values: got .* expected floating-point .* with 2 channels": {"X": given["X"][..., :1]},
        r"X: got 'no reading in the windows \[1\]', expected a reading in each": {
            "X": np.where(np.arange(4)[:, None, None] == 1, np.nan, given["X"])
        },
    }
    for message, wrong in expected.items():
        with pytest.raises(ValueError, match=message):
            fitted.impute(wrong)
    new = RFANetworkImputer(patience=2)
    with pytest.raises(ValueError, match=r"fit: got 'no training yet', expected fit"):
        new.impute(given)
    with pytest.raises(ValueError, match=r"patience: got 2, expected val_set with it"):
        new.fit(given)
    with pytest.raises(ValueError, match=r"X_ori: got 'no reading that X lacks'"):
        new.fit(given, {"X": given["X_ori"], "X_ori": given["X_ori"]})
    with pytest.raises(ValueError, match=r"train_set: got 'windows without readings'"):
        RFANetworkImputer().fit({"X": np.full((3, 4, 1), np.nan)})
    with pytest.raises(ValueError, match=r"hold_out: got 1.5, expected a number between 0 and 1"):
        RFANetworkImputer(hold_out=1.5)
