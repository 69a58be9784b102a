"""What a layer is built from is checked when it is built, not at its first use."""

import pytest
import torch
from cover import cover
from shapes import only_our_own_checks

from rfa.dynamics import rotary_frequencies
from rfa.nn import (
    ContentFilterAttention,
    CoupledFilterAttention,
    DotProductAttention,
    FilterCache,
    HeadDynamics,
    RobustFilterAttention,
    alibi_slopes,
)

from .by_hand import hidden
from .layers import M2

ONES, SLOPES = torch.ones(4), alibi_slopes(4)
BANK = rotary_frequencies(4, 4)
ROUTED = {**M2, "aggregation": "routing"}
REFUSED = [  # the argument that the message names, and the layer's options
    (RobustFilterAttention, "decay", {"decay": torch.ones(3)}),
    (RobustFilterAttention, "decay", {"decay": -ONES}),
    (RobustFilterAttention, "decay", {"decay": ONES * torch.nan}),
    (RobustFilterAttention, "frequency", {"frequency": BANK[:, :2]}),
    (RobustFilterAttention, "frequency", {"frequency": BANK * torch.inf}),
    (RobustFilterAttention, "learn_frequencies", {"frequency": BANK, "learn_frequencies": True}),  # no conjugate pairs
    (
        RobustFilterAttention,
        "initial_slopes",
        {"initial_slopes": SLOPES, "prior": "lyapunov"},
    ),  # of the Riccati prior only
    (RobustFilterAttention, "initial_slopes", {"initial_slopes": alibi_slopes(3)}),
    (RobustFilterAttention, "initial_slopes", {"initial_slopes": "steep"}),
    (RobustFilterAttention, "initial_slopes", {"initial_slopes": "steep", "prior": "flat"}),
    (RobustFilterAttention, "prior", {"prior": "bayes"}),
    (RobustFilterAttention, "weight", {"weight": "studnt"}),
    (RobustFilterAttention, "step", {"step": "precise"}),
    (RobustFilterAttention, "noise", {"noise": "coloured"}),
    (RobustFilterAttention, "aggregation", {"aggregation": "mixture"}),
    (RobustFilterAttention, "process_noise_as", {"process_noise_as": "variance"}),
    (RobustFilterAttention, "backend", {"backend": "misspelt"}),
    (RobustFilterAttention, "steady_state", {"steady_state": float("nan")}),
    (RobustFilterAttention, "horizon", {"horizon": -1.0}),
    (RobustFilterAttention, "learn_horizon", {"learn_horizon": True}),
    (RobustFilterAttention, "query_noise_in_bias", {"query_noise_in_bias": True}),
    (RobustFilterAttention, "gate", {"gate": False, "prior": "flat"}),
    (RobustFilterAttention, "learn_noise_floor", {"learn_noise_floor": True, "prior": "flat"}),
    (RobustFilterAttention, "process_noise_as", {"process_noise_as": "steady_state", "prior": "flat"}),
    (RobustFilterAttention, "prior", {"step": "precision"}),
    (RobustFilterAttention, "query_noise_in_bias", {**M2, "step": "precision", "query_noise_in_bias": True}),
    (RobustFilterAttention, "noise", {"noise": "time_dependent"}),
    (RobustFilterAttention, "prior", {"aggregation": "routing"}),
    (RobustFilterAttention, "gate", {**ROUTED, "gate": False}),
    (RobustFilterAttention, "query_noise_in_bias", {**ROUTED, "query_noise_in_bias": True}),
    (RobustFilterAttention, "horizon", {**ROUTED, "horizon": 0.7}),
    (RobustFilterAttention, "step", {**ROUTED, "step": "precision"}),
    (RobustFilterAttention, "weight", {**ROUTED, "weight": "exponential"}),
    (RobustFilterAttention, "backend", {**ROUTED, "backend": "cpu"}),
    (RobustFilterAttention, "clock", {**ROUTED, "clock": "content"}),
    (RobustFilterAttention, "dropout", {**ROUTED, "dropout": 0.1}),
    (RobustFilterAttention, "backend", {"dropout": 0.1, "backend": "cpu"}),
    (DotProductAttention, "gates", {"gates": "forget", "causal": False}),
    (RobustFilterAttention, "source_prior", {"source_prior": "exponential"}),
    (DotProductAttention, "decay", {"decay": torch.ones(1)}),
    (DotProductAttention, "slopes", {"slopes": -ONES}),
    (DotProductAttention, "frequency", {"frequency": BANK[:1]}),
    (DotProductAttention, "rotate_values", {"rotate_values": True}),
    (DotProductAttention, "rotate_values", {"rotate_values": True, "frequency": BANK, "rotary_map": "as_released"}),
    (DotProductAttention, "clock", {"clock": "misspelt"}),
    (DotProductAttention, "clock", {"clock": "content", "causal": False, "frequency": BANK}),
    (DotProductAttention, "clock", {"clock": "content", "rotary_map": "as_released", "frequency": BANK}),
    (DotProductAttention, "gates", {"gates": "open"}),
    (DotProductAttention, "slopes", {"gates": "gain"}),
    (DotProductAttention, "slopes", {"gates": "gain", "slopes": ONES - 1}),
    (DotProductAttention, "slopes", {"slopes": SLOPES, "gates": "forget"}),
    (ContentFilterAttention, "frequency", {"frequency": torch.rand(4, 4)}),
    (ContentFilterAttention, "decay", {"decay": -ONES}),
    (ContentFilterAttention, "weight", {"weight": "misspelt"}),
    (ContentFilterAttention, "steady_state", {"steady_state": -1.0}),
    (ContentFilterAttention, "causal", {"causal": False}),
    (ContentFilterAttention, "dropout", {"dropout": 0.1, "backend": "reference"}),
    (ContentFilterAttention, "clock", {"clock": "content"}),
]


@pytest.mark.parametrize("kind", [RobustFilterAttention, DotProductAttention, ContentFilterAttention])
def test_options_that_do_not_fit(kind):
    for name, options in ((name, options) for of, name, options in REFUSED if of is kind):
        with only_our_own_checks(), pytest.raises(ValueError, match=rf"^{name}: got .*expected"):
            kind(16, 4, **options)


def test_sizes_and_dynamics_alone():
    with only_our_own_checks(), pytest.raises(ValueError, match=r"^frequency: got \(4,\)"):
        HeadDynamics(ONES, ONES)
    with pytest.raises(ValueError, match=r"^hidden_size: got 15"):
        ContentFilterAttention(15, 4)
    with pytest.raises(ValueError, match="hidden_size: got 30"):
        RobustFilterAttention(30, 4, frequency=torch.zeros(4, 8), decay=torch.zeros(4))


GIVEN = [
    ("times", {"times": torch.zeros(7)}),
    ("times", {"times": torch.arange(6)}),
    ("key_mask", {"key_mask": torch.ones(2, 6, dtype=torch.bool)}),
    ("segment_ids", {"segment_ids": torch.zeros(2, 7)}),
]


@pytest.mark.parametrize("layer", ["filter", "dot product", "content"])
def test_times_masks_and_segments_that_do_not_fit(layer):
    for name, given in GIVEN:
        with only_our_own_checks(), pytest.raises(ValueError, match=rf"^{name}: got"):
            LAYERS[layer]()(hidden(dtype=torch.float32), **given)


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
