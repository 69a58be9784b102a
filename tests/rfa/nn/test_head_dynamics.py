"""The initial values of the SDE's parameters, how they are stored, and what may be learned."""

import math

import numpy as np
import pytest
import torch
from cover import cover
from ops import oracle

from rfa.dynamics import partitioned_frequencies, spectral_decay
from rfa.models import PRESETS
from rfa.nn import HeadDynamics, RobustFilterAttention
from rfa.ops import robust_filter_attention

from .by_hand import SINGLE, hidden, softplus

FREQUENCY = torch.tensor([[0.5, -0.5, 2.0, -2.0], [0.1, -0.1, 0.3, -0.3]])
DECAY = torch.tensor([0.2, 0.0])
POSITIVE = {"process_noise", "key_noise", "query_noise", "robustness", "inverse_temperature"}
# softplus and its inverse in float32, near 1e-6 as well as near 4: a few roundings
STORED = {"rtol": 1e-5, "atol": 1e-9}


def layer_with(dtype=torch.float32, **options):
    return RobustFilterAttention(8, 2, **{"frequency": FREQUENCY, "decay": DECAY, **options}).to(dtype)


def values(dynamics):
    return {name: oracle.as_array(value) for name, value in dynamics().items()}


def test_positive_parameters_are_stored_through_softplus():
    dynamics = HeadDynamics(FREQUENCY, DECAY, horizon=0.7, learn_horizon=True, learn_decay=True)
    parameters = dict(dynamics.named_parameters())
    assert parameters.keys() == {f"raw_{name}" for name in POSITIVE | {"decay", "horizon"}}
    parameters = {name.removeprefix("raw_"): raw for name, raw in parameters.items()}
    for name, raw in parameters.items():
        np.testing.assert_allclose(values(dynamics)[name], softplus(raw), rtol=1e-6, err_msg=name)
    with torch.no_grad():
        for raw in parameters.values():
            raw.fill_(-10.0)
    assert all((values(dynamics)[name] > 0).all() for name in parameters)


def test_learning_does_not_change_the_start():
    x, learned = hidden(size=8), {"learn_horizon": True, "learn_frequencies": True, "learn_decay": True}
    fixed_options = {"horizon": 0.7}
    moving = layer_with(torch.float64, **fixed_options, **learned, decay=DECAY.clamp(min=1e-6))
    still = layer_with(torch.float64, **{**fixed_options, "decay": DECAY.clamp(min=1e-6)})
    for part in ("query", "key", "value", "output"):
        getattr(still, f"{part}_projection").load_state_dict(getattr(moving, f"{part}_projection").state_dict())
    torch.testing.assert_close(moving(x), still(x), rtol=SINGLE, atol=SINGLE)  # softplus round trip in float32


def test_a_step_keeps_conjugate_pairs():
    layer = layer_with(learn_frequencies=True)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(hidden(size=8, dtype=torch.float32)).square().sum().backward()
    optimizer.step()
    after = layer.dynamics()["frequency"].detach()
    assert tuple(after.shape) == tuple(FREQUENCY.shape)
    assert (after - FREQUENCY).abs().min() > 1e-3
    assert torch.equal(after[:, 0::2], -after[:, 1::2])


