"""The coupled operator: its equal-rate limit, gradients, and exactness on noiseless data."""

import numpy as np
import pytest
import torch
from nn.by_hand import EXACT, positive
from scipy.linalg import expm

from rfa.appendix.coupled import Observations, PredictionWeights, Process, coupled_filter_attention

X_RATES, Y_RATES = np.array([-0.2 + 1j, -0.2 - 1j, -0.2 + 0.3j]), np.array([-0.1 + 1j, -0.1 - 1j, -0.1 + 0.9j])


def operator_arguments(heads=1, modes=3, queries=6, sources=5, seed=0, same_rates=False):
    """Everything of order one."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def process():
        noises = positive(generator, 3, heads, low=0.2)
        return Process(positive(generator, heads), drawn(heads, modes), *noises)

    times = positive(generator, 1, queries, low=0.2).cumsum(-1)
    auxiliary_times = positive(generator, 1, sources, low=0.2).cumsum(-1)
    x, y = process(), process()
    if same_rates:
        y = y._replace(decay=x.decay.clone(), frequency=x.frequency.clone())
    return {
        "query": drawn(1, heads, queries, 2 * modes),
        "target": Observations(*drawn(2, 1, heads, queries, 2 * modes), times, None),
        "auxiliary": Observations(*drawn(2, 1, heads, sources, 2 * modes), auxiliary_times, None),
        "target_process": x,
        "auxiliary_process": y,
        "coupling": drawn(heads),
        "prediction_weights": PredictionWeights(*positive(generator, 4, heads, low=0.5)),
    }


def test_equal_rates_are_the_limit():
    """Values and gradients of everything, the rates too, as the rates approach each other."""

    def run(gap):
        given = operator_arguments(same_rates=True)
        process = given["auxiliary_process"]
        rates = process.decay + gap, process.frequency - gap
        leaves = [given["coupling"], given["target_process"].decay, given["target_process"].frequency, *rates]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        given["coupling"] = leaves[0]
        given["target_process"] = given["target_process"]._replace(decay=leaves[1], frequency=leaves[2])
        given["auxiliary_process"] = process._replace(decay=leaves[3], frequency=leaves[4])
        out = coupled_filter_attention(**given)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    limit = run(0.0)
    for gap in (1e-3, 1e-6, 1e-9, 1e-12):
        for found, expected in zip(run(gap), limit, strict=True):
            assert (found - expected).abs().max() < 100 * gap + EXACT
    assert all(part.abs().max() > 1e-3 for part in limit)


@pytest.mark.parametrize("same_rates", [False, True], ids=["distinct", "equal"])
def test_gradients(same_rates):
    given = operator_arguments(modes=2, queries=4, sources=3, same_rates=same_rates)
    leaves = [given["query"], *given["target"][:3], *given["auxiliary"][:3]]
    leaves += [*given["target_process"], *given["auxiliary_process"], given["coupling"], *given["prediction_weights"]]

    def run(query, xk, xv, xt, yk, yv, yt, *rest):
        return coupled_filter_attention(
            query,
            Observations(xk, xv, xt, None),
            Observations(yk, yv, yt, None),
            target_process=Process(*rest[:5]),
            auxiliary_process=Process(*rest[5:10]),
            coupling=rest[10],
            prediction_weights=PredictionWeights(*rest[11:]),
        )

    assert torch.autograd.gradcheck(run, [leaf.clone().requires_grad_() for leaf in leaves], fast_mode=True)


def simulate(times, x_rates, y_rates, coupling, generator):
    """The joint system without noise, by its 2 x 2 transition per mode."""
    x, y = (generator.standard_normal(len(x_rates)) + 1j * generator.standard_normal(len(x_rates)) for _ in range(2))
    found, now = [], times[0]
    for t in times:
        for k, (a, b) in enumerate(zip(x_rates, y_rates, strict=True)):
            x[k], y[k] = expm(np.array([[a, coupling], [0, b]]) * (t - now)) @ [x[k], y[k]]
        now = t
        found.append((x.copy(), y.copy()))
    return (np.array(part) for part in zip(*found, strict=True))


def as_states(z):
    """`(length, modes)` complex to `(1, 1, length, 2 modes)`."""
    return torch.tensor(np.concatenate([z.real, z.imag], -1))[None, None]


def process_of(rates, process_noise, key_noise):
    decay, frequency = torch.tensor([-rates[0].real]), torch.tensor(rates.imag)[None]
    return Process(decay, frequency, *(torch.tensor([v], dtype=torch.float64) for v in (process_noise, key_noise, 1.0)))


def test_noiseless_predictions_are_exact():
    """Whatever the weights and the times: each of them carries the pair to the true state."""
    generator = np.random.default_rng(0)
    both = np.sort(np.append(generator.uniform(0, 10, 20), 0.0))
    x, y = simulate(both, X_RATES, Y_RATES, 0.7, generator)
    at_x, at_y = np.array([0, 3, 4, 8, 9, 10, 15, 20]), np.array([0, 1, 2, 4, 5, 7, 11, 12, 13, 19])
    target, auxiliary = as_states(x[at_x]), as_states(y[at_y])
    estimate = coupled_filter_attention(
        0.5 * target,  # a query that is wrong
        Observations(target, target, torch.tensor(both[at_x])[None], None),
        Observations(auxiliary, auxiliary, torch.tensor(both[at_y])[None], None),
        target_process=process_of(X_RATES, 0.1, 0.1),
        auxiliary_process=process_of(Y_RATES, 0.1, 0.1),
        coupling=torch.tensor([0.7], dtype=torch.float64),
        prediction_weights=PredictionWeights(*torch.tensor([[0.1], [0.01], [4.0], [1.0]], dtype=torch.float64)),
    )
    torch.testing.assert_close(estimate, target, rtol=1e-12, atol=1e-12)
