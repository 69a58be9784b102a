"""The baselines against transformers' rotary embedding, published sequences and complex numbers by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cover import cover
from ops import oracle
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from rfa.dynamics import rotary_frequencies
from rfa.nn import DotProductAttention, alibi_slopes

from .by_hand import SINGLE, assert_near, dot_product, hidden, merged, perturb, states

SIZE, HEADS, MODES = 16, 2, 8
ROPE = rotary_frequencies(HEADS, MODES)
DECAY = torch.tensor([0.0, 0.3])
SLOPES = torch.tensor([0.5, 0.0625])
VARIANTS = {
    "plain": {},
    "b1": {"frequency": ROPE},
    "b2": {"slopes": SLOPES},
    "b3": {"frequency": ROPE, "decay": DECAY},
    "decay and slopes": {"decay": DECAY, "slopes": SLOPES},
    "innovation": {"frequency": ROPE, "innovation": True},
    "RoPER": {"frequency": torch.linspace(-2, 2, 16).view(2, 8), "rotate_values": True, "innovation": True},
    "c7": {"frequency": ROPE, "slopes": SLOPES, "innovation": True},
    "x3": {
        "frequency": torch.linspace(-2, 2, 16).view(2, 8),
        "rotate_values": True,
        "innovation": True,
        "slopes": SLOPES,
        "learn_slopes": True,
    },
    "forget gate": {"gates": "forget"},
    "gains from the content": {"gates": "gain", "slopes": SLOPES, "frequency": ROPE, "innovation": True},
    "forget gate with RoPER and decay": {
        "gates": "forget",
        "frequency": ROPE,
        "rotate_values": True,
        "decay": DECAY,
    },
    "RoPER with decay": {"frequency": ROPE, "rotate_values": True, "decay": DECAY},
}


def build(dtype=torch.float64, **options):
    return perturb(DotProductAttention(SIZE, HEADS, **options).to(dtype))


def llama_rotary(heads, modes, length):
    config = LlamaConfig(
        hidden_size=2 * modes * heads, num_attention_heads=heads, head_dim=2 * modes, max_position_embeddings=length
    )
    rotary = LlamaRotaryEmbedding(config)
    return rotary, rotary(torch.zeros(1, length, 2 * modes), torch.arange(length)[None])


@pytest.mark.parametrize("length", [1, 40])
def test_rope_is_transformers_own(length):
    layer = build(torch.float32, frequency=ROPE)
    x = hidden(length=length, dtype=torch.float32)
    _, (cos, sin) = llama_rotary(HEADS, MODES, length)
    q, k, v = (torch.from_numpy(state).float() for state in states(layer, x))
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    estimate = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(2 * MODES))
    assert_near(layer(x), merged(layer, oracle.as_array(estimate)), SINGLE)


TIMES = torch.tensor([0.0, 0.5, 0.7, 2.0, 2.5, 4.0, 7.0], dtype=torch.float64)


@cover(1, irregular=[False, True], name=VARIANTS)
def test_layer_is_written_by_hand(name, irregular):
    layer, x, times = build(**VARIANTS[name]), hidden(), TIMES if irregular else None
    assert_near(layer(x, times=times), dot_product(layer, x, times=times, **VARIANTS[name]))


@cover(name=["b1", "b2", "b3", "RoPER", "c7"], backend=["reference", "auto"], causal=[True, False])
def test_all_keys_or_those_that_are_there_by_hand(name, backend, causal):
    dtype = torch.float32 if backend == "auto" else torch.float64
    layer, x = build(dtype, causal=causal, backend=backend, **VARIANTS[name]), hidden(dtype=dtype)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 2] = False
    given = {"times": TIMES, "key_mask": mask}
    assert_near(layer(x, **given), dot_product(layer, x, causal=causal, **given, **VARIANTS[name]), SINGLE)


def as_released_by_hand(layer, x):
    """The map of the released code: cosine and sine of interleaved pairs, the quarter turn of concatenated halves."""
    q, k, v = states(layer, x)
    length, channels = q.shape[-2:]

    def turn(s):
        out = np.zeros_like(s)
        for t in range(length):
            for c in range(channels):
                angle = t * 10000.0 ** (-(c // 2) / (channels // 2))
                half = channels // 2
                quarter = -s[:, :, t, c + half] if c < half else s[:, :, t, c - half]
                out[:, :, t, c] = math.cos(angle) * s[:, :, t, c] + math.sin(angle) * quarter
        return out

    score = turn(q) @ np.swapaxes(turn(k), -1, -2) / math.sqrt(channels)
    score[..., np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weight = np.exp(score - score.max(-1, keepdims=True))
    return merged(layer, weight / weight.sum(-1, keepdims=True) @ v)


def test_the_released_map_by_hand():
    layer = build(frequency=ROPE.double(), rotary_map="as_released")
    assert_near(layer(hidden()), as_released_by_hand(layer, hidden()), 1e-6)  # the bank is made in float32


def published_slopes(n):
    """Press et al.'s recursion: a power of two is geometric, otherwise every other slope of twice the power below."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return published_slopes(closest) + published_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("heads", [1, 8, 12, 25])
def test_alibi_slopes_are_those_published(heads):
    np.testing.assert_allclose(alibi_slopes(heads), published_slopes(heads), rtol=1e-6)


@cover(1, name=["b2", "b3"], cast=["bfloat16", "half"])
def test_half_precision_has_no_limit_on_lags(name, cast):
    """Seconds between events easily exceed float16's 65,504."""
    layer = getattr(build(torch.float32, **VARIANTS[name]), cast)()
    x = hidden().to(layer.query_projection.weight.dtype)
    assert layer(x, times=torch.arange(7) * 100_000).isfinite().all()