@pytest.mark.parametrize("learn_decay", [False, True])
def test_noises_of_algorithm_1(learn_decay):
    """The covariance kernel of algorithm 1 from the stored numbers; where mu = 0 the stored one is sigma^2."""
    new = {"process_noise_as": "steady_state", "learn_noise_floor": True, "learn_decay": learn_decay}
    dynamics = HeadDynamics(FREQUENCY, DECAY, **new).double()
    names = POSITIVE - {"process_noise"} | {"steady_state", "noise_floor"} | ({"decay"} if learn_decay else set())
    assert {name for name, _ in dynamics.named_parameters()} == {f"raw_{name}" for name in names}
    with torch.no_grad():
        dynamics.raw_steady_state.copy_(torch.tensor([0.4, -0.3]))
        dynamics.raw_noise_floor.copy_(torch.tensor([-1.0, 0.5]))
    found, lag = values(dynamics), 3.0
    stored, floor, mu = softplus(dynamics.raw_steady_state), softplus(dynamics.raw_noise_floor), found["decay"]
    square = np.exp(-2 * mu * lag)
    accumulated = found["process_noise"] * [oracle.phi(rate, lag) for rate in mu]
    diffused = accumulated[1] if learn_decay else stored[1] * lag  # a learned decay is above 0: 1e-6 at the start
    np.testing.assert_allclose(accumulated, [stored[0] * (1 - square[0]), diffused], rtol=1e-9)
    if learn_decay:
        np.testing.assert_allclose(diffused, stored[1] * -np.expm1(-2 * mu[1] * lag), rtol=1e-9)
    np.testing.assert_allclose(found["noise_floor"], floor, rtol=1e-12)


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_the_two_forms_of_the_noises_are_one_model(prior):
    """Equal at equal values, heads without decay among them; and gradients by the chain rule."""
    x = hidden(size=8)
    released = layer_with(torch.float64, prior=prior)
    paper = layer_with(torch.float64, prior=prior, process_noise_as="steady_state", learn_noise_floor=True)
    own = {"dynamics.raw_steady_state", "dynamics.raw_noise_floor"}
    found = paper.load_state_dict(released.state_dict(), strict=False)
    assert set(found.missing_keys) == own
    assert set(found.unexpected_keys) == {"dynamics.raw_process_noise", "dynamics.noise_floor"}
    torch.testing.assert_close(paper(x), released(x), rtol=SINGLE, atol=SINGLE)  # softplus round trips in float32

    def gradient(layer, name):
        raw = layer.dynamics.get_parameter(f"raw_{name}")
        return torch.autograd.grad(layer(x).square().sum(), raw)[0] / torch.sigmoid(raw)

    expected = gradient(released, "process_noise") * torch.tensor([2 * 0.2, 1.0])
    torch.testing.assert_close(gradient(paper, "steady_state"), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("length", [1, 2])
def test_initial_values_far_apart_survive_storage(length):
    """1e-6 and 50 per unit of time through softplus and back."""
    decay = torch.full((length,), 50.0)
    found = values(HeadDynamics(torch.zeros(length, 2), decay, learn_decay=True, steady_state=1e-8))
    np.testing.assert_allclose(found["decay"], 50.0, rtol=1e-6)
    np.testing.assert_allclose(found["process_noise"], max(2 * 50 * 1e-8, 1e-6), rtol=1e-5)
    assert math.isfinite(found["process_noise"].sum())


LENGTH = 12


def measured_slopes(layer):
    """Zero states have no residual; unit values read the weights of the last row off the output."""
    heads, modes = layer.num_heads, layer.modes
    parameters = {name: value.detach().double() for name, value in layer.dynamics().items()}
    silent = torch.zeros(1, heads, LENGTH, 2 * modes, dtype=torch.float64)
    unit = torch.eye(LENGTH, dtype=torch.float64).expand(1, heads, LENGTH, LENGTH)
    out = robust_filter_attention(silent, silent, unit, **parameters, prior="riccati", rotate_values=False)
    lag = torch.arange(LENGTH - 1, -1, -1)
    log_weight = out[0, :, -1].log() + parameters["decay"][:, None] * lag
    return log_weight.diff(dim=-1).numpy()


@cover(1, heads=[2, 4, 8], damping=[0.0, 0.05, 5.0])
def test_slopes_of_the_layer(heads, damping):
    slopes = torch.logspace(-2, -0.3, heads)
    frequency = partitioned_frequencies(heads, 4)
    decay = spectral_decay(frequency, damping, zero_heads=1)
    layer = RobustFilterAttention(
        4 * heads, heads, frequency=frequency, decay=decay, prior="riccati", initial_slopes=slopes
    )
    expected = np.broadcast_to(slopes.numpy()[:, None], (heads, LENGTH - 1))
    np.testing.assert_allclose(
        measured_slopes(layer), expected, rtol=2e-4
    )  # float32 noises, cancelling at small slopes


@pytest.mark.parametrize("start", ["layer", "rfa", "x2-riccati-alibi"])
def test_the_start_is_at_alibis_slopes_the_fastest_band_has_the_largest(start):
    layer = RobustFilterAttention(64, 8) if start == "layer" else PRESETS[start].build(64, 8, 512)
    assert (layer.dynamics()["frequency"].abs().amax(-1).diff() > 0).all()
    expected = [2.0 ** (-8 * h / 8) for h in range(8, 0, -1)]  # head 0 is the slowest
    np.testing.assert_allclose(measured_slopes(layer)[:, 0], expected, rtol=2e-4)


@pytest.mark.parametrize(
    "options", [{"initial_slopes": None}, {"prior": "lyapunov"}, {"prior": "lyapunov", "initial_slopes": None}]
)
def test_without_slopes_the_start_is_at_the_steady_state(options):
    """Slopes are of the Riccati prior: the others take none, given or not."""
    found = values(layer_with(**options).dynamics)["process_noise"]
    np.testing.assert_allclose(found, [2 * 0.2 * 0.1, 1e-6], **STORED)
