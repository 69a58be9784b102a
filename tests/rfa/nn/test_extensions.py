"""The extensions of appendix E as options of the layer: each against its definition, and in its limit."""

import math

import numpy as np
import pytest
import torch
from cover import cover
from ops import oracle
from scipy import integrate, linalg

from rfa.nn import FilterCache, RobustFilterAttention
from rfa.nn.filter_attention import precision_gain

from .by_hand import EXACT, assert_near, hidden, merged, perturb, positive, softplus, states
from .layers import BOTH_DECAY, HEADS, IRREGULAR, M2, MODES, SIZE


def build(**options):
    return perturb(RobustFilterAttention(SIZE, HEADS, decay=BOTH_DECAY, **M2 | options)).double()


def times_of(irregular, length=7):
    return positive(torch.Generator().manual_seed(5), length, low=0.1, high=2.0).cumsum(0) if irregular else None


def operator_of(layer, x, times=None):
    """The oracle's estimate and log precision under the layer's parameters, and the values."""
    q, k, v = states(layer, x)
    parameters = {name: oracle.as_array(value) for name, value in layer.dynamics().items()}
    return *oracle.filter_attention(q, k, v, **parameters, times=times), v


# E.1 Distinct observation models -----------------------------------------------------------------------------------


@cover(1, rotate_values=[True, False], step=["learned", "precision"])
def test_tied_values_are_keys_up_to_a_diagonal(step, rotate_values):
    """`W_v = D W_k` with a complex number a mode is the tied layer, once the output projection undoes D."""
    tied = build(tie_key_value=True, step=step, rotate_values=rotate_values)
    apart = build(step=step, rotate_values=rotate_values)
    missing = apart.load_state_dict(tied.state_dict(), strict=False)
    assert missing.missing_keys == ["value_projection.weight", "value_projection.bias"]
    generator = torch.Generator().manual_seed(4)
    scale = torch.complex(*(positive(generator, HEADS, MODES, low=0.5, high=2.0) for _ in range(2)))
    diagonal = torch.block_diag(*(  # of a head's real and imaginary parts
        torch.cat([torch.cat([d.real, -d.imag], 1), torch.cat([d.imag, d.real], 1)])
        for d in (torch.diag(s) for s in scale)
    ))  # fmt: skip
    with torch.no_grad():
        apart.value_projection.weight.copy_(diagonal @ tied.key_projection.weight)
        apart.value_projection.bias.copy_(diagonal @ tied.key_projection.bias)
        apart.output_projection.weight.copy_(tied.output_projection.weight @ diagonal.inverse())
    for times in (None, times_of(True)):
        torch.testing.assert_close(apart(hidden(), times=times), tied(hidden(), times=times), rtol=EXACT, atol=EXACT)


# E.2 Precision-determined step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("irregular", [False, True], ids=["uniform", "irregular"])
def test_the_step_is_the_gain_times_the_innovation(irregular):
    layer, x, times = build(step="precision"), hidden(), times_of(irregular)
    estimate, log_precision, value = operator_of(layer, x, times)
    tempering = softplus(layer.dynamics.raw_tempering)[:, None]
    gamma2 = oracle.as_array(layer.dynamics()["query_noise"])[:, None]
    s = np.exp(log_precision) ** tempering
    gain = gamma2 * s / (1 + gamma2 * s)
    assert ((gain > 0) & (gain < 1)).all()
    begun = RobustFilterAttention(SIZE, HEADS, step="precision", **M2).dynamics
    assert torch.equal(begun.tempering(), torch.ones(HEADS))
    expected = merged(layer, gain[..., None] * (estimate - value))
    assert_near(layer(x, times=times), expected, 1e-6)  # noise_floor is made in float32


