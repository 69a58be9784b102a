"""The layers once more in plain numpy, from the specification; only the operator's oracle is shared."""

import numpy as np
import torch
from ops import oracle

# Both sides work in float64 on numbers of order one, with a few hundred roundings each.
EXACT = 1e-10
# float32 (eps 1.2e-7): sums of some dozen terms of order one, exponentiated.
SINGLE = 2e-5


def hidden(seed=0, batch=2, length=7, size=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, size, generator=generator, dtype=torch.float64).to(dtype)


def positive(generator, *shape, low=0.1, high=1.0):
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)


def perturb(layer, seed=1):
    """Move every parameter from its initial value, so that a swapped or forgotten one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return layer


def softplus(x):
    return np.log1p(np.exp(oracle.as_array(x)))


def linear(layer, x):
    return x @ oracle.as_array(layer.weight).T + oracle.as_array(layer.bias)


def states(layer, x):
    """Queries, keys and values `(batch, heads, length, 2 d)`: each head's channels are consecutive."""
    batch, length, _ = x.shape
    projections = (layer.query_projection, layer.key_projection, layer.value_projection)
    split = (linear(p, oracle.as_array(x)).reshape(batch, length, layer.num_heads, -1) for p in projections)
    q, k, v = (np.moveaxis(s, 2, 1) for s in split)
    if getattr(layer, "state_scale", None) is not None:
        scale = softplus(layer.state_scale.raw_scale.detach())[:, None, None]
        q, k = (scale * s / np.sqrt((s**2).mean(-1, keepdims=True) + 1e-6) for s in (q, k))
    return q, k, v


def merged(layer, estimate):
    """The output projection of `(batch, heads, length, 2 d)`."""
    batch, _, length, _ = estimate.shape
    return linear(layer.output_projection, np.moveaxis(estimate, 1, 2).reshape(batch, length, -1))


def riccati_slopes(layer):
    """`-log(1 - K)`, the gain from the recursion itself, run until it stays."""
    noise = {name.removeprefix("raw_"): softplus(p) for name, p in layer.dynamics.named_parameters()}
    observed = noise["key_noise"] + oracle.as_array(layer.dynamics.noise_floor)
    variance = noise["process_noise"]
    for _ in range(10_000):
        gain = variance / (variance + observed)
        variance = (1 - gain) * variance + noise["process_noise"]
    return -np.log1p(-gain)


def dot_product(
    layer,
    x,
    *,
    frequency=None,
    decay=None,
    slopes=None,
    learn_slopes=False,
    gates=None,
    rotate_values=False,
    innovation=False,
    times=None,
    causal=True,
    key_mask=None,
):
    """`W_o [sum_j softmax_j(Re(q_i^H k_j e^{..}) / sqrt(2d) + bias) e^{-mu lag} v_j]`, in complex numbers."""
    q, k, v = (oracle.as_complex(s) for s in states(layer, x))
    batch, heads, length, modes = q.shape
    t = np.arange(length, dtype=np.float64) if times is None else oracle.as_array(times)
    t = t if t.ndim == 3 else np.broadcast_to(t, (batch, length))[:, None].repeat(heads, 1)
    seen = np.ones((batch, length), bool) if key_mask is None else oracle.as_array(key_mask, bool)
    omega = np.zeros((heads, modes)) if frequency is None else oracle.as_array(frequency)
    mu = np.zeros(heads) if decay is None else oracle.as_array(decay)
    slope = np.zeros(heads) if slopes is None else oracle.as_array(slopes)
    slope = riccati_slopes(layer) if learn_slopes else slope
    log_gate = np.zeros((batch, length, heads))
    log_gain = np.zeros((batch, length, heads))
    if gates is not None:
        log_gate = -np.log1p(np.exp(-linear(layer.gate_projection, oracle.as_array(x))))
    if gates == "gain":
        log_gain, slope = np.log(1 - np.exp(log_gate)), np.zeros(heads)
    turn_sign = -1 if rotate_values else 1  # RoPE as published turns forwards: q^H k with e^{i w (t_j - t_i)}
    out = np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                lag = t[b, h, i] - t[b, h]
                turned = np.exp(-1j * turn_sign * omega[h] * lag[:, None]) * k[b, h]
                score = (turned @ q[b, h, i].conj()).real / np.sqrt(2 * modes) - slope[h] * abs(lag)
                score += [log_gate[b, j + 1 : i + 1, h].sum() for j in range(length)]
                score += log_gain[b, :, h]
                score[(causal & (np.arange(length) > i)) | ~seen[b]] = -np.inf
                weight = np.exp(score - score.max())
                weight = weight / weight.sum() * np.exp(-mu[h] * abs(lag))
                carried = v[b, h]
                if rotate_values:
                    carried = np.exp(1j * omega[h] * lag[:, None]) * carried
                out[b, h, i] = weight @ carried - (v[b, h, i] if innovation else 0)
    return merged(layer, np.concatenate([out.real, out.imag], -1))


def assert_near(actual, expected, tolerance=EXACT):
    np.testing.assert_allclose(oracle.as_array(actual), oracle.as_array(expected), rtol=tolerance, atol=tolerance)
