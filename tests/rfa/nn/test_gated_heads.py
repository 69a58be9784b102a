"""Layers some of whose heads have forget gates or a content clock: each head is as in a layer of one kind."""

import pytest
import torch

from rfa.dynamics import rotary_frequencies
from rfa.models import RFAConfig, preset
from rfa.nn import DotProductAttention, RobustFilterAttention

from .by_hand import EXACT, hidden, perturb

SIZE, HEADS = 16, 4
ROPE = rotary_frequencies(HEADS, SIZE // HEADS)
KINDS = {
    "gates": (DotProductAttention, {"frequency": ROPE, "gates": "forget"}, "gate_projection."),
    "gates with a sink": (
        DotProductAttention,
        {"frequency": ROPE, "gates": "forget", "sink": True},
        "gate_projection.",
    ),
    "clock of a filter": (RobustFilterAttention, {"prior": "riccati", "clock": "content"}, "clock."),
    "clock of a dot product": (DotProductAttention, {"frequency": ROPE, "clock": "content"}, "clock."),
}


def heads_of(layer, x):
    """The estimate of each head before the output projection."""
    found, estimate = [], layer.estimate
    layer.estimate = lambda *states, **given: found.append(estimate(*states, **given)) or found[0]
    layer(x)
    del layer.estimate
    return found[0]


@pytest.mark.parametrize("gated", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_head_is_that_of_a_layer_of_one_kind(kind, gated):
    """The first heads are those of a layer without gates, the last ones those of a layer with gates."""
    build, options, own = KINDS[kind]
    some = perturb(build(SIZE, HEADS, gated_heads=gated / HEADS, **options)).double()
    every = build(SIZE, HEADS, **options).double()
    none = build(SIZE, HEADS, **{n: x for n, x in options.items() if n not in ("gates", "clock")}).double()
    shared = {n: x for n, x in some.state_dict().items() if not n.startswith(own)}
    none.load_state_dict(shared)
    gates = {n: torch.randn_like(x) for n, x in every.state_dict().items() if n.startswith(own)}
    gates = {n: torch.cat([x[: HEADS - gated], some.state_dict()[n]]) for n, x in gates.items()}
    every.load_state_dict({**shared, **gates})
    x = hidden()
    expected = torch.cat([heads_of(none, x)[:, : HEADS - gated], heads_of(every, x)[:, HEADS - gated :]], 1)
    torch.testing.assert_close(heads_of(some, x), expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_fused_backend(kind):
    build, options, _ = KINDS[kind]
    single = perturb(build(SIZE, HEADS, gated_heads=0.5, backend="cpu", **options))
    double = build(SIZE, HEADS, gated_heads=0.5, backend="reference", **options).double()
    double.load_state_dict(single.state_dict())
    x, target = hidden(dtype=torch.float32), hidden(seed=9)
    for layer in (single, double):
        dtype = layer.query_projection.weight.dtype
        layer(x.to(dtype)).mul(target.to(dtype)).sum().backward()
    for name, p in double.named_parameters():
        error = float((single.get_parameter(name).grad - p.grad).abs().max())
        assert error / max(1.0, float(p.grad.abs().max())) < 1e-4, name  # float32 sums over 7 x 7 pairs


def test_bad_input_is_refused():
    for share in (0.0, -0.5, 1.5, 0.3, float("nan")):
        with pytest.raises(ValueError, match=r"gated_heads: got .* expected a share of 4 heads, above 0"):
            DotProductAttention(SIZE, HEADS, gates="forget", gated_heads=share)
    for build, options in (
        (DotProductAttention, {}),
        (DotProductAttention, {"gates": "gain", "slopes": torch.ones(HEADS)}),
        (RobustFilterAttention, {}),
    ):
        with pytest.raises(ValueError, match="gated_heads: got 'some', expected 1 without"):
            build(SIZE, HEADS, gated_heads=0.5, **options)
    for name, share, message in (
        ("b1-rope", 0.5, "expected nothing: it has no effect in b1-rope"),
        ("m2-sc-rfa", 0.5, "expected nothing: it has no effect in m2-sc-rfa"),
        ("x4-content-riccati", 0.5, "expected 1 with prior='content_riccati'"),
        ("c4-fox", 0.0, "expected a share of 8 heads"),
        ("x5-content-clock", 1.5, "expected a share of 8 heads"),
        ("c4-fox", 0.3, "expected a share of 8 heads"),
        ("x5-content-clock", 0.3, "expected a share of 8 heads"),
    ):
        with pytest.raises(ValueError, match=f"gated_heads: got {share}, {message}"):
            preset(name, gated_heads=share)
    assert RFAConfig(gated_heads=0.5).build_attention().gated_heads == 8  # no gates: nothing to share out
