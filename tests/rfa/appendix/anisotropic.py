"""The anisotropic operator once more, as appendix B writes it: in explicit loops."""

import math

import numpy as np
import torch
from ops.oracle import as_array, as_complex, phi
from ops.problems import problem, uniform

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
