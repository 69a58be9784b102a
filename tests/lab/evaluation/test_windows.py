"""The protocols of `rfa_lab.evaluation.perplexity`, by brute force over every window."""

from itertools import pairwise

import pytest

from rfa_lab.evaluation import windows
from rfa_lab.evaluation.perplexity import spread

STREAMS = [(2, 2), (17, 16), (50, 7), (65, 3)]


def scored(window):
    """Token -> how many tokens before it the model sees."""
    return {token: token - window.start for token in range(window.stop - window.targets, window.stop)}


@pytest.mark.parametrize(("tokens", "length"), STREAMS)
def test_blocks(tokens, length):
    plan = list(windows("blocks", tokens, length, [length]))
    assert [window.start for window in plan] == [i for i in range(0, tokens, length) if i + length <= tokens]
    assert all(window.stop - window.start == length for window in plan)
    for window in plan:
        assert scored(window) == {window.start + i: i for i in range(1, length)}


@pytest.mark.parametrize(("tokens", "lengths"), [(40, [5, 11, 40]), (57, [2, 4]), (100, [8, 16, 32])])
def test_matched_scores_the_same_tokens_with_other_contexts(tokens, lengths):
    targets = []
    for length in lengths:
        plan = list(windows("matched", tokens, length, lengths))
        assert all(window.start >= 0 and window.stop <= tokens for window in plan)
        assert all(window.stop - window.start == length for window in plan)
        contexts = [scored(window) for window in plan]
        flat = [token for context in contexts for token in context]
        assert len(flat) == len(set(flat))  # no token twice
        assert all(min(context.values()) >= length - max(1, min(lengths) // 2) for context in contexts)
        targets.append(flat)
    assert all(flat == targets[0] for flat in targets)
    stride = max(1, min(lengths) // 2)
    assert targets[0] == list(range(max(lengths) - stride, max(lengths) - stride + len(targets[0])))  # no gap
    assert tokens - targets[0][-1] - 1 < stride  # to the end of the text


@pytest.mark.parametrize(("tokens", "length"), STREAMS)
def test_strided_scores_each_token_once_with_half_a_window_at_least(tokens, length):
    plan = list(windows("strided", tokens, length, [length]))
    contexts = [scored(window) for window in plan]
    assert [token for context in contexts for token in context] == list(range(1, tokens))
    assert all(window.stop - window.start == length and window.start >= 0 for window in plan)
    for context in contexts[1:]:
        assert min(context.values()) >= length - max(1, length // 2)


@pytest.mark.parametrize(("protocol", "scored"), [("blocks", 200), ("matched", 640)])
def test_spread_scores_the_same_tokens_of_evenly_spaced_segments_at_every_length(protocol, scored):
    tokens, lengths, segment = 1000, [16, 32, 64], 64
    seen = {}
    for length in lengths:
        plan = list(windows(protocol, tokens, length, lengths))
        kept = spread(plan, tokens, segment, scored)
        assert set(kept) <= set(plan)
        stops = [window.stop for window in kept]
        assert stops == sorted(stops)
        seen[length] = {(stop - 1) // segment for stop in stops}
        gaps = {after - before for before, after in pairwise(sorted(seen[length]))}
        assert not gaps or max(gaps) - min(gaps) <= 1  # evenly
        assert len(seen[length]) == min(scored // segment, tokens // segment)
        if protocol == "blocks":  # whole segments, each of its tokens in one window
            assert sum(window.stop - window.start for window in kept) == len(seen[length]) * segment
    assert seen[16] == seen[32] == seen[64]
