"""A cache that is cropped, emptied, reordered, moved or copied, as transformers does, goes on as if newly read."""

import copy

import pytest
import torch

from rfa.nn import FilterCache

from .by_hand import EXACT, SINGLE, hidden, perturb
from .layers import IRREGULAR, build, read


def test_crop_and_reset_at_their_limits():
    layer, x = build("defaults"), hidden(length=9)
    cache = FilterCache()
    cache.crop(-1)
    with torch.no_grad():
        forgetting = (lambda: cache.crop(-100), lambda: cache.reset(), lambda: cache.crop(0))
        for shift, forget in zip((7.0, 1e9, -3.0), forgetting, strict=True):
            pieces, _ = read(layer, x, (4, 5), cache, times=shift + IRREGULAR)
            torch.testing.assert_close(pieces, layer(x, times=shift + IRREGULAR), rtol=EXACT, atol=EXACT)
            assert cache.origin.tolist() == [[shift]]
            forget()
        assert cache.get_seq_length() == 9
        cache.reset()
        assert cache.get_seq_length() == 0
        pieces, _ = read(layer, x, (4, 5), cache)  # other times than before
        torch.testing.assert_close(pieces, layer(x), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", ["m2", "riccati", "learned"])
def test_an_empty_cache_may_meet_other_parameters(name):
    """Tables of the prior, which the kernels keep in the cache, are those of the parameters before."""
    layer, x = build(name, torch.float32), hidden(length=9, dtype=torch.float32)
    with torch.no_grad():
        _, cache = read(layer, x)
        cache.crop(-9)
        assert cache.get_seq_length() == 0
        perturb(layer, seed=2)
        (again, _), (fresh, _) = read(layer, x, (1,) * 9, cache), read(layer, x, (1,) * 9)
        torch.testing.assert_close(again, fresh, rtol=SINGLE, atol=1e-6)
        torch.testing.assert_close(again, layer(x), rtol=SINGLE, atol=1e-5)


def test_a_shallow_copy_is_another_name():
    """Tokens and their times, however they come in."""
    layer, x, times = build("defaults"), hidden(length=9), torch.tensor([0, 1, 2, 5, 6, 9, 11, 12, 13])
    with torch.no_grad():
        whole, (_, cache) = layer(x, times=times), read(layer, x, (3,))
        other = copy.copy(cache)
        for i in range(3, 9):
            one, token = (cache, other)[i % 2], x[:, i : i + 1]
            if i > 3:
                with pytest.raises(ValueError, match=r"times: got key 3 at 3.0 .*, expected 5.0, as the cache"):
                    layer(token, past_key_values=one)
            found = layer(token, past_key_values=one, times=times[: i + 1])
            torch.testing.assert_close(found, whole[:, i : i + 1], rtol=EXACT, atol=EXACT)
        other.reset()
        torch.testing.assert_close(read(layer, x, (4, 5), cache)[0], layer(x), rtol=EXACT, atol=EXACT)


def test_crop_counts_from_the_end():
    with pytest.raises(ValueError, match="tokens_to_remove: got 3"):
        FilterCache().layer(0).crop(3)
