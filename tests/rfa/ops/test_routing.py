"""Posterior routing against the mixture of Gaussians that it is the posterior mean of."""

import math

import numpy as np
import pytest
import torch
from shapes import only_our_own_checks
from torch.distributions import MultivariateNormal

import rfa.ops.dense
from rfa.ops.routing import posterior_routing
from rfa.ops.transforms import recorded_weights

from . import oracle
from .problems import EXACT, irregular_times, problem, uniform


def inputs_of(seed=0, **shape):
    """A problem of the operator with a value for each query, and without what a Gaussian has not."""
    inputs = problem(seed, **shape)
    del inputs["robustness"], inputs["inverse_temperature"]
    generator = torch.Generator().manual_seed(50 + seed)
    inputs["query_value"] = torch.randn(inputs["query"].shape, generator=generator, dtype=torch.float64)
    return inputs


def responsibilities(inputs, times):
    """The posterior of the source, and the estimate that comes of it."""
    with recorded_weights() as rows:
        found = posterior_routing(**inputs, times=times)
    (recorded,) = rows
    return recorded.weights, found


def sources(inputs, head, i, t):
    """Of query i of the first row: transported keys and values as complex vectors, and their variances."""
    mu, omega = float(inputs["decay"][head]), oracle.as_array(inputs["frequency"][head])
    sigma2, eta2, floor = (float(inputs[name][head]) for name in ("process_noise", "key_noise", "noise_floor"))
    keys, values, variances = [], [], []
    for j in range(i + 1):
        tau = t[i] - t[j]
        move = np.exp((-mu + 1j * omega) * tau)
        keys.append(move * oracle.as_complex(oracle.as_array(inputs["key"][0, head, j])))
        values.append(move * oracle.as_complex(oracle.as_array(inputs["value"][0, head, j])))
        variances.append(sigma2 * oracle.phi(mu, tau) + eta2 * np.exp(-2 * mu * tau) + floor)
    return np.array(keys), np.array(values), np.array(variances)


def test_query_times():
    """One query at a time, the keys before it and its own time given, is its row of the whole."""
    inputs = inputs_of(1, keys=6)
    times = irregular_times(1, 6)
    whole = posterior_routing(**inputs, times=times)
    for i in range(6):
        row = {name: x[:, :, i : i + 1] for name, x in inputs.items() if name in ("query", "query_value")}
        seen = {name: inputs[name][:, :, : i + 1] for name in ("key", "value")}
        found = posterior_routing(**{**inputs, **row, **seen}, times=times[: i + 1], query_times=times[i : i + 1])
        torch.testing.assert_close(found, whole[:, :, i : i + 1], rtol=EXACT, atol=EXACT)
    row = {name: inputs[name][:, :, -1:] for name in ("query", "query_value")}
    late = times[-1:] + 2.5  # as a clock that is ahead by as much, for all that is known is of differences
    found = posterior_routing(**{**inputs, **row}, times=times, query_times=late)
    ahead = posterior_routing(**{**inputs, **row}, times=times - 2.5, query_times=times[-1:])
    torch.testing.assert_close(found, ahead, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found, whole[:, :, -1:])


@pytest.mark.parametrize("irregular", [False, True], ids=["uniform", "irregular"])
@pytest.mark.parametrize("rates", [None, [0.3, 1.2]], ids=["equally likely", "near keys are likelier"])
def test_by_bayes_rule(rates, irregular):
    """Responsibilities from the density of 2 d real channels of half the variance each, loops over everything."""
    inputs = inputs_of(0, keys=6)
    if rates is not None:
        inputs["source_rate"] = torch.tensor(rates, dtype=torch.float64)
    times = irregular_times(0, 6) if irregular else None
    t = np.arange(6.0) if times is None else times.numpy()
    alpha, found = responsibilities(inputs, times)
    for head in range(2):
        gamma2 = float(inputs["query_noise"][head])
        for i in range(6):
            keys, values, variances = sources(inputs, head, i, t)
            query = inputs["query"][0, head, i]
            density = torch.stack(
                [
                    MultivariateNormal(
                        torch.from_numpy(np.concatenate([k.real, k.imag])),
                        (s + gamma2) / 2 * torch.eye(query.shape[0], dtype=torch.float64),
                    ).log_prob(query)
                    for k, s in zip(keys, variances, strict=True)
                ]
            )
            prior = np.array([math.exp(-(rates[head] if rates else 0.0) * (t[i] - t[j])) for j in range(i + 1)])
            joint = prior / prior.sum() * np.exp(density.numpy() - float(density.max()))  # R_ij N_ij, up to a factor
            expected_alpha, expected_gain = joint / joint.sum(), gamma2 / (variances + gamma2)
            np.testing.assert_allclose(alpha[0, head, i, : i + 1], expected_alpha, rtol=EXACT)
            own = oracle.as_complex(oracle.as_array(inputs["query_value"][0, head, i]))
            mean = own + (expected_alpha * expected_gain) @ (values - own)
            np.testing.assert_allclose(oracle.as_complex(found[0, head, i].numpy()), mean, rtol=EXACT, atol=EXACT)


