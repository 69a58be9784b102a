"""What a layer is built from is checked when it is built, not at its first use."""

import pytest
import torch
from cover import cover
from shapes import only_our_own_checks

from rfa.appendix import CoupledFilterAttention
from rfa.dynamics import rotary_frequencies
from rfa.nn import (
    ContentFilterAttention,
    DotProductAttention,
    FilterCache,
    HeadDynamics,
    RobustFilterAttention,
    alibi_slopes,
)

from .by_hand import hidden

ONES = torch.ones(4)
BANK = rotary_frequencies(4, 4)

FILTERS = [
    ("decay", {"decay": torch.ones(3)}),
    ("decay", {"decay": torch.ones(1)}),
    ("decay", {"decay": -ONES}),
    ("decay", {"decay": ONES * torch.nan}),
    ("frequency", {"frequency": BANK[:1]}),
    ("frequency", {"frequency": BANK[:, :2]}),
    ("frequency", {"frequency": BANK * torch.inf}),
    ("learn_frequency", {"frequency": BANK, "learn_frequency": True}),  # no conjugate pairs
    ("slopes", {"slopes": alibi_slopes(4)}),  # of the Riccati prior only
    ("slopes", {"slopes": alibi_slopes(3), "prior": "riccati"}),
    ("prior", {"prior": "bayes"}),
    ("weight", {"weight": "studnt"}),
    ("steady_state", {"steady_state": -1.0}),
    ("steady_state", {"steady_state": float("nan")}),
    ("horizon", {"horizon": -1.0}),
    ("learn_horizon", {"learn_horizon": True}),
    ("query_noise_in_bias", {"query_noise_in_bias": True, "prior": "riccati"}),
    ("gate", {"gate": False, "prior": "flat"}),
]
BASELINES = [
    ("decay", {"decay": torch.ones(1)}),
    ("decay", {"decay": -ONES}),
    ("slopes", {"slopes": torch.ones(1)}),
    ("slopes", {"slopes": -ONES}),
    ("frequency", {"frequency": BANK[:1]}),
    ("frequency", {"frequency": BANK[:, :2]}),
]


@pytest.mark.parametrize(("name", "options"), FILTERS, ids=lambda value: value if isinstance(value, str) else "")
def test_filters(name, options):
    with only_our_own_checks(), pytest.raises(ValueError, match=rf"^{name}: got .*expected"):
        RobustFilterAttention(16, 4, **options)


@pytest.mark.parametrize(("name", "options"), BASELINES, ids=lambda value: value if isinstance(value, str) else "")
def test_baselines(name, options):
    with only_our_own_checks(), pytest.raises(ValueError, match=rf"^{name}: got .*expected"):
        DotProductAttention(16, 4, **options)


def test_dynamics_alone():
    with only_our_own_checks(), pytest.raises(ValueError, match=r"^frequency: got \(4,\)"):
        HeadDynamics(ONES, ONES)


LAYERS = {
    "filter": lambda: RobustFilterAttention(16, 4),
    "tied": lambda: RobustFilterAttention(16, 4, tie_key_value=True),
    "dot product": lambda: DotProductAttention(16, 4, frequency=BANK),
    "content": lambda: ContentFilterAttention(16, 4),
    "coupled": lambda: CoupledFilterAttention(16, 4),
}
STATES = {
    "width": lambda x: x[..., :12],
    "no width": lambda x: x[..., :0],
    "two dimensions": lambda x: x[0],
    "four dimensions": lambda x: x[None],
    "integers": lambda x: x.long(),
    "flags": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "a list": lambda x: x.tolist(),
}


@cover(1, layer=LAYERS, change=STATES)
def test_states(layer, change):
    """Whatever the layer, cache or none: it says which argument, what came and what should have."""
    made, x = LAYERS[layer](), hidden(dtype=torch.float32)
    wrong = STATES[change](x)
    got = "'list'" if change == "a list" else rf"'{wrong.dtype} \({', '.join(map(str, wrong.shape))}\)'"
    expected = "a tensor" if change == "a list" else r"floating-point \(batch, length, 16\) in torch.float32"
    calls = {"hidden_states": [lambda: made(wrong)]}
    if layer == "coupled":
        calls = {"hidden_states": [lambda: made(wrong, x)], "auxiliary_states": [lambda: made(x, wrong)]}
    elif layer != "content":
        calls["hidden_states"].append(lambda: made(wrong, past_key_values=FilterCache()))
    with only_our_own_checks():
        for name, of_the_argument in calls.items():
            for call in of_the_argument:
                with pytest.raises(ValueError, match=rf"^{name}: got {got}, expected {expected}"):
                    call()


@pytest.mark.parametrize("layer", LAYERS)
def test_states_under_autocast(layer):
    """Which casts them, float64 apart."""
    made, x = LAYERS[layer](), hidden(dtype=torch.float32)
    given = (lambda x: (x, x)) if layer == "coupled" else (lambda x: (x,))
    with only_our_own_checks(), torch.autocast("cpu", torch.bfloat16):
        expected = made(*given(x))
        torch.testing.assert_close(made(*given(x.bfloat16())), expected, atol=0.05, rtol=0.05)  # of 8 bits
        with pytest.raises(ValueError, match=r"^hidden_states: got 'torch.float64"):
            made(*given(x.double()))


@cover(
    1,
    layer=[RobustFilterAttention(16, 4), DotProductAttention(16, 4, frequency=BANK)],
    cause=[float("nan"), float("inf")],
)
def test_a_missing_row_may_hold_anything(layer, cause):
    x = hidden(dtype=torch.float32)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 2] = mask[1, 6] = False
    expected = layer(x, key_mask=mask)
    found = layer(x.masked_fill(~mask[:, :, None], cause), key_mask=mask)
    assert torch.equal(found[mask], expected[mask])
    layer.zero_grad()
    found[mask].square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters())
