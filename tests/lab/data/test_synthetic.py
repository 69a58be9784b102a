"""Synthetic tasks against slow readers: each answer follows from the tokens before it, and from nothing less."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import binom, chisquare, t

from rfa_lab.data.synthetic import (
    TASKS,
    AssociativeRecall,
    FlipFlop,
    GappedCopy,
    GappedInduction,
    GroupWord,
    NoisyRecall,
    StaleRecall,
    TimedRecall,
)
from rfa_lab.data.synthetic import even_permutations as permutations

NOTHING = -100


def recalled(task, tokens, times):
    """The value that stood after a key more often than any other; a filler is no key."""
    said, answers = {}, [NOTHING] * len(tokens)
    keys = range(task.keys)
    statements = 2 * task.pairs * task.repeats
    for key, value in zip(tokens[:statements:2], tokens[1:statements:2], strict=True):
        said.setdefault(key, Counter())[value] += 1
    for place, token in list(enumerate(tokens))[statements:]:
        ranked = said.get(token, Counter()).most_common(2) if token in keys else []
        if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]):
            answers[place] = ranked[0][0]
    return answers


def bound_last(task, tokens, times):
    """The value that stood after a key the last time that anything did."""
    statements = 2 * task.pairs * task.repeats
    said = dict(zip(tokens[:statements:2], tokens[1:statements:2], strict=True))
    return [NOTHING] * statements + [said.get(token, NOTHING) for token in tokens[statements:]]


def copied(task, tokens, times):
    mark = tokens.index(task.vocabulary - 1)
    string = [token for token in tokens[:mark] if token < task.alphabet]
    return [NOTHING] * mark + string[: len(tokens) - mark]


def induced(task, tokens, times):
    answers, seen = [NOTHING] * len(tokens), []
    for place, token in enumerate(tokens):
        if token in seen:
            answers[place] = seen[seen.index(token) + 1]
        elif token < task.alphabet:
            seen.append(token)
    return answers


def read_back(task, tokens, times):
    answers, kept = [NOTHING] * len(tokens), None
    for place in range(0, len(tokens), 2):
        if tokens[place] == 0:
            kept = tokens[place + 1]
        elif tokens[place] == 1:
            answers[place] = kept
    return answers


def multiplied(task, tokens, times):
    """Parity by counting, A5 by moving five things."""
    answers = [NOTHING]
    if task.group == "parity":
        return answers + [sum(tokens[:place]) % 2 for place in range(2, len(tokens) + 1)]
    things = list(range(5))
    for place, token in enumerate(tokens):
        moved = permutations()[token]
        things = [moved[thing] for thing in things]  # where each of five things is now
        if place:
            answers.append(permutations().index(tuple(things)))
    return answers


def said_then(task, tokens, times):
    answers = [NOTHING] * len(tokens)
    for place, token in enumerate(tokens):
        if token == task.vocabulary - 1:
            (then,) = [
                other
                for other, time in zip(tokens, times, strict=True)
                if abs(times[place] - task.lag - time) < 1e-9 and other != token
            ]
            answers[place] = then
    return answers


CASES = [
    (AssociativeRecall(), 64, recalled),
    (AssociativeRecall(), 200, recalled),
    (AssociativeRecall(pairs=1, keys=1, values=3, filler=1), 3, recalled),
    (AssociativeRecall(pairs=5, keys=5), 16, recalled),
    (NoisyRecall(repeats=3, spread=0), 64, recalled),
    (StaleRecall(pairs=4, repeats=5), 64, bound_last),
    (StaleRecall(), 64, recalled),
    (GappedCopy(), 64, copied),
    (GappedCopy(symbols=3, alphabet=3, filler=1), 6, copied),
    (GappedInduction(), 65, induced),
    (GappedInduction(symbols=2, alphabet=2), 4, induced),
    (FlipFlop(), 64, read_back),
    (FlipFlop(write=0.4, read=0.6, values=5), 32, read_back),
    (GroupWord(), 33, multiplied),
    (GroupWord(group="a5"), 33, multiplied),
    (TimedRecall(), 64, said_then),
    (TimedRecall(), 512, said_then),
    (TimedRecall(questions=2, lag=3.5, jitter=0.0), 8, said_then),
]
SHORT = [
    AssociativeRecall(values=4), GappedCopy(symbols=2, alphabet=4), GappedInduction(symbols=2, alphabet=4),
    AssociativeRecall(pairs=2, keys=4, values=4, repeats=3, corrupted=0.3), FlipFlop(), GroupWord(),
    GroupWord(group="a5"), TimedRecall(values=4), NoisyRecall(values=4, repeats=3), StaleRecall(values=4, repeats=3),
]  # fmt: skip


def draw(task, batch, length, seed=0):
    return task.sample(batch, length, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("task", "length", "reader"), CASES)
def test_a_slow_reader_finds_every_answer(task, length, reader):
    batch = draw(task, 20, length)
    times = [None] * 20 if batch.times is None else batch.times.tolist()
    assert batch.tokens.min() >= 0
    assert batch.tokens.max() < task.vocabulary
    for tokens, labels, at in zip(batch.tokens.tolist(), batch.labels.tolist(), times, strict=True):
        assert labels == reader(task, tokens, at)
        assert max(labels) >= 0  # something is asked


def test_corrupted_keys_are_read_by_the_majority():
    """The answers that are asked are the majority's; of ties and of false majorities nothing is asked."""
    task = AssociativeRecall(pairs=4, repeats=5, corrupted=0.3, values=1000)
    batch = draw(task, 200, 50)
    asked = 0
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        answers = recalled(task, tokens, None)
        for answer, label in zip(answers, labels, strict=True):
            assert label in (answer, NOTHING)
            asked += label != NOTHING
    assert 0.8 < asked / 800 < 1  # by the binomial, 2 or fewer of 5 are true for 16 % of the keys


