"""The Riccati prior started at ALiBi's slopes: its log weights, measured on the operator, fall by them."""

import numpy as np
import torch
from cover import cover

from rfa.dynamics import partitioned_frequencies, spectral_decay
from rfa.models import RFAForCausalLM, preset
from rfa.nn import RobustFilterAttention
from rfa.ops import robust_filter_attention

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
    layer = RobustFilterAttention(4 * heads, heads, frequency=frequency, decay=decay, prior="riccati", slopes=slopes)
    expected = np.broadcast_to(slopes.numpy()[:, None], (heads, LENGTH - 1))
    np.testing.assert_allclose(
        measured_slopes(layer), expected, rtol=2e-4
    )  # float32 noises, cancelling at small slopes


def test_preset_takes_alibis_slopes_the_fastest_band_the_largest():
    config = preset("x2-riccati-alibi", vocab_size=11, hidden_size=64, num_hidden_layers=1)
    layer = RFAForCausalLM(config).model.layers[0].attention
    assert (layer.dynamics()["frequency"].abs().amax(-1).diff() > 0).all()
    expected = [2.0 ** (-8 * h / 8) for h in range(8, 0, -1)]  # head 0 is the slowest
    np.testing.assert_allclose(measured_slopes(layer)[:, 0], expected, rtol=2e-4)
