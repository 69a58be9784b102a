"""Layers some of whose heads have forget gates or a content clock: each head is as in a layer of one kind."""

import torch
from cover import cover

from rfa.dynamics import rotary_frequencies
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


@cover(1, gated=[1, 2, 3], kind=KINDS)
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
