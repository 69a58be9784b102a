"""The operator once more, written from its specification alone: plain numpy, complex numbers, explicit loops.

Nothing here is fast, factored or shared with `rfa`. Key j is carried to the query's time as a complex vector
and the residual is measured there; every float is a float64 and every sum is the one in the formula.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def as_array(x, dtype=np.float64):
    """A numpy copy of a tensor (or of anything numpy takes), in `dtype`."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        x = x.to(torch.float64).numpy() if x.is_floating_point() else x.numpy()
    return np.array(x, dtype=dtype)


def as_complex(x):
    """(..., 2d) real parts, then imaginary parts -> (..., d) complex."""
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def phi(mu, tau):
    """Variance accumulated by unit process noise: (1 - exp(-2 mu tau)) / (2 mu), mu of any sign."""
    x = 2.0 * mu * tau
    if abs(x) < 0.5:
        # (1 - exp(-x)) / x = sum_n (-x)^n / (n+1)!; 16 terms leave 0.5^16 / 17! < 1e-19.
        return tau * sum((-x) ** n / math.factorial(n + 1) for n in range(16))
    return (1.0 - math.exp(-x)) / (2.0 * mu)


def riccati_gain(mu, process_noise, measurement_noise, interval):
    """Steady-state Kalman gain x / (x + r), x the positive root of x^2 + x (r (1 - F^2) - q) - q r = 0."""
    q = np.longdouble(process_noise * phi(mu, interval))
    r = np.longdouble(measurement_noise)
    b = r * -np.expm1(np.longdouble(-2.0 * mu * interval)) - q
    root = np.sqrt(b * b + 4 * q * r)
    x = 2 * q * r / (b + root) if b > 0 else (root - b) / 2
    return float(x / (x + r)), float(r / (x + r))


def riccati_prior(mu, process_noise, measurement_noise, key_times, present):
    """One segment's participating keys in order of time: (key, time, log K, log(1 - K), 0 at the first)."""
    order = sorted((t, j) for j, t in enumerate(key_times) if present[j])
    entries = []
    for n, (t, j) in enumerate(order):
        if len(order) == 1:
            gain, rest = 1.0, 0.0
        else:
            interval = order[1][0] - order[0][0] if n == 0 else t - order[n - 1][0]
            gain, rest = riccati_gain(mu, process_noise, measurement_noise, interval)
        entries.append((j, t, math.log(max(gain, 1e-300)), 0.0 if n == 0 else math.log(rest)))
    return entries


def riccati_log_weight(entries, query_time, j):
    """log c_ij = log K_j - |C(t_i) - C(t_j)|, C(t) the sum of log(1 - K_l) over t_l <= t."""
    time_j, log_gain = next((t, g) for key, t, g, _ in entries if key == j)

    def cumulated(t):
        return sum(step for _, time, _, step in entries if time <= t)

    return log_gain - abs(cumulated(query_time) - cumulated(time_j))


def filter_attention(
    query, key, value, *,
    decay, frequency, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature,
    times=None, query_times=None, key_mask=None, segment_ids=None,
    causal=True, weight="student_t", rotate_values=True, prior="lyapunov",
    gate=True, query_noise_in_bias=False, horizon=None,
):  # fmt: skip
    """`(output, log_precision)` as float64 arrays; arguments as `rfa.robust_filter_attention`."""
    q, k, v = (as_complex(as_array(x)) for x in (query, key, value))
    mu, omega = as_array(decay), as_array(frequency)
    sigma2, eta2, gamma2, floor2 = (as_array(x) for x in (process_noise, key_noise, query_noise, noise_floor))
    nu_s, beta = as_array(robustness), as_array(inverse_temperature)
    batch, heads, n_query, modes = q.shape
    n_key = k.shape[2]
    ahead = np.zeros(heads) if horizon is None else as_array(horizon)

    t_key = np.arange(n_key, dtype=np.float64) if times is None else as_array(times)
    t_key = np.broadcast_to(t_key, (batch, n_key))
    t_query = t_key[:, n_key - n_query :] if query_times is None else as_array(query_times)
    t_query = np.broadcast_to(t_query, (batch, n_query))
    present = np.ones((batch, n_key), bool) if key_mask is None else as_array(key_mask, bool)
    seg_key = np.zeros((batch, n_key), int) if segment_ids is None else as_array(segment_ids, int)
    # Without segments the lengths need not be related, and every query is of segment 0.
    seg_query = np.zeros((batch, n_query), int) if segment_ids is None else seg_key[:, n_key - n_query :]

    output = np.zeros((batch, heads, n_query, v.shape[-1]), complex)
    log_precision = np.full((batch, heads, n_query), -np.inf)
    for b in range(batch):
        for h in range(heads):
            segments = {}
            for i in range(n_query):
                ti, segment = t_query[b, i], seg_query[b, i]
                if prior == "riccati" and segment not in segments:
                    members = present[b] & (seg_key[b] == segment)
                    segments[segment] = riccati_prior(mu[h], sigma2[h], eta2[h] + floor2[h], t_key[b], members)
                logits, carried = [], []
                for j in range(n_key):
                    tj = t_key[b, j]
                    if not present[b, j] or seg_key[b, j] != segment or (causal and tj > ti):
                        continue
                    tau = ti - tj
                    lag = (tau if causal else abs(tau)) + ahead[h]
                    shrink = math.exp(-mu[h] * lag)
                    residual = q[b, h, i] - shrink * np.exp(1j * omega[h] * tau) * k[b, h, j]
                    distance = float(np.sum(residual.real**2 + residual.imag**2))
                    variance = sigma2[h] * phi(mu[h], lag) + eta2[h] * shrink**2 + floor2[h]
                    total = variance + gamma2[h]
                    if prior == "riccati":
                        log_prior = riccati_log_weight(segments[segment], ti, j)
                    else:
                        log_prior = -math.log(total if query_noise_in_bias else variance)
                    scaled = distance / (nu_s[h] * modes * (total if gate else 1.0))
                    penalty = scaled if weight == "exponential" else (nu_s[h] + 1.0) * math.log1p(scaled)
                    logits.append(beta[h] * (log_prior - penalty))
                    turn = np.exp(1j * omega[h] * (tau + ahead[h])) if rotate_values else 1.0
                    carried.append(shrink * turn * v[b, h, j])
                if not logits:
                    continue
                top = max(logits)
                masses = [math.exp(x - top) for x in logits]
                total_mass = math.fsum(masses)
                output[b, h, i] = sum(m * x for m, x in zip(masses, carried, strict=True)) / total_mass
                log_precision[b, h, i] = top + math.log(total_mass)
    return np.concatenate([output.real, output.imag], -1), log_precision
