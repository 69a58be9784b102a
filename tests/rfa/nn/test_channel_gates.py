"""Forget gates of each channel: by hand, their limits, absent tokens, precision, and bad input."""

import numpy as np
import pytest
import torch
from ops import oracle

from rfa.dynamics import rotary_frequencies
from rfa.models import preset
from rfa.nn import DotProductAttention

from .by_hand import EXACT, assert_near, hidden, linear, merged, perturb, states

SIZE, HEADS = 16, 2


def layer_of(dtype=torch.float64, **options):
    return perturb(DotProductAttention(SIZE, HEADS, gates="channel", **options)).to(dtype)


def test_the_layer_by_hand():
    """One pair and one channel at a time."""
    layer, x = layer_of(), hidden()
    q, k, v = states(layer, x)
    gates = 1 / (1 + np.exp(-linear(layer.gate_projection, oracle.as_array(x)).reshape(2, 7, HEADS, -1)))
    out = np.zeros_like(v)
    for b, h, i in np.ndindex(2, HEADS, 7):
        faded = [k[b, h, j] * gates[b, j + 1 : i + 1, h].prod(0) for j in range(i + 1)]
        weights = np.exp(np.array(faded) @ q[b, h, i] / np.sqrt(SIZE))
        out[b, h, i] = weights / weights.sum() @ v[b, h, : i + 1]
    assert_near(layer(x), merged(layer, out))


def test_open_gates_are_no_gates():
    layer, x = layer_of(), hidden()
    plain = DotProductAttention(SIZE, HEADS).double()
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if not n.startswith("gate_projection.")})
    torch.nn.init.zeros_(layer.gate_projection.weight)
    torch.nn.init.constant_(layer.gate_projection.bias, 100.0)  # 1 - f = 4e-44
    torch.testing.assert_close(layer(x), plain(x), rtol=EXACT, atol=EXACT)


def test_closed_gates_leave_the_own_key():
    """Scores of earlier keys are 0, whatever they hold; that of the query's own key is not gated."""
    layer, x = layer_of(), hidden()
    torch.nn.init.zeros_(layer.gate_projection.weight)
    torch.nn.init.constant_(layer.gate_projection.bias, -1e4)
    q, k, v = states(layer, x)
    own = np.exp((q * k).sum(-1) / np.sqrt(SIZE))[..., None]
    before = np.arange(7)[:, None]
    assert_near(layer(x), merged(layer, (own * v + v.cumsum(2) - v) / (own + before)))


@pytest.mark.parametrize("length", [5, 120])
def test_gradients_in_single_precision(length):
    """Against float64, also where the gates of 120 tokens multiply to less than the least number."""
    single, double = layer_of(torch.float32), layer_of()
    double.load_state_dict(single.state_dict())
    x, target = hidden(length=length, dtype=torch.float32), hidden(seed=9, length=length)
    for layer in (single, double):
        dtype = layer.query_projection.weight.dtype
        layer(x.to(dtype)).mul(target.to(dtype)).sum().backward()
    for name, p in double.named_parameters():
        error = float((single.get_parameter(name).grad - p.grad).abs().max())
        assert p.grad.isfinite().all()
        assert error / max(1.0, float(p.grad.abs().max())) < 1e-4, name  # float32 sums over all pairs


def test_masked_tokens_and_other_segments_are_as_if_absent():
    layer, x, kept = layer_of(), hidden(), [1, 2, 5, 6]
    expected = layer(x[:, kept])
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[:, kept] = True
    torch.testing.assert_close(layer(x, key_mask=mask)[:, kept], expected, rtol=EXACT, atol=EXACT)
    found = layer(x, segment_ids=(~mask).long())[:, kept]
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def test_blocks_of_rows_are_the_whole(monkeypatch):
    layer, x, one = layer_of(), hidden(length=37), torch.zeros(2, 37, dtype=torch.long)
    expected = layer(x).detach()
    torch.testing.assert_close(layer(x, segment_ids=one), expected, rtol=EXACT, atol=EXACT)  # pair by pair
    monkeypatch.setattr("rfa.ops.dense._SCORES", 1)  # one row at a time without gradients
    with torch.no_grad():
        torch.testing.assert_close(layer(x, segment_ids=one), expected, rtol=EXACT, atol=EXACT)


def test_a_new_layer_forgets_at_many_rates():
    layer = DotProductAttention(SIZE, HEADS, gates="channel")
    rates = -layer.marks(torch.zeros(1, 1, SIZE))["log_gate"][0, :, 0]
    expected = torch.tensor([2 ** (-8 * n / 15) for n in range(16)]).expand(HEADS, -1)
    torch.testing.assert_close(rates, expected, rtol=1e-4, atol=0)  # float32 logarithms of small rates


def test_bad_input_is_refused():
    for options in (
        {"frequency": rotary_frequencies(HEADS, SIZE // HEADS)},
        {"decay": torch.ones(HEADS)},
        {"clock": "content"},
    ):
        with pytest.raises(ValueError, match="gates: got 'channel', expected no frequencies, no decay"):
            layer_of(**options)
    with pytest.raises(ValueError, match="backend: got 'cpu', expected 'auto' or 'reference' with gates of channels"):
        layer_of(backend="cpu")
    with pytest.raises(ValueError, match="gated_heads: got 'some', expected 1 without forget gates"):
        layer_of(gated_heads=0.5)
    for changes, message in (
        ({"frequencies": "rope"}, "gates: got 'channel', expected no frequencies"),
        ({"decay": "spectral"}, "gates: got 'channel', expected no frequencies"),
        ({"clock": "content"}, "clock: got 'content', expected 'times' where nothing depends on the lag"),
        ({"backend": "cpu"}, "backend: got 'cpu', expected 'auto' or 'reference' with gates of channels"),
        ({"gated_heads": 0.5}, "gated_heads: got 0.5, expected 1 with prior='channel_gate'"),
    ):
        with pytest.raises(ValueError, match=message):
            preset("c4-fox", prior="channel_gate", **changes)
