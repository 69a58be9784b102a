"""The anisotropic operator twice more, as appendix B writes it: in explicit loops, and in the stationary frame.

`cd tests && python -m ops.anisotropic` measures where the second one fails (docs/record/experiments.md).
"""

import math

import numpy as np
import torch

from rfa.appendix import tensor_filter_attention
from rfa.dynamics import covariance, rotate

from .oracle import as_array, as_complex, phi
from .problems import problem, uniform

PER_MODE = ("decay", "process_noise", "key_noise", "query_noise")


def tensor_problem(seed=0, *, heads=2, modes=3, dtype=torch.float64, **shape):
    """As `problem`, with a decay and noises for each mode; mode 0 of head 0 has decay 0."""
    inputs = problem(seed, heads=heads, modes=modes, **shape)
    g = torch.Generator().manual_seed(500 + seed)
    inputs["decay"] = uniform(g, 0.05, 0.8, heads, modes)
    inputs["decay"][0, 0] = 0.0
    for name in PER_MODE[1:]:
        inputs[name] = uniform(g, 0.1, 1.0, heads, modes)
    return {name: x.to(dtype) for name, x in inputs.items()}


def widened(inputs):
    """The same problem of the isotropic operator, for the anisotropic one: all modes of a head agree."""
    return {n: x[:, None].expand(inputs["frequency"].shape) if n in PER_MODE else x for n, x in inputs.items()}


def loops(
    query, key, value, *,
    decay, frequency, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature,
    times=None, query_times=None, key_mask=None, segment_ids=None, causal=True, weight="student_t", rotate_values=True,
):  # fmt: skip
    """`(output, log_precision)` as float64 arrays; arguments as `rfa.tensor_filter_attention`."""
    q, k, v = (as_complex(as_array(x)) for x in (query, key, value))
    mu, omega, sigma2, eta2, gamma2 = (as_array(x) for x in (decay, frequency, process_noise, key_noise, query_noise))
    floor2, nu_s, beta = (as_array(x) for x in (noise_floor, robustness, inverse_temperature))
    batch, heads, n_query, modes = q.shape
    n_key = k.shape[2]
    t_key = np.broadcast_to(np.arange(n_key) if times is None else as_array(times), (batch, n_key))
    t_query = t_key[:, n_key - n_query :] if query_times is None else as_array(query_times)
    t_query = np.broadcast_to(t_query, (batch, n_query))
    present = np.ones((batch, n_key), bool) if key_mask is None else as_array(key_mask, bool)
    segment = np.zeros((batch, n_key), int) if segment_ids is None else as_array(segment_ids, int)
    of_query = np.zeros((batch, n_query), int) if segment_ids is None else segment[:, n_key - n_query :]

    output = np.zeros((batch, heads, n_query, modes), complex)
    log_precision = np.full((batch, heads, n_query, modes), -np.inf)
    for b, h, i in np.ndindex(batch, heads, n_query):
        logits, carried = [], []
        for j in range(n_key):
            tau = t_query[b, i] - t_key[b, j]
            if not present[b, j] or segment[b, j] != of_query[b, i] or (causal and tau < 0):
                continue
            lag = abs(tau)
            shrink, turn = np.exp(-mu[h] * lag), np.exp(1j * omega[h] * tau)
            variance = np.array([s * phi(m, lag) for s, m in zip(sigma2[h], mu[h], strict=True)])
            variance += eta2[h] * shrink**2 + floor2[h]
            missed = np.abs(q[b, h, i] - shrink * turn * k[b, h, j]) ** 2
            distance = math.fsum(missed / (variance + gamma2[h])) / (nu_s[h] * modes)
            penalty = distance if weight == "exponential" else (nu_s[h] + 1) * math.log1p(distance)
            logits.append(beta[h] * (-np.log(variance) - penalty))
            carried.append(shrink * (turn if rotate_values else 1.0) * v[b, h, j])
        for m in range(modes if logits else 0):
            top = max(x[m] for x in logits)
            masses = [math.exp(x[m] - top) for x in logits]
            output[b, h, i, m] = sum(w * x[m] for w, x in zip(masses, carried, strict=True)) / math.fsum(masses)
            log_precision[b, h, i, m] = top + math.log(math.fsum(masses))
    return np.concatenate([output.real, output.imag], -1), log_precision


