"""The content clock: a layer at the times that it sets, its limits, its gradients, and absent tokens."""

import numpy as np
import pytest
import torch
from cover import cover
from ops import oracle

from rfa.dynamics import rotary_frequencies
from rfa.nn import DotProductAttention, RobustFilterAttention, alibi_slopes
from rfa.nn.projections import LEAST_RATE

from .by_hand import EXACT, assert_near, dot_product, hidden, merged, perturb, softplus, states
from .layers import IRREGULAR, M2
from .test_content import whereabouts

SIZE, HEADS = 16, 2
DECAY, ROPE = torch.tensor([0.05, 0.3]), rotary_frequencies(HEADS, SIZE // HEADS)
BACKENDS = {"reference": (torch.float64, EXACT), "cpu": (torch.float32, 1e-5)}
FILTERS = {
    "lyapunov": {**M2, "decay": DECAY},
    "riccati": {"decay": DECAY},
    "exponential, horizon": {**M2, "decay": DECAY, "weight": "exponential", "horizon": 0.7},
}
PRODUCTS = {
    "RoPE": {"frequency": ROPE},
    "RoPER, slopes": {"frequency": ROPE, "rotate_values": True, "slopes": alibi_slopes(HEADS)},
    "learned slopes": {"frequency": ROPE, "slopes": alibi_slopes(HEADS), "learn_slopes": True},
    "decay, gates": {"frequency": ROPE, "decay": DECAY, "gates": "forget"},
}


def layer_of(name, dtype=torch.float64, clock="content", **options):
    build = RobustFilterAttention if name in FILTERS else DotProductAttention
    chosen = {**(FILTERS.get(name) or PRODUCTS[name]), **options}
    return perturb(build(SIZE, HEADS, clock=clock, **chosen)).to(dtype)


def clock_by_hand(layer, x, times):
    """t_i = sum over l < i of rate_l (T_{l+1} - T_l), `(batch, heads, length)`."""
    x, weight, bias = (oracle.as_array(part) for part in (x, layer.clock.weight, layer.clock.bias))
    rate = softplus(x @ weight.T + bias) + LEAST_RATE
    steps = rate[:, :-1] * np.diff(times, axis=-1)[..., None]
    return np.concatenate([np.zeros_like(rate[:, :1]), steps.cumsum(1)], 1).transpose(0, 2, 1)


@cover(irregular=[False, True], name=FILTERS, backend=BACKENDS)
def test_a_filter_by_hand_at_the_times_of_its_clock(backend, name, irregular):
    dtype, tolerance = BACKENDS[backend]
    layer, x = layer_of(name, dtype, backend=backend), hidden(dtype=dtype)
    given = whereabouts("times of each row", 7)["times"] if irregular else None
    times = torch.arange(7.0).double().expand(2, -1) if given is None else given
    clock = clock_by_hand(layer, x, times.numpy())
    assert np.abs(clock - times.numpy()[:, None]).max() > 0.1
    parameters = {key: value.detach() for key, value in layer.dynamics().items()}
    options = {key: value for key, value in FILTERS[name].items() if key in ("prior", "weight")}
    options = {"prior": "riccati", **options}
    q, k, v = states(layer, x)
    estimates = []
    for head in range(HEADS):
        of_head = {key: value[head : head + 1] for key, value in parameters.items()}
        at = torch.from_numpy(clock[:, head])
        part = slice(head, head + 1)
        estimates.append(oracle.filter_attention(q[:, part], k[:, part], v[:, part], times=at, **of_head, **options)[0])
    own = oracle.as_array(v) if layer.innovation else 0.0
    expected = merged(layer, np.concatenate(estimates, 1) - own)
    assert_near(layer(x, times=given), expected, max(tolerance, 1e-9))


@cover(1, name=PRODUCTS, given=[None, IRREGULAR[:7]])
def test_dot_products_by_hand_at_the_times_of_their_clock(name, given):
    layer, x = layer_of(name), hidden()
    clock = clock_by_hand(layer, x, (torch.arange(7.0) if given is None else given).numpy()[None])
    expected = dot_product(layer, x, times=clock, **PRODUCTS[name])
    assert_near(layer(x, times=given), expected, 1e-6)  # float32 frequencies


def test_a_new_clock_shows_the_given_times():
    x = hidden(dtype=torch.float32)
    layer = RobustFilterAttention(SIZE, HEADS, clock="content")
    rate = layer.clock(x)
    torch.testing.assert_close(rate, torch.ones_like(rate), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["lyapunov", "riccati", "learned slopes"])
def test_gradients_of_the_reference(name):
    layer, x = layer_of(name, backend="reference"), hidden(length=5)
    names = [n for n, _ in layer.named_parameters() if n.startswith("clock.")]
    assert names

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    clock = [layer.get_parameter(n).detach().clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *clock), fast_mode=True)


@pytest.mark.parametrize("logit", [-1e4, 1e4])
@pytest.mark.parametrize("name", ["riccati", "learned slopes"])
def test_extreme_rates_stay_finite(name, logit):
    layer, x = layer_of(name, torch.float32), hidden(dtype=torch.float32)
    torch.nn.init.constant_(layer.clock.bias, logit)
    out = layer(x)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
