"""The 3-gram against dictionaries that follow the paper's formulas."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from rfa_lab.data import prepare
from rfa_lab.evaluation import probe_layout
from rfa_lab.evaluation.probes import make_trial
from rfa_lab.evaluation.trigram import Trigram, evaluate_trigram


def slow(blocks, vocabulary):
    """p(token | context) from counts in dictionaries (Chen and Goodman 1999), and the discounts by order and count."""
    counts = {3: Counter(tuple(block[k : k + 3]) for block in blocks.tolist() for k in range(len(block) - 2))}
    for order in (2, 1):  # the number of different tokens before
        before = defaultdict(set)
        for gram in counts[order + 1]:
            before[gram[1:]].add(gram[0])
        counts[order] = Counter({gram: len(tokens) for gram, tokens in before.items()})
    cuts = {}
    for order, of in counts.items():
        n = Counter(of.values())
        cuts[order] = {1: 0.5, 2: 0.5, 3: 0.5}
        if all(n[times] for times in (1, 2, 3, 4)):
            y = n[1] / (n[1] + 2 * n[2])
            wanted = {c: c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3)}
            if min(wanted.values()) > 0:
                cuts[order] = wanted

    def p(token, context):
        order = len(context) + 1
        below = 1 / vocabulary if order == 1 else p(token, context[1:])
        of = {gram[-1]: count for gram, count in counts[order].items() if gram[:-1] == context}
        if not of:
            return below
        cut = {each: cuts[order][min(count, 3)] for each, count in of.items()}
        own = of[token] - cut[token] if token in of else 0
        return (own + sum(cut.values()) * below) / sum(of.values())

    return p, cuts


def blocks_of(count, length, vocabulary, seed=0):
    """Blocks with many repetitions and some rare tokens; the last token of the vocabulary never occurs."""
    drawn = np.random.default_rng(seed).zipf(1.6, (count, length))
    return np.minimum(drawn, vocabulary - 1).astype(np.uint16) - 1


@pytest.mark.parametrize(
    ("count", "length", "estimated"),
    [(60, 16, True), (2, 4, False)],
)
def test_it_is_the_slow_one_and_sums_to_one(count, length, estimated):
    vocabulary = 9
    blocks = blocks_of(count, length, vocabulary)
    model, (p, cuts) = Trigram(blocks, vocabulary), slow(blocks, vocabulary)
    assert (cuts[3][1] != 0.5) == estimated
    u, v, w = (each.ravel() for each in np.meshgrid(*3 * [np.arange(vocabulary)], indexing="ij"))
    found = model.probability(u, v, w)
    short = model.probability(None, v, w)
    wanted = [p(int(c), (int(a), int(b))) for a, b, c in zip(u, v, w, strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    np.testing.assert_allclose(short, [p(int(c), (int(b),)) for b, c in zip(v, w, strict=True)], rtol=1e-12)
    for each in (found, short):
        assert each.min() > 0
        np.testing.assert_allclose(each.reshape(-1, vocabulary).sum(1), 1, rtol=1e-12)


@pytest.mark.parametrize(
    ("blocks", "vocabulary", "message"),
    [
        (np.zeros((2, 2), int), 4, r"blocks: got shape \(2, 2\), expected at least one block of 3"),
        (np.zeros((0, 8), int), 4, "blocks: got shape"),
        (np.zeros(8, int), 4, "blocks: got shape"),
        (np.full((2, 8), 4), 4, "blocks: got ids from 4 to 4, expected 0 to 3"),
        (np.zeros((2, 8), int), 2**21 + 1, "vocabulary: got 2097153, expected 1 to 20971"),
        (np.zeros((2, 8), int), 0, "vocabulary: got 0"),
    ],
)
def test_refuses(blocks, vocabulary, message):
    with pytest.raises(ValueError, match=message):
        Trigram(blocks, vocabulary)


def test_it_scores_the_targets_of_the_protocols(corpus):
    """Token by token: the second of a window has a context of one token, all later ones of two."""
    text = prepare(str(corpus), "bytes")
    train = text.streams["train"][:1600].reshape(100, 16)
    stream = np.r_[np.arange(65, 91), text.streams["test"]]  # more letters, for the keys of the probes
    model, (p, _) = Trigram(train, 257), slow(train, 257)
    given = {"train_length": 16, "lengths": [32, 16], "protocols": {"blocks": 320, "matched": None, "strided": None}}
    found = evaluate_trigram(model, stream, ["a"], text.tokenizer, **given, by_position=True, passkey=True)
    assert set(found["passkey"]) == {"passkey", "repeat"}

    def loss(place, start):
        return -np.log(p(int(stream[place]), tuple(map(int, stream[max(place - 2, start) : place]))))

    for row in found["evaluations"]["matched"]["rows"]:
        stops = range(32, len(stream) + 1, 8)
        losses = [loss(place, stop - row["length"]) for stop in stops for place in range(stop - 8, stop)]
        assert (row["targets"], row["loss"]) == (len(losses), pytest.approx(np.mean(losses), rel=1e-12))
    (row,) = [row for row in found["evaluations"]["strided"]["rows"] if row["length"] == 32]
    losses = [loss(place, 0) for place in range(1, len(stream))]  # later windows begin more than two tokens before
    assert (row["targets"], row["loss"]) == (len(losses), pytest.approx(np.mean(losses), rel=1e-12))
    segments = [(2 * part + 1) * (len(stream) // 32) // 20 for part in range(10)]  # ten of them, evenly spaced
    losses = np.array([[loss(32 * k + place, 32 * k) for place in range(1, 32)] for k in segments])
    by = found["by_position"]
    np.testing.assert_allclose(by["loss"], losses.mean(0), rtol=1e-12)
    books = found["evaluations"]["blocks"]["books"]
    assert books["a"]["32"] == [pytest.approx(losses.sum()), losses.size]
    for kind, probe in found["passkey"].items():
        layout, distances = probe_layout(kind, stream, 16, 32, text.tokenizer)
        assert [row["distance"] for row in probe["rows"]] == distances
        row = probe["rows"][-1]
        trials = [make_trial(layout, stream, distances[-1], (0, distances[-1], k)).ids.tolist() for k in range(64)]
        keys = range(len(trials[0]) - layout.key, len(trials[0]))
        wanted = [np.mean([-np.log(p(ids[k], tuple(ids[k - 2 : k]))) for ids in trials]) for k in keys]
        np.testing.assert_allclose(row["loss_by_token"], wanted, rtol=1e-12)
