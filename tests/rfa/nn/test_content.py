"""Content-dependent dynamics: a walk along the path of tokens, gradients, extremes."""

import numpy as np
import pytest
import torch
from cover import cover
from ops import oracle

from rfa.nn import ContentFilterAttention

from .by_hand import EXACT, assert_near, hidden, merged, perturb, positive, softplus, states

SIZE, HEADS, MODES = 16, 2, 8
BACKENDS = {"reference": (torch.float64, EXACT), "cpu": (torch.float32, 1e-5)}


def layer_with(dtype=torch.float64, content=True, seed=1, **options):
    layer = ContentFilterAttention(SIZE, HEADS, decay=torch.tensor([0.05, 0.3]), **options)
    perturb(layer, seed)
    if not content:
        torch.nn.init.zeros_(layer.dynamics.weight)
    return layer.to(dtype)


def whereabouts(kind, length):
    generator = torch.Generator().manual_seed(3)
    times = positive(generator, 2, length, low=0.1, high=2.0).cumsum(-1)
    mask = torch.rand(2, length, generator=generator) > 0.3
    segments = torch.randint(0, 3, (2, length), generator=generator)
    return {
        "times of each row": {"times": times},
        "interleaved and masked": {"segment_ids": segments, "key_mask": mask},
    }[kind]


def test_initial_values():
    """As of the layer without content, at the steady state 0.1."""
    dynamics = ContentFilterAttention(SIZE, HEADS, decay=torch.tensor([0.05, 0.3])).dynamics
    assert not dynamics.weight.any()
    np.testing.assert_allclose(softplus(dynamics.bias.view(HEADS, -1)[:, 1].detach()), [0.01, 0.06], rtol=1e-5)
    for name, value in {"key_noise": 1, "query_noise": 1, "robustness": 4, "inverse_temperature": 1}.items():
        np.testing.assert_allclose(softplus(getattr(dynamics, f"raw_{name}").detach()), value, rtol=1e-5)


def by_hand(layer, x, times, weight):
    """Every pair by walking from its key to its query, one interval at a time: no sums from an origin."""
    q, k, v = (oracle.as_complex(s) for s in states(layer, x))
    batch, heads, length, modes = q.shape
    d = layer.dynamics
    rates = softplus(oracle.as_array(x) @ oracle.as_array(d.weight).T + oracle.as_array(d.bias))
    rates = rates.reshape(batch, length, heads, -1)
    eta2, gamma2, nu, beta = (
        softplus(getattr(d, f"raw_{n}")) for n in ("key_noise", "query_noise", "robustness", "inverse_temperature")
    )
    floor = oracle.as_array(d.noise_floor)
    out = np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                scores, carried = [], []
                for j in range(i + 1):
                    factor, variance = np.ones(modes, complex), 0.0
                    for step in range(j, i):
                        mu, sigma2, *half = rates[b, step, h]
                        omega = np.stack([half, np.negative(half)], -1).ravel()
                        dt = times[b][step + 1] - times[b][step]
                        factor = factor * np.exp((-mu + 1j * omega) * dt)
                        left = np.exp(-2 * mu * dt)
                        variance = left * variance + sigma2 * (1 - left) / (2 * mu)
                    sigma = variance + eta2[h] * np.abs(factor[0]) ** 2 + floor[h]
                    distance = np.sum(np.abs(q[b, h, i] - factor * k[b, h, j]) ** 2)
                    distance = distance / (nu[h] * modes * (sigma + gamma2[h]))
                    evidence = (nu[h] + 1) * np.log1p(distance) if weight == "student_t" else distance
                    scores.append(beta[h] * (-np.log(sigma) - evidence))
                    carried.append(factor * v[b, h, j])
                weights = np.exp(np.array(scores) - max(scores))
                out[b, h, i] = (weights / weights.sum()) @ np.array(carried) - v[b, h, i]
    return merged(layer, np.concatenate([out.real, out.imag], -1))


@cover(irregular=[False, True], weight=["student_t", "exponential"], backend=BACKENDS)
def test_layer_is_a_walk_along_the_path(backend, weight, irregular):
    dtype, tolerance = BACKENDS[backend]
    layer, x = layer_with(dtype, weight=weight, backend=backend), hidden(dtype=dtype)
    times = whereabouts("times of each row", 7)["times"] if irregular else None
    walked = torch.arange(7).expand(2, -1) if times is None else times
    assert_near(layer(x, times=times), by_hand(layer, x, walked.double().numpy(), weight), max(tolerance, 1e-9))


@pytest.mark.parametrize("where", ["times of each row", "interleaved and masked"])
def test_gradients_of_the_reference(where):
    layer = layer_with(backend="reference")
    x, given = hidden(length=5), whereabouts(where, 5)
    if "times" in given:
        given["times"].requires_grad_()
    names, parameters = zip(*layer.dynamics.named_parameters(), strict=True)

    def run(x, times, *values):
        with_times = given if times is None else {**given, "times": times}
        return torch.func.functional_call(
            layer, {f"dynamics.{n}": p for n, p in zip(names, values, strict=True)}, (x,), with_times
        )

    inputs = [p.detach().clone().requires_grad_() for p in parameters]
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), given.get("times"), *inputs), fast_mode=True)


@cover(1, backend=BACKENDS, scale=[1e-8, 1e3])
def test_extreme_content_stays_finite(backend, scale):
    dtype, _ = BACKENDS[backend]
    layer, x = layer_with(dtype, backend=backend), scale * hidden(dtype=dtype)
    times = torch.tensor([0.0, 1e-6, 1, 2, 1e3, 1e6, 1e6 + 1], dtype=torch.float64)
    out = layer(x.requires_grad_(), times=times)
    assert out.isfinite().all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
