"""The content clock: a layer at the times that it sets, its limits, its gradients, and absent tokens."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cover import cover
from ops import oracle
from shapes import only_our_own_checks

from rfa.dynamics import rotary_frequencies
from rfa.nn import DotProductAttention, RobustFilterAttention, alibi_slopes
from rfa.nn.projections import merge_heads
from rfa.nn.state_options import LEAST_RATE
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.positions import checked_positions

from .by_hand import EXACT, assert_near, hidden, merged, perturb, softplus, states
from .cached import SITUATIONS, build, read
from .test_content import WHERE, whereabouts

SIZE, HEADS = 16, 2
DECAY, ROPE = torch.tensor([0.05, 0.3]), rotary_frequencies(HEADS, SIZE // HEADS)
BACKENDS = {"reference": (torch.float64, EXACT), "cpu": (torch.float32, 1e-5)}
FILTERS = {
    "lyapunov": {"decay": DECAY},
    "riccati": {"decay": DECAY, "prior": "riccati"},
    "exponential, horizon": {"decay": DECAY, "weight": "exponential", "horizon": 0.7},
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


def without_clock(layer, name, rate=None):
    """The same layer by the given times, its clock left out or set to one rate."""
    if rate is not None:
        torch.nn.init.zeros_(layer.clock.weight)
        torch.nn.init.constant_(layer.clock.bias, float(np.log(np.expm1(rate - LEAST_RATE))))
    other = layer_of(name, layer.query_projection.weight.dtype, clock="times")
    other.load_state_dict({n: x for n, x in layer.state_dict().items() if not n.startswith("clock.")})
    return other


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
    q, k, v = states(layer, x)
    estimates = []
    for head in range(HEADS):
        of_head = {key: value[head : head + 1] for key, value in parameters.items()}
        at = torch.from_numpy(clock[:, head])
        part = slice(head, head + 1)
        estimates.append(oracle.filter_attention(q[:, part], k[:, part], v[:, part], times=at, **of_head, **options)[0])
    expected = merged(layer, np.concatenate(estimates, 1) - oracle.as_array(v))
    assert_near(layer(x, times=given), expected, max(tolerance, 1e-9))


@pytest.mark.parametrize("name", PRODUCTS)
def test_dot_products_by_hand_at_the_times_of_their_clock(name):
    layer, x = layer_of(name), hidden()
    clock = clock_by_hand(layer, x, np.arange(7.0)[None])
    q, k, v = (oracle.as_complex(s) for s in states(layer, x))
    turn = np.exp(1j * clock[..., None] * oracle.as_array(layer.geometry.frequency)[:, None])
    back = turn.conj() if layer.rotate_values else turn
    scores = np.einsum("bhic,bhjc->bhij", q * back, (k * back).conj()).real / np.sqrt(SIZE)
    lag = clock[..., :, None] - clock[..., None, :]
    if layer.slopes() is not None:
        scores = scores - oracle.as_array(layer.slopes().detach())[:, None, None] * lag
    if "log_gate" in (marks := layer.marks(x)):
        sums = oracle.as_array(marks["log_gate"]).cumsum(-1)
        scores = scores + sums[..., :, None] - sums[..., None, :]
    scores = np.where(np.tri(7, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    if layer.geometry.decay is not None:
        weights = weights * np.exp(-oracle.as_array(layer.geometry.decay)[:, None, None] * lag.clip(0))
    out = weights @ (v * back if layer.rotate_values else v)
    out = out / back if layer.rotate_values else out
    assert_near(layer(x), merged(layer, np.concatenate([out.real, out.imag], -1)), 1e-9)


@pytest.mark.parametrize("rate", [1.0, 2.5])
@pytest.mark.parametrize("name", [*FILTERS, *PRODUCTS])
def test_a_constant_clock_is_the_layer_at_other_times(name, rate):
    layer, x, times = layer_of(name), hidden(), whereabouts("irregular", 7)["times"]
    other = without_clock(layer, name, rate)
    torch.testing.assert_close(layer(x), other(x, times=rate * torch.arange(7.0)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer(x, times=times), other(x, times=rate * times), rtol=1e-9, atol=1e-9)


def test_a_new_clock_shows_the_given_times():
    x = hidden(dtype=torch.float32)
    layer = RobustFilterAttention(SIZE, HEADS, clock="content")
    rate = layer.clock(x)
    torch.testing.assert_close(rate, torch.ones_like(rate), rtol=0, atol=1e-6)


def test_slopes_without_rotation_are_a_forget_gate():
    """`log f = -slope rate` of a token holds until the next one."""
    layer, x = layer_of("learned slopes", frequency=None), hidden()
    q, k, v = layer.queries(x), layer.keys(x), layer.values(x, layer.keys(x))
    forgotten = -layer.slopes()[:, None] * layer.marks(x)["rate"]
    gates = F.pad(forgotten[..., :-1], (1, 0))
    positions = checked_positions(2, 7, 7, x.device, None)
    expected = decayed_dot_product_attention(q, k, v, positions=positions, log_gate=gates, backend="reference")
    torch.testing.assert_close(layer(x), layer.output_projection(merge_heads(expected)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["riccati", "RoPER, slopes"])
def test_gradients_of_the_fused_backend(name, where):
    """Against the dense form in float64: for the input, the clock, the dynamics and the projections."""
    layer, exact = layer_of(name, torch.float32, backend="cpu"), layer_of(name, backend="reference")
    exact.load_state_dict(layer.state_dict())
    x, given = hidden(length=37, dtype=torch.float32), whereabouts(where, 37)
    target, found = hidden(seed=9, length=37), []
    for each in (layer, exact):
        start = x.detach().clone().to(each.query_projection.weight.dtype).requires_grad_()
        each(start, **given).mul(target.to(start.dtype)).sum().backward()
        found.append([("input", start.grad), *((n, p.grad) for n, p in each.named_parameters())])
    for (name, single), (_, double) in zip(*found, strict=True):
        scale = max(1.0, float(double.abs().max()))
        error = float((single - double).abs().max()) / scale
        assert error < 1e-4, (name, error)  # float32 sums over 37 x 37 pairs
    assert found[1][1][1].abs().max() > 0


@pytest.mark.parametrize("name", ["lyapunov", "riccati", "learned slopes"])
def test_gradients_of_the_reference(name):
    layer, x = layer_of(name, backend="reference"), hidden(length=5)
    names = [n for n, _ in layer.named_parameters() if n.startswith("clock.")]
    assert names

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    clock = [layer.get_parameter(n).detach().clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *clock), fast_mode=True)


@pytest.mark.parametrize("name", ["riccati", "RoPER, slopes"])
def test_masked_tokens_are_as_if_absent(name):
    layer, x = layer_of(name), hidden()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, [0, 3, 4]] = False
    kept = [1, 2, 5, 6]
    expected = layer(x[:, kept], times=torch.tensor(kept))
    torch.testing.assert_close(layer(x, key_mask=mask)[:, kept], expected, rtol=EXACT, atol=EXACT)
    times = torch.tensor([50.0, 1, 2, -9, 1e6, 5, 6], dtype=torch.float64)  # padding may carry any time
    found = layer(x, key_mask=mask, times=times)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, kept], expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", ["clock", "clock, horizon", "clock of RoPER, gates", "clock of slopes", "content"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_chunks_are_the_whole(name, situation):
    """Also where a segment that comes later has a smaller number: its clock moves no other."""
    layer, x, given = build(name), hidden(length=9), SITUATIONS[situation]
    kept = given.get("key_mask", torch.ones(2, 9, dtype=torch.bool))
    with torch.no_grad():
        whole, (pieces, _) = layer(x, **given), read(layer, x, **given)
    torch.testing.assert_close(pieces[kept], whole[kept], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("logit", [-1e4, 1e4])
@pytest.mark.parametrize("name", ["riccati", "learned slopes"])
def test_extreme_rates_stay_finite(name, logit):
    layer, x = layer_of(name, torch.float32), hidden(dtype=torch.float32)
    torch.nn.init.constant_(layer.clock.bias, logit)
    out = layer(x)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_half_precision_keeps_the_clock_whole():
    layer = layer_of("riccati", torch.float32).bfloat16()
    assert layer.clock.weight.dtype == torch.float32
    x = hidden(dtype=torch.bfloat16)
    torch.testing.assert_close(
        layer(x).float(), layer.float()(x.float()), rtol=0.05, atol=0.05
    )  # 8 bits, a dozen terms


def test_bad_input_is_refused():
    for options, expected in (
        ({"clock": "misspelt"}, "clock: got 'misspelt'"),
        ({"causal": False, "frequency": ROPE}, "clock: got 'content', expected 'times' with causal=False"),
        ({"window": 3, "frequency": ROPE}, "clock: got 'content', expected 'times' with a window"),
        ({"rotary_map": "as_released", "frequency": ROPE}, "clock: got 'content'"),
    ):
        with only_our_own_checks(), pytest.raises(ValueError, match=expected):
            DotProductAttention(SIZE, HEADS, **{"clock": "content", **options})
    with pytest.raises(ValueError, match="clock: got 'content', expected 'times' with aggregation"):
        RobustFilterAttention(SIZE, HEADS, clock="content", aggregation="routing")
    with pytest.raises(ValueError, match="query_states: got 'queries of their own with gates, taps"):
        layer_of("riccati")(hidden(), query_states=hidden(), query_times=torch.arange(7.0))