def test_it_is_the_posterior_mean():
    """One mode: the mixture's density times the query's likelihood, integrated over a grid of the complex plane."""
    inputs = inputs_of(1, batch=1, keys=4, modes=1)
    inputs["query_value"], inputs["value"] = inputs["query"], inputs["key"]  # the state that is observed is estimated
    found = posterior_routing(**inputs)
    axis = np.linspace(-9, 9, 361)  # the trapezoidal rule is exact for Gaussians of such widths: 18 steps a deviation
    plane = axis[:, None] + 1j * axis[None, :]
    for head in range(2):
        gamma2, i = float(inputs["query_noise"][head]), 3
        keys, _, variances = sources(inputs, head, i, np.arange(4.0))
        prior = sum(
            np.exp(-(np.abs(plane - k[0]) ** 2) / s) / s for k, s in zip(keys, variances, strict=True)
        )  # uniform over the sources
        query = oracle.as_complex(inputs["query"][0, head, i].numpy())[0]
        posterior = prior * np.exp(-(np.abs(plane - query) ** 2) / gamma2)
        mean = (posterior * plane).sum() / posterior.sum()
        np.testing.assert_allclose(oracle.as_complex(found[0, head, i].numpy())[0], mean, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("gamma2", "moves"), [(1e-12, 0.0), (1e12, 1.0)])
def test_limits_of_the_query_s_noise(gamma2, moves):
    """A query without noise stays; one that is noise alone becomes the mean of all sources alike."""
    inputs = inputs_of(5, keys=5)
    inputs["query_noise"] = torch.full_like(inputs["query_noise"], gamma2)
    inputs["frequency"], inputs["decay"] = 0 * inputs["frequency"], 0 * inputs["decay"]
    found = posterior_routing(**inputs)
    mean = inputs["value"].cumsum(2) / torch.arange(1, 6)[:, None]
    expected = torch.lerp(inputs["query_value"], mean, moves)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_masks_segments_and_a_query_without_keys():
    inputs = inputs_of(6, keys=6)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]] * 2).bool()
    found = posterior_routing(**inputs, key_mask=mask)
    torch.testing.assert_close(found[:, :, 0], inputs["query_value"][:, :, 0], rtol=0, atol=0)
    kept = mask[0].nonzero()[:, 0]
    states = {name: x[:, :, kept] if x.dim() == 4 else x for name, x in inputs.items()}
    expected = posterior_routing(**states, times=kept)
    torch.testing.assert_close(found[:, :, kept], expected, rtol=EXACT, atol=EXACT)
    inputs["key"][:, :, 0] = torch.nan  # a missing row may hold anything
    assert torch.equal(posterior_routing(**inputs, key_mask=mask), found)

    inputs = inputs_of(6, keys=6)
    packed = posterior_routing(**inputs, segment_ids=torch.tensor([[3, 3, 3, 1, 1, 1]] * 2))
    apart = [
        posterior_routing(**{name: x[:, :, part] if x.dim() == 4 else x for name, x in inputs.items()})
        for part in (slice(0, 3), slice(3, 6))
    ]
    torch.testing.assert_close(packed, torch.cat(apart, 2), rtol=EXACT, atol=EXACT)


def test_rows_in_blocks_are_the_whole(monkeypatch):
    inputs = inputs_of(8, keys=7)
    whole = posterior_routing(**inputs, causal=False)
    monkeypatch.setattr(rfa.ops.dense, "_SCORES", 2 * 2 * 7 * 2)
    with torch.no_grad():
        torch.testing.assert_close(posterior_routing(**inputs, causal=False), whole, rtol=EXACT, atol=EXACT)


def test_gradients():
    inputs = inputs_of(9, batch=1, keys=4, modes=2)
    inputs["source_rate"] = torch.tensor([0.3, 1.2], dtype=torch.float64)
    inputs["decay"] = uniform(torch.Generator().manual_seed(0), 0.1, 0.5, 2)
    names = list(inputs)

    def run(*given):
        return posterior_routing(**dict(zip(names, given, strict=True)), times=irregular_times(9, 4))

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs.values()], fast_mode=True)


def test_large_states_and_lags_are_finite():
    inputs = {name: x.float() for name, x in inputs_of(10).items()}
    for name in ("query", "key", "value", "query_value"):
        inputs[name] = (1e3 * inputs[name]).requires_grad_()
    found = posterior_routing(**inputs, times=torch.tensor([0.0, 1.0, 1e3, 1e6, 2e6]))
    found.sum().backward()
    assert found.isfinite().all()
    assert all(inputs[name].grad.isfinite().all() for name in ("query", "key", "value", "query_value"))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("query_value", torch.zeros(2, 2, 4, 6, dtype=torch.float64)),
        ("query_noise", torch.tensor([-1.0, 1.0], dtype=torch.float64)),
        ("value", torch.zeros(2, 2, 4, 6, dtype=torch.float64)),
        ("decay", torch.zeros(3, dtype=torch.float64)),
        ("source_rate", torch.tensor([-0.1, 0.1], dtype=torch.float64)),
        ("source_rate", torch.zeros(3, dtype=torch.float64)),
    ],
)
def test_bad_input(name, given):
    with only_our_own_checks(), pytest.raises(ValueError, match=rf"^{name}: got .*expected"):
        posterior_routing(**{**inputs_of(0), name: given})