def test_the_share_of_corrupted_keys_is_the_one_asked_for():
    """Of a hundred thousand values each pair has its own: statements of it with another key than most are wrong."""
    task = AssociativeRecall(pairs=8, keys=8, values=100_000, repeats=9, corrupted=0.2)
    batch = draw(task, 25, 152)
    wrong = 0
    for tokens in batch.tokens.tolist():
        keys_of = {}
        for key, value in zip(tokens[:144:2], tokens[1:144:2], strict=True):
            keys_of.setdefault(value, Counter())[key] += 1
        assert sum(map(Counter.total, keys_of.values())) == 72
        wrong += sum(found.total() - max(found.values()) for found in keys_of.values())
    low, high = binom(25 * 72, 0.2).interval(0.9999)  # a false majority of 9 has a chance of 1e-5 a pair
    assert low <= wrong <= high


@pytest.mark.parametrize(("spread", "freedom"), [(1.0, 1), (0.5, 3)])
def test_readings_are_off_by_the_tails_asked_for(spread, freedom):
    """Each key is read so many times, and the errors of its readings have the shares of a rounded t distribution."""
    task = NoisyRecall(pairs=3, keys=5, values=21, repeats=7, spread=spread, freedom=freedom)
    batch, errors = draw(task, 500, 60), []
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        (true,) = [{token: label for token, label in zip(tokens, labels, strict=True) if label != NOTHING}]
        assert Counter(tokens[:42:2]) == dict.fromkeys(true, 7)
        errors += [(value - true[key]) % 21 for key, value in zip(tokens[:42:2], tokens[1:42:2], strict=True)]
    around = np.arange(-100 * 21 - 10, 100 * 21 + 11)  # as many of each place; a hundred turns hold 99.9 % of the first
    shares = np.diff(t.cdf(np.append(around - 0.5, around[-1] + 0.5) / spread, freedom)).reshape(-1, 21).sum(0)
    expected = np.roll(shares, -10) / shares.sum() * len(errors)
    assert chisquare(np.bincount(errors, minlength=21), expected).pvalue > 1e-4


def test_a_key_that_is_bound_again_has_other_values():
    task = StaleRecall(pairs=2, keys=4, values=1000, repeats=4)
    for tokens in draw(task, 100, 20).tokens.tolist():
        assert sorted(Counter(tokens[:16:2]).values()) == [4, 4]
        assert len(set(tokens[1:16:2])) > 6  # of eight, two are equal once in 36 sequences


