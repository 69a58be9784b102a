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
from rfa.nn import DotProductAttention, Yarn, alibi_slopes
from rfa.ops import robust_filter_attention
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.positions import checked_positions

from .by_hand import EXACT, SINGLE, assert_near, dot_product, hidden, linear, merged, perturb, states

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
    "sink": {"frequency": ROPE, "sink": True},
    "gate with a sink": {"gates": "forget", "frequency": ROPE, "rotate_values": True, "sink": True},
    "sink with decay": {"decay": DECAY, "slopes": SLOPES, "sink": True},
    "window": {"frequency": ROPE, "window": 3},
    "yarn": {"frequency": ROPE, "yarn": Yarn(4)},
    "forget gate": {"gates": "forget"},
    "gains from the content": {"gates": "gain", "slopes": SLOPES, "frequency": ROPE, "innovation": True},
    "forget gate with RoPER and decay": {
        "gates": "forget",
        "frequency": ROPE,
        "rotate_values": True,
        "decay": DECAY,
    },
    "RoPER with decay": {"frequency": ROPE, "rotate_values": True, "decay": DECAY},
    "logarithmic": {"logarithmic": True},
    "logarithmic, RoPER": {"logarithmic": True, "frequency": ROPE, "rotate_values": True},
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
    tolerance = SINGLE if "logarithmic" in name else EXACT  # numbers of the bias are float32 at the start
    assert_near(layer(x, times=times), dot_product(layer, x, times=times, **VARIANTS[name]), tolerance)


@cover(name=["b1", "b2", "b3", "RoPER", "c7", "window"], backend=["reference", "auto"], causal=[True, False])
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


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_alibi_slopes_of_powers_of_two(heads):
    np.testing.assert_allclose(alibi_slopes(heads), [2 ** (-8 * h / heads) for h in range(1, heads + 1)], rtol=1e-6)


def published_slopes(n):
    """Press et al.'s recursion: a power of two is geometric, otherwise every other slope of twice the power below."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return published_slopes(closest) + published_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("heads", [3, 6, 12, 20, 25])
def test_alibi_slopes_between_powers_of_two(heads):
    np.testing.assert_allclose(alibi_slopes(heads), published_slopes(heads), rtol=1e-6)


@cover(1, name=["b2", "b3"], cast=["bfloat16", "half"])
def test_half_precision_has_no_limit_on_lags(name, cast):
    """Seconds between events easily exceed float16's 65,504."""
    layer = getattr(build(torch.float32, **VARIANTS[name]), cast)()
    x = hidden().to(layer.query_projection.weight.dtype)
    assert layer(x, times=torch.arange(7) * 100_000).isfinite().all()


def test_gates_that_start_at_slopes():
    """Without weights of the content, the gates are ALiBi's bias."""
    torch.manual_seed(0)
    gated = DotProductAttention(SIZE, HEADS, gates="forget", slopes=SLOPES).double()
    torch.nn.init.zeros_(gated.gate_projection.weight)
    sloping = DotProductAttention(SIZE, HEADS, slopes=SLOPES).double()
    sloping.load_state_dict(gated.state_dict(), strict=False)
    assert_near(gated(hidden()), sloping(hidden()), 1e-6)  # the gates' bias was float32 at the start


def test_the_filter_without_decay_is_kerple():
    """`-beta log Sigma` is the bias, and Gaussian residuals of keys of one length are dot products.

    With m2.5's zero frequencies, no decay, no gate, and nu to infinity the score is
    `-beta log(sigma^2 tau + eta^2 + sigma_0^2) - beta |q - k|^2 / d`.
    """
    generator = torch.Generator().manual_seed(0)
    modes, one = 3, torch.ones(HEADS, dtype=torch.float64)
    query, key, value = torch.randn(3, 2, HEADS, 9, 2 * modes, generator=generator, dtype=torch.float64)
    key = key / key.norm(dim=-1, keepdim=True)
    beta, noise, key_noise, floor = 0.7 * one, torch.tensor([0.3, 2.0]).double(), 0.4 * one, 0.05 * one
    numbers = {"decay": 0 * one, "frequency": torch.zeros(HEADS, modes).double(), "process_noise": noise}
    numbers |= {"key_noise": key_noise, "query_noise": one, "noise_floor": floor, "inverse_temperature": beta}
    found = robust_filter_attention(query, key, value, robustness=1e9 * one, gate=False, **numbers)
    scale = (2 * beta / modes * np.sqrt(2 * modes))[:, None, None]  # 2 beta q.k / d as a score over sqrt(2 d)
    bias, positions = (beta, noise / (key_noise + floor)), checked_positions(2, 9, 9, query.device, None)
    expected = decayed_dot_product_attention(scale * query, key, value, positions=positions, logarithmic=bias)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # 1 / nu, times residuals of order 10


def test_a_new_logarithmic_bias_starts_as_published():
    numbers = torch.stack(DotProductAttention(512, 256, logarithmic=True).logarithmic())
    for found, most in zip(numbers, (2.0, 1.0), strict=True):
        assert found.min() >= 0.01 - 1e-6
        assert 0.9 * most < found.max() < most + 1e-6
        assert abs(float(found.mean()) - most / 2) < 0.1 * most  # five deviations of the mean of 256 uniform numbers


def test_channel_gates_by_hand():
    """One pair and one channel at a time."""
    layer, x = build(gates="channel"), hidden()
    q, k, v = states(layer, x)
    gates = 1 / (1 + np.exp(-linear(layer.gate_projection, oracle.as_array(x)).reshape(2, 7, HEADS, -1)))
    out = np.zeros_like(v)
    for b, h, i in np.ndindex(2, HEADS, 7):
        faded = [k[b, h, j] * gates[b, j + 1 : i + 1, h].prod(0) for j in range(i + 1)]
        weights = np.exp(np.array(faded) @ q[b, h, i] / np.sqrt(SIZE))
        out[b, h, i] = weights / weights.sum() @ v[b, h, : i + 1]
    assert_near(layer(x), merged(layer, out))


@pytest.mark.parametrize("length", [5, 120])
def test_gradients_of_channel_gates_in_single_precision(length):
    """Against float64, also where the gates of 120 tokens multiply to less than the least number."""
    single, double = build(torch.float32, gates="channel"), build(gates="channel")
    double.load_state_dict(single.state_dict())
    x, target = hidden(length=length, dtype=torch.float32), hidden(seed=9, length=length)
    for layer in (single, double):
        dtype = layer.query_projection.weight.dtype
        layer(x.to(dtype)).mul(target.to(dtype)).sum().backward()
    for name, p in double.named_parameters():
        error = float((single.get_parameter(name).grad - p.grad).abs().max())
        assert p.grad.isfinite().all()
        assert error / max(1.0, float(p.grad.abs().max())) < 1e-4, name  # float32 sums over all pairs


def test_new_channel_gates_forget_at_many_rates():
    layer = DotProductAttention(SIZE, HEADS, gates="channel")
    rates = -layer.marks(torch.zeros(1, 1, SIZE))["log_gate"][0, :, 0]
    expected = torch.tensor([2 ** (-8 * n / 15) for n in range(16)]).expand(HEADS, -1)
    torch.testing.assert_close(rates, expected, rtol=1e-4, atol=0)  # float32 logarithms of small rates
