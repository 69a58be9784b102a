"""Posterior routing against the mixture of Gaussians that it is the posterior mean of."""

import numpy as np
import torch

from rfa.ops.routing import gaussian_parameters, located_posterior_routing

from . import oracle
from .problems import irregular_times, located, problem, uniform

STATES = ("query", "key", "value", "query_value")


def posterior_routing(times=None, **inputs):
    """At the times of the keys, which are those of the queries."""
    states = [inputs.pop(name) for name in STATES]
    positions = located(states[0].shape[2], states[1].shape[2], states[0].device, times)
    return located_posterior_routing(positions, *states, gaussian_parameters(**inputs))


def inputs_of(seed=0, **shape):
    """A problem of the operator with a value for each query, and without what a Gaussian has not."""
    inputs = problem(seed, **shape)
    del inputs["robustness"], inputs["inverse_temperature"]
    generator = torch.Generator().manual_seed(50 + seed)
    inputs["query_value"] = torch.randn(inputs["query"].shape, generator=generator, dtype=torch.float64)
    return inputs


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


def test_gradients():
    inputs = inputs_of(9, batch=1, keys=4, modes=2)
    inputs["source_rate"] = torch.tensor([0.3, 1.2], dtype=torch.float64)
    inputs["decay"] = uniform(torch.Generator().manual_seed(0), 0.1, 0.5, 2)
    names = list(inputs)

    def run(*given):
        return posterior_routing(**dict(zip(names, given, strict=True)), times=irregular_times(9, 4))

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs.values()], fast_mode=True)