@pytest.mark.parametrize("task", SHORT, ids=str)
def test_no_token_alone_gives_its_answer_away(task):
    """The best guess from the asking token, learnt on one half of the questions, is right by chance on the other."""
    batch = draw(task, 3000, task.least_length + task.least_length % 2)
    asked = batch.labels != NOTHING
    pairs = list(zip(batch.tokens[asked].tolist(), batch.labels[asked].tolist(), strict=True))
    half = len(pairs) // 2
    counts = {}
    for token, label in pairs[:half]:
        counts.setdefault(token, Counter())[label] += 1
    guesses = {token: found.most_common(1)[0][0] for token, found in counts.items()}
    right = sum(guesses.get(token) == label for token, label in pairs[half:])
    # what copies or induces a string has symbols that differ: one answer fewer
    chance = 1 / (task.answers - (task.__class__ in (GappedCopy, GappedInduction)))
    assert right <= binom(len(pairs) - half, chance).ppf(0.9999)


def test_answers_are_equally_likely():
    for task in SHORT:
        labels = draw(task, 4000, task.least_length + task.least_length % 2).labels
        counts = Counter(labels[labels != NOTHING].tolist())
        total = counts.total()
        assert len(counts) == task.answers
        # questions of one sequence may share their answer, such as reads of one write: five deviations
        assert max(abs(n / total - 1 / task.answers) for n in counts.values()) < 5 * (task.answers * 4000) ** -0.5


def test_times_are_irregular_and_at_the_lag():
    task = TimedRecall(jitter=0.5)
    batch = draw(task, 50, 128)
    gaps = batch.times.diff(dim=-1)
    said = batch.tokens < task.values
    assert bool((gaps >= 0).all())
    for times, own in zip(batch.times, said, strict=True):
        between = times[own].diff()
        assert 0.5 <= between.min() < 0.55
        assert 1.45 < between.max() <= 1.5
    assert (batch.labels >= 0).sum(-1).tolist() == [8] * 50


def test_the_shares_of_a_flip_flop():
    batch = draw(FlipFlop(write=0.2, read=0.3), 100, 402)
    inner = batch.tokens[:, 2:-2:2]
    for instruction, share in ((0, 0.2), (1, 0.3)):
        low, high = binom(inner.numel(), share).interval(0.9999)
        assert low <= int((inner == instruction).sum()) <= high


def test_a_seed_gives_the_same_sequences():
    for name, kind in TASKS.items():
        first, again, other = (draw(kind(), 4, 64, seed) for seed in (1, 1, 2))
        assert first.tokens.equal(again.tokens), name
        assert not first.tokens.equal(other.tokens)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AssociativeRecall(pairs=0), "pairs: got 0, expected at least 1"),
        (lambda: AssociativeRecall(pairs=9, keys=8), "pairs: got 9, expected at most keys, 8"),
        (lambda: AssociativeRecall(pairs=2000, keys=2000, values=501), "values: got 501, expected at most 500 with"),
        (lambda: AssociativeRecall(corrupted=1.0), "corrupted: got 1.0, expected a share"),
        (lambda: AssociativeRecall(pairs=1, corrupted=0.5), "pairs: got 1, expected at least 2"),
        (lambda: NoisyRecall(spread=-1.0), "spread: got -1.0, expected a number from 0"),
        (lambda: NoisyRecall(freedom=0), "freedom: got 0, expected at least 1"),
        (lambda: GappedCopy(symbols=1), "symbols: got 1, expected at least 2"),
        (lambda: FlipFlop(write=0.7, read=0.5), "read: got 0.5, expected at most 0.3"),
        (lambda: GroupWord(group="s3"), "group: got 's3', expected one of parity, a5"),
        (lambda: TimedRecall(lag=37, jitter=0), "lag: got 37, expected no whole number with jitter=0"),
        (lambda: draw(AssociativeRecall(), 2, 23), "length: got 23, expected at least 24 tokens"),
        (lambda: draw(FlipFlop(), 2, 65), "length: got 65, expected an even number"),
        (lambda: draw(GroupWord(), 0, 8), "batch: got 0, expected at least 1"),
    ],
)
def test_impossible_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()
