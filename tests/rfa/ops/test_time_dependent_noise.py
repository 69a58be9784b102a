"""The operator under time-dependent noise: its variance, its backends, what it refuses."""

import pytest
import torch

from rfa.dynamics import TimeDependentNoise, time_dependent_variance
from rfa.ops import robust_filter_attention

from .problems import EXACT, SINGLE, attend, irregular_times, problem, with_gradients

NOISE = {
    "amplitude": [[0.3, 0.5, 0.2], [0.15, 0.2, 0.4]],
    "rate": [[0.4, 0.2, 0.3], [0.1, 0.5, 2.0]],
    "angular_frequency": [[0.0, 1.3, -0.5], [0.0, 0.7, 3.0]],
    "phase": [[0.0, 0.4, 1.0], [0.0, -2.0, 0.1]],
}


def coloured(dtype=torch.float64, **changes):
    return TimeDependentNoise(**{name: torch.tensor(x, dtype=dtype) for name, x in {**NOISE, **changes}.items()})


def test_variance_of_one_pair():
    """One key that meets its query: log s = -beta log Sigma(tau), with V(tau) of `rfa.dynamics`, tested there."""
    inputs = problem(0, batch=1, keys=1)
    inputs["query"], inputs["key"] = 0 * inputs["query"], 0 * inputs["key"]
    start, tau = torch.tensor([1.0], dtype=torch.float64), torch.tensor(2.7, dtype=torch.float64)
    _, found = attend(inputs, "reference", noise=coloured(), times=start, query_times=start + tau)
    accumulated = time_dependent_variance(inputs["decay"], inputs["process_noise"], coloured(), tau)
    variance = accumulated + inputs["key_noise"] * torch.exp(-2 * inputs["decay"] * tau) + inputs["noise_floor"]
    torch.testing.assert_close(found[0, :, 0], -inputs["inverse_temperature"] * variance.log(), rtol=EXACT, atol=EXACT)


def test_backends_agree_on_uniform_times():
    """Results and gradients of everything, the noise included."""
    inputs = problem(2, keys=37, modes=4, dtype=torch.float32) | coloured(torch.float32)._asdict()

    def by(backend):
        def call(leaves):
            noise = TimeDependentNoise(*(leaves.pop(name) for name in NOISE))
            return attend(leaves, backend, noise=noise)

        return with_gradients(inputs, lambda leaves: call(dict(leaves)))

    found = by("cpu")
    for name, dense in by("reference").items():
        torch.testing.assert_close(found[name], dense, rtol=20 * SINGLE, atol=SINGLE * float(dense.abs().max()))


def refuse(name, **options):
    inputs = {key: x.float() for key, x in problem(0).items()}
    with pytest.raises(ValueError, match=rf"^{name}: got .*expected"):
        robust_filter_attention(**inputs, **options)


def test_a_fused_backend_by_name_refuses_irregular_times():
    refuse("backend", noise=coloured(torch.float32), times=irregular_times(0, 5), backend="cpu")


def test_bad_parts_and_other_things_in_their_place():
    for name, given in (
        ("amplitude", [[-0.1, 0.1, 0.1]] * 2),
        ("amplitude", [0.1, 0.1]),
        ("amplitude", [[], []]),
        ("rate", [[0.1, -0.1, 0.1]] * 2),
        ("angular_frequency", [[float("inf"), 0.1, 0.1]] * 2),
        ("phase", [[float("nan"), 0.1, 0.1]] * 2),
        ("phase", [[0.1, 0.1]] * 2),
    ):
        refuse(name, noise=coloured(torch.float32, **{name: given}))
    refuse("noise", noise=0.5)
    refuse("noise", noise=coloured(torch.float32), prior="riccati")