def stationary_frame(inputs, times):
    """The output in the form of appendix B.2: each state is carried to t = 0 once, and the estimate back from there.

    In the dtype of the inputs, `(length,)` times, causal. Rotations are taken with care: only the decay is on trial.
    """
    decay, process_noise, key_noise, query_noise = (inputs[n][:, :, None, None] for n in PER_MODE)
    floor, robustness, beta = (
        inputs[n][:, None, None, None] for n in ("noise_floor", "robustness", "inverse_temperature")
    )
    moved = inputs["decay"][:, None, :] * times[:, None]  # mu_k t_i: (heads, length, modes)
    forward, backward = torch.exp(-moved), torch.exp(moved).repeat(1, 1, 2)  # |Phi+|, |Phi-|

    def by_mode(x):
        return torch.stack(x.chunk(2, -1), -1).transpose(2, 3)  # (batch, heads, modes, length, 2)

    query, key, value = (
        by_mode(backward * rotate(inputs[n], inputs["frequency"], times, inverse=True))
        for n in ("query", "key", "value")
    )
    squared = query.square().sum(-1)[..., :, None] + key.square().sum(-1)[..., None, :] - 2 * (query @ key.mT)
    residual = forward.mT[..., None].square() * squared
    lag = times[:, None] - times
    variance = covariance(decay, process_noise, key_noise, floor, lag.clamp(min=0))
    distance = (residual / (variance + query_noise)).sum(2, keepdim=True) / (robustness * decay.shape[1])
    score = beta * (-torch.log(variance) - (robustness + 1) * torch.log1p(distance))
    attention = score.masked_fill(lag < 0, -torch.inf).softmax(-1)
    attention = attention.masked_fill(lag < 0, 0.0)
    estimate = (forward.mT[..., None] * (attention @ value)).permute(0, 1, 3, 4, 2).flatten(3)
    return rotate(estimate, inputs["frequency"], times)


def race(reach, dtype, seed=0, length=64):
    """Errors of the stationary frame and of the operator: of the estimates of the later half, in the worst mode.

    A mode's error is the norm of its deviation over the norm of its estimates. The fastest mode has `mu t = reach` at
    the last token, the others 0.1 to 0.9 of it. Judged by the operator in float64, whose own error is not seen.
    """
    exact = tensor_problem(seed, batch=1, heads=1, keys=length, modes=8)
    times = torch.arange(length, dtype=torch.float64)
    share = torch.tensor([[1.0, 0.9, 0.7, 0.6, 0.5, 0.4, 0.2, 0.1]], dtype=torch.float64)
    exact["decay"] = share * reach / (length - 1)
    given = {n: x.to(dtype) for n, x in exact.items()}
    expected = tensor_filter_attention(**{n: x.double() for n, x in given.items()}, times=times)
    results = stationary_frame(given, times.to(dtype)), tensor_filter_attention(**given, times=times)

    def size(x):
        return x[0, 0, length // 2 :].unflatten(-1, (2, -1)).norm(dim=(0, 1))

    return tuple((size(x.double() - expected) / size(expected)).max().item() for x in results)


def transport_errors(reach, dtype, length=256):
    """Largest error of `exp(-mu tau)`, as the product of two factors and of the pair itself, over all lags >= 0."""
    mu, times = torch.tensor(reach / (length - 1), dtype=dtype), torch.arange(length, dtype=dtype)
    frame = torch.exp(-mu * times)[:, None] * torch.exp(mu * times)
    lag = times[:, None] - times
    exact = np.exp(-np.longdouble(mu.item()) * as_array(lag, np.longdouble))
    seen = as_array(lag, np.float64) >= 0
    return tuple(float(np.abs(as_array(x, np.longdouble) - exact)[seen].max()) for x in (frame, torch.exp(-mu * lag)))


def last_finite(dtype, below, length=64):
    """The largest `mu t` at which the stationary frame's output is finite, to 0.1."""
    low, high = 1.0, below
    while high - low > 0.1:
        middle = (low + high) / 2
        finite = math.isfinite(race(middle, dtype, length=length)[0])
        low, high = (middle, high) if finite else (low, middle)
    return low


if __name__ == "__main__":
    for dtype, reaches, below in (
        (torch.float32, (1, 10, 20, 40, 43, 45, 90), 200.0),
        (torch.float64, (1, 10, 40, 100, 200, 350, 360), 1000.0),
    ):
        for reach in reaches:
            frame, direct = np.median([race(reach, dtype, seed, 256) for seed in range(5)], axis=0)
            factors, pairs = transport_errors(reach, dtype)
            print(f"{dtype}, mu t = {reach}: E {factors:.1e} and {pairs:.1e}, estimate {frame:.1e} and {direct:.1e}")
        print(f"{dtype}: finite up to mu t = {last_finite(dtype, below, 256):.1f}")
