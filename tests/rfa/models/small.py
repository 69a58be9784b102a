"""Models small enough to run in milliseconds."""

import torch
from cover import ALL

from rfa.models import PRESETS, FilterAttentionConfig, RFAForCausalLM, preset
from rfa.models.presets import PLAIN_NAMES

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "train_length": 16}
NAMES = [name for name in PRESETS if name not in PLAIN_NAMES]
# One for each way through the code: RoPE, decay, gates, slopes on values that turn, a clock, own dynamics, the filter.
FEW = ["b1-rope", "b3-decayed-rope", "c4-fox", "x3-rotation-riccati", "x5-content-clock", "x6-content-dynamics", "rfa"]
PATHS = NAMES if ALL else [*FEW, "m2-sc-rfa"]
ONE_OF_EACH = NAMES if ALL else ["rfa", "c4-fox", "x6-content-dynamics"]  # kinds of layers
FILTERS = [name for name in NAMES if isinstance(PRESETS[name], FilterAttentionConfig)]
# Not the one whose scores depend on more than the lag, and so on the padding before a text.
RELATIVE = [name for name in PATHS if PRESETS[name].is_relative()]
# float32 (eps 1.2e-7) through two blocks on logits of order one
SINGLE = 1e-5
# float64: the same with nothing to spare for but a few thousand roundings
EXACT = 1e-10


def small(name, seed=0, dtype=torch.float32, **overrides):
    torch.manual_seed(seed)
    return RFAForCausalLM(preset(name, **{**SIZES, **overrides})).to(dtype).eval()


def tokens(batch=2, length=9, seed=0, vocabulary=61):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, length), generator=generator)


def assert_same(actual, expected, tolerance=SINGLE):
    """To `tolerance` of the largest number: large logits carry large roundings."""
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)