def test_the_gain_is_that_of_two_gaussians():
    """`p = 1`: the minimiser of `|x - x_i|^2 / gamma^2 + s |x - xbar|^2`, and more evidence moves it further."""
    s = torch.tensor([0.0, 0.3, 2.0, 50.0], dtype=torch.float64)
    gamma2, one = torch.tensor([0.7], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    gain = precision_gain(s.log()[None, None], gamma2, one)[0, 0]
    torch.testing.assert_close(gain, s / (s + 1 / gamma2))
    assert (gain.diff() > 0).all()
    assert gain[0] == 0  # no key, no step


# E.3 Drift and measurement bias ------------------------------------------------------------------------------------


@pytest.mark.parametrize("irregular", [False, True], ids=["uniform", "irregular"])
def test_drift_and_bias_are_biases_of_the_projections(irregular):
    """`dx = (lambda x + u) dt + dW`, `z = x + beta + noise`: transported by hand, against `b = u / lambda - beta`."""
    layer, x, times = build(innovation=False), hidden(), times_of(irregular)
    t = np.arange(7.0) if times is None else times.numpy()
    generator = np.random.default_rng(0)
    u, beta = (generator.normal(size=(HEADS, MODES, 2)) @ [1, 1j] for _ in range(2))
    p = {name: oracle.as_array(value) for name, value in layer.dynamics().items()}
    rate = -p["decay"][:, None] + 1j * p["frequency"]
    q, k, v = (oracle.as_complex(s) for s in states(layer, x))
    expected = np.zeros_like(v)
    for b, h, i in np.ndindex(v.shape[:3]):
        logits, predicted = [], []
        for j in range(i + 1):
            tau = t[i] - t[j]
            moved = [_propagate(rate[h], u[h], z[b, h, j] - beta[h], tau) + beta[h] for z in (k, v)]
            variance = p["process_noise"][h] * oracle.phi(p["decay"][h], tau)
            variance += p["key_noise"][h] * math.exp(-2 * p["decay"][h] * tau) + p["noise_floor"][h]
            scale = p["robustness"][h] * MODES * (variance + p["query_noise"][h])
            distance = (np.abs(q[b, h, i] - moved[0]) ** 2).sum() / scale
            logits.append(-np.log(variance) - (p["robustness"][h] + 1) * np.log1p(distance))
            predicted.append(moved[1])
        weight = np.exp(p["inverse_temperature"][h] * np.array(logits))
        expected[b, h, i] = weight / weight.sum() @ np.array(predicted)

    b = u / rate - beta  # joins the biases of q, k and v, and is taken off the output
    shift = torch.from_numpy(np.concatenate([b.real, b.imag], -1).reshape(-1))
    with torch.no_grad():
        for projection in (layer.query_projection, layer.key_projection, layer.value_projection):
            projection.bias += shift
        layer.output_projection.bias -= layer.output_projection.weight @ shift
    expected = np.concatenate([expected.real, expected.imag], -1)
    without_shift = merged(layer, expected) + oracle.as_array(layer.output_projection.weight @ shift)
    assert_near(layer(x, times=times), without_shift, 1e-6)
    layer.innovation = True  # takes b_v off by itself
    value = np.concatenate([v.real, v.imag], -1)
    with torch.no_grad():
        layer.output_projection.bias += layer.output_projection.weight @ shift
    assert_near(layer(x, times=times), merged(layer, expected - value), 1e-6)


def _propagate(rate, drift, state, tau):
    """The mean of the state after a lag, by the exponential of the system with the drift as a constant state."""
    return np.array(
        [
            (linalg.expm(tau * np.array([[r, d], [0, 0]])) @ [s, 1])[0]
            for r, d, s in zip(rate, drift, state, strict=True)
        ]
    )


# E.5 Time-dependent noise ------------------------------------------------------------------------------------------


def test_noise_starts_at_a_tenth_and_stays_positive():
    layer = RobustFilterAttention(SIZE, HEADS, decay=BOTH_DECAY, noise="time_dependent", noise_parts=3, **M2)
    noise, white = layer.dynamics()["noise"], layer.dynamics()["process_noise"]
    assert [tuple(field.shape) for field in noise] == [(HEADS, 3)] * 4
    for part in noise.amplitude.unbind(-1):
        torch.testing.assert_close(part, 0.1 * white, rtol=1e-5, atol=1e-9)
    perturb(layer)
    with torch.no_grad():
        for raw in layer.dynamics.noise.parameters():
            raw.mul_(-100)
    assert all((part >= 0).all() for part in layer.dynamics()["noise"][:2])
    assert layer(hidden(dtype=torch.float32)).isfinite().all()


# E.8 Posterior routing ---------------------------------------------------------------------------------------------


@cover(2, noise=["constant", "time_dependent"], irregular=[False, True], source_prior=["uniform", "exponential"])
def test_routing_by_hand(irregular, noise, source_prior):
    layer = build(aggregation="routing", noise=noise, source_prior=source_prior)
    x, times = hidden(), times_of(irregular)
    assert not {"raw_robustness", "raw_inverse_temperature"} & dict(layer.dynamics.named_parameters()).keys()
    t = np.arange(7.0) if times is None else times.numpy()
    given = layer.dynamics()
    parts = np.stack([oracle.as_array(y) for y in given.pop("noise", torch.zeros(4, HEADS, 1))], axis=-1)
    p = {name: oracle.as_array(value) for name, value in given.items()}
    q, k, v = (oracle.as_complex(s) for s in states(layer, x))
    expected = np.zeros_like(v)
    for b, h, i in np.ndindex(v.shape[:3]):
        scores, steps = [], []
        for j in range(i + 1):
            tau, mu = t[i] - t[j], p["decay"][h]

            def entering(s, h=h, mu=mu, tau=tau):
                waves = (a * math.exp(-kappa * s) * (1 + math.cos(nu * s + psi)) for a, kappa, nu, psi in parts[h])
                return math.exp(-2 * mu * (tau - s)) * (p["process_noise"][h] + sum(waves))

            judged = integrate.quad(entering, 0, tau, epsabs=1e-13)[0] + p["query_noise"][h]
            judged += p["key_noise"][h] * math.exp(-2 * mu * tau) + p["noise_floor"][h]
            move = np.exp((-mu + 1j * p["frequency"][h]) * tau)
            scores.append(-(np.abs(q[b, h, i] - move * k[b, h, j]) ** 2).sum() / judged - MODES * math.log(judged))
            scores[-1] -= p["source_rate"][h] * tau if source_prior == "exponential" else 0.0
            steps.append(p["query_noise"][h] / judged * (move * v[b, h, j] - v[b, h, i]))
        alpha = np.exp(np.array(scores) - max(scores))
        expected[b, h, i] = alpha / alpha.sum() @ np.array(steps)
    assert_near(layer(x, times=times), merged(layer, np.concatenate([expected.real, expected.imag], -1)), 1e-6)


# What holds for every extension --------------------------------------------------------------------------------------


def test_noise_on_irregular_times_has_no_fused_backend():
    layer, x = build(noise="time_dependent", backend="cpu").float(), hidden(length=9, dtype=torch.float32)
    assert layer(x).isfinite().all()
    for given in ({}, {"past_key_values": FilterCache()}):
        with torch.no_grad(), pytest.raises(ValueError, match="backend: got 'cpu' with time-dependent noise"):
            layer(x, times=IRREGULAR, **given)
