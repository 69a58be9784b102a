"""What a layer is built from is checked when it is built, not at its first use."""

import pytest
import torch
from shapes import only_our_own_checks

from rfa.dynamics import rotary_frequencies
from rfa.nn import DotProductAttention, HeadDynamics, RobustFilterAttention, alibi_slopes

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


@pytest.mark.parametrize("layer", [RobustFilterAttention(16, 4), DotProductAttention(16, 4, frequency=BANK)])
@pytest.mark.parametrize("cause", [float("nan"), float("inf")])
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
