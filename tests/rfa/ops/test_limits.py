"""Appendix C: positional encodings and filtering regimes, read off the operator's own weights and log precisions.

Weights come out of the operator as its estimate of identity channels without value rotation: `A_ij E_ij`. One key at
t = 0 and queries at the lags give a head's logit alone: `log s = beta_s L(tau)`.
"""

import math

import torch
import torch.nn.functional as F

from rfa.dynamics import bias, gate, peak_lag, prior_response
from rfa.nn import alibi_slopes

from .problems import EXACT, assert_same, attend, problem, within

# decay, process_noise, key_noise, noise_floor of a head each; sigma~^2 = 1, 2.5, 0.05, 0.01.
DIFFUSIVE = [(0.25, 0.5, 0.1, 0.02), (0.1, 0.5, 0.6, 0.3)]
INTEGRATIVE = [(0.2, 0.02, 1.5, 0.01), (0.05, 0.001, 2.0, 0.03)]
NAMES = ("decay", "process_noise", "key_noise", "noise_floor")
QUERY_NOISE = 0.3
LAGS = torch.linspace(0, 40, 33, dtype=torch.float64)


def heads(cases, **shape):
    """A problem with zero queries and keys, beta_s = 1, and these noises; and the noises as columns over lags."""
    inputs = problem(0, heads=len(cases), **shape)
    numbers = torch.tensor(cases, dtype=torch.float64).T
    inputs.update(zip(NAMES, numbers, strict=True))
    inputs["query"].zero_(), inputs["key"].zero_()
    inputs["query_noise"].fill_(QUERY_NOISE)
    inputs["inverse_temperature"].fill_(1.0)
    return inputs, numbers[:, :, None]


def weights(inputs, backend, **options):
    """`A_ij E_ij`, the estimate of identity channels: `(batch, heads, queries, keys)` for an even number of keys."""
    batch, count, keys, _ = inputs["key"].shape
    identity = torch.eye(keys, dtype=torch.float64).expand(batch, count, keys, keys)
    return attend({**inputs, "value": identity}, backend, rotate_values=False, **options)[0]


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def test_zero_decay_is_a_gated_and_biased_dot_product(backend):
    """Appendix C.1 with noise: `B - 2 P~ / nu + 2 P~ cos / nu`, with the bias and the gate of `rfa.dynamics`."""
    inputs = problem(2, keys=8, modes=3)
    inputs["query"], inputs["key"] = unit(inputs["query"]), unit(inputs["key"])
    inputs["decay"].zero_(), inputs["frequency"].zero_()
    steps = torch.arange(8, dtype=torch.float64)
    lag = (steps[:, None] - steps).clamp(min=0)
    mu, sigma2, eta2, floor, gamma2, nu, beta = (
        inputs[n][:, None, None] for n in (*NAMES, "query_noise", "robustness", "inverse_temperature")
    )
    opened = 2 * gate(mu, sigma2, eta2, floor, gamma2, lag) / (3 * nu)
    score = beta * (bias(mu, sigma2, eta2, floor, lag) - opened + opened * (inputs["query"] @ inputs["key"].mT))
    expected = score.masked_fill(steps[:, None] < steps, -torch.inf).softmax(-1)
    assert_same(weights(inputs, backend, weight="exponential"), expected, backend)


def test_alibi_slopes_at_short_lags(backend):
    """`beta_s sigma^2 / beta` nats per unit of time for `tau << beta / sigma^2` (appendix C.1), without content."""
    inputs, _ = heads([(0.0, 1.0, 0.5, 0.1)] * 4, keys=10)
    slopes, floor = alibi_slopes(4).double(), inputs["key_noise"] + inputs["noise_floor"]
    inputs["inverse_temperature"] = torch.tensor([0.5, 1.0, 2.0, 1.0], dtype=torch.float64)
    inputs["process_noise"] = slopes * floor / inputs["inverse_temperature"]
    times = torch.arange(10, dtype=torch.float64) / 100
    lag = times[:, None] - times
    found = weights(inputs, backend, times=times)
    last = found[0, :, -1].log()
    steepness = (last[:, -1:] - last[:, :-1]) / lag[-1, :-1] / slopes[:, None]
    # -log(1 + x) = -x (1 - x / 2 + ...), x = slope tau / beta_s; float32 weights carry 1e-7 of a drop of 4e-5 or more.
    short = (slopes / inputs["inverse_temperature"])[:, None] * lag[-1, :-1]
    rounding = 1e-9 if backend == "reference" else 1e-2
    assert bool((steepness < 1 + rounding).all())
    assert bool((steepness > 1 - short / 2 - rounding).all())
    # Attention with ALiBi's bias, up to that second order.
    mask = torch.where(lag >= 0, -slopes[:, None, None] * lag, -torch.inf)
    zero = torch.zeros(1, 4, 10, 2, dtype=torch.float64)
    identity = torch.eye(10, dtype=torch.float64).expand(1, 4, 10, 10)
    alibi = F.scaled_dot_product_attention(zero, zero, identity, attn_mask=mask)
    second = (slopes**2 / inputs["inverse_temperature"])[:, None, None] * lag.square() / 2
    assert bool(((found[:1] - alibi).abs() <= second.max() * alibi + within(EXACT, backend)).all())


def logit(inputs, backend, size=0.0, lags=LAGS, **options):
    """`L(tau)` of each head at the lags, of a key of 0 and a query whose squared norm is `size`."""
    batch, count, _, channels = inputs["key"].shape
    query = torch.full((batch, count, len(lags), channels), math.sqrt(size / channels), dtype=torch.float64)
    return attend({**inputs, "query": query}, backend, query_times=lags, **options)[1][0]


def test_the_peak_lag_is_where_the_weights_are_largest(backend):
    """`A E` without content is the prior response, normalised; its argmax is `log(alpha / beta) / (2 mu)` or 0."""
    step, keys = 0.25, 240
    inputs, numbers = heads(
        [*DIFFUSIVE, *INTEGRATIVE, (0.2, 0.02, 0.05, 0.01), (0.0, 0.3, 0.5, 0.1)], keys=keys, batch=1
    )
    inputs["query"] = inputs["query"][:, :, -1:]
    times = step * torch.arange(keys, dtype=torch.float64)
    by_lag = weights(inputs, backend, times=times)[0, :, 0].flip(-1)
    peak = peak_lag(*numbers[:, :, 0])
    assert bool((peak[2:4] > 5).all())
    assert bool((peak[[0, 1, 4, 5]] == 0).all())
    # The grid's nearest point: one side's or the other's, for the response is not symmetric about its peak.
    assert bool(((step * by_lag.argmax(-1) - peak).abs() < step).all())
    response = prior_response(*numbers, times)
    normalised = response / bias(*numbers, times).exp().sum(-1, keepdim=True)
    assert_same(by_lag, normalised, backend)
