"""The layer against a composition by hand: projections, the operator's oracle, innovation, output projection."""

import numpy as np
import torch
from cover import cover
from ops import oracle

from rfa.nn import RobustFilterAttention

from .by_hand import EXACT, assert_near, hidden, merged, perturb, positive, softplus, states
from .layers import M2

SIZE, HEADS, MODES = 16, 2, 4
# options of the layer, what the oracle is given for them, whether the innovation is taken
CASES = {
    "defaults": ({}, {"prior": "riccati"}, False),
    "no innovation": ({"prior": "lyapunov"}, {}, False),
    "m2": (M2, {}, True),
    "query noise in bias": ({**M2, "query_noise_in_bias": True}, {"query_noise_in_bias": True}, True),
    "fixed horizon": ({**M2, "horizon": 0.7}, {"horizon": torch.full((HEADS,), 0.7)}, True),
    "learned horizon": ({**M2, "horizon": 0.7, "learn_horizon": True}, {"horizon": "learned"}, True),
    "exponential": ({**M2, "weight": "exponential"}, {"weight": "exponential"}, True),
    "flat": ({"prior": "flat", "innovation": True}, {"flat": True}, True),
    "riccati": ({"innovation": True, "initial_slopes": None}, {"prior": "riccati"}, True),
    "values do not turn": ({**M2, "rotate_values": False}, {"rotate_values": False}, True),
    "all keys": ({**M2, "causal": False}, {"causal": False}, True),
    "all keys, riccati": ({"causal": False}, {"causal": False, "prior": "riccati"}, False),
    "no gate": ({**M2, "gate": False}, {"gate": False}, True),
    "learned frequency": ({**M2, "learn_frequencies": True}, {}, True),
    "learned decay": ({**M2, "learn_decay": True}, {}, True),
    "as released": (
        {"prior": "lyapunov", "query_noise_in_bias": True, "horizon": 0.7, "learn_horizon": True},
        {"query_noise_in_bias": True, "horizon": "learned"},
        False,
    ),
}


def dynamics_by_hand(layer, options, flat):
    """The operator's parameters from the layer's raw state, by the formulas of `HeadDynamics`."""
    raw = {n.removeprefix("raw_"): oracle.as_array(value) for n, value in layer.dynamics.state_dict().items()}
    constant = {"process_noise": 0.0, "key_noise": 0.0, "query_noise": 0.0, "noise_floor": 1.0}
    found = {name: np.full(HEADS, value) for name, value in constant.items()} if flat else {"noise_floor": [0.01] * 2}
    stored = ["robustness", "inverse_temperature"] + ([] if flat else ["process_noise", "key_noise"])
    if not flat:
        if "raw_query_noise" in dict(layer.dynamics.named_parameters()):
            stored.append("query_noise")
        else:  # gamma^2 enters nothing
            found["query_noise"] = np.full(HEADS, np.nan)
    found.update({name: softplus(raw[name]) for name in stored})
    found["decay"] = softplus(raw["decay"]) if options.get("learn_decay") else raw["decay"]
    found["frequency"] = raw["frequency"]
    if options.get("learn_frequencies"):
        found["frequency"] = np.stack([raw["frequency"], -raw["frequency"]], -1).reshape(HEADS, MODES * 2)
    return found, raw


@cover(1, irregular=[False, True], name=CASES)
def test_layer_is_its_composition(name, irregular):
    options, asked, innovation = CASES[name]
    generator = torch.Generator().manual_seed(5)
    frequency = torch.randn(HEADS, MODES, generator=generator, dtype=torch.float64).repeat_interleave(2, -1)
    frequency = frequency * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(MODES)
    decay = torch.tensor([0.0, 0.3], dtype=torch.float64)
    size = 2 * MODES * HEADS
    layer = RobustFilterAttention(size, HEADS, frequency=frequency, decay=decay, **options).double()
    perturb(layer)

    x = hidden(size=size)
    times = positive(generator, x.shape[1], low=0.1, high=2.0).cumsum(0) if irregular else None
    asked = dict(asked)
    parameters, raw = dynamics_by_hand(layer, options, asked.pop("flat", False))
    if "horizon" in asked and isinstance(asked["horizon"], str):
        asked["horizon"] = softplus(raw["horizon"])
    q, k, v = states(layer, x)
    estimate, _ = oracle.filter_attention(q, k, v, **parameters, **asked, times=times)
    expected = merged(layer, estimate - v if innovation else estimate)
    # EXACT, but for noise_floor and a fixed horizon, which the layer makes in float32
    assert_near(layer(x, times=times), expected, 1e-6 if options.get("prior") != "flat" else EXACT)
