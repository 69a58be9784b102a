"""The initialisation of the complex projections: a distribution, so it is tested as one."""

import math

import numpy as np
import pytest
from cover import cover
from scipy import stats

from rfa.models import RFAForCausalLM, preset
from rfa.nn import DotProductAttention, RobustFilterAttention

SIZE, HEADS = 128, 4
MODES = SIZE // HEADS
SCALE = math.sqrt(1 / (SIZE + SIZE))
INPUTS = ("query_projection", "key_projection", "value_projection")
# The seeds are fixed, so the p-value is one number; a wrong distribution gives 1e-10 and less at 16,384 samples.
LEAST_P = 1e-3


def in_the_model():
    """The same, once transformers' own initialisation has gone over it."""
    sizes = {"vocab_size": 11, "hidden_size": SIZE, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    return RFAForCausalLM(preset("m2-sc-rfa", **sizes)).model.layers[0].attention


LAYERS = {
    "filter": lambda: RobustFilterAttention(SIZE, HEADS),
    "dot product": lambda: DotProductAttention(SIZE, HEADS),
    "in the model": in_the_model,
}


def complex_weight(layer, name):
    """The complex matrix that a real one holds: in each head, d real parts and then d imaginary parts."""
    weight = getattr(layer, name).weight.detach().double().numpy()
    if name == "output_projection":
        weight = weight.T
    parts = weight.reshape(HEADS, 2, MODES, SIZE)
    return (parts[:, 0] + 1j * parts[:, 1]).reshape(HEADS * MODES, SIZE)


@cover(1, kind=LAYERS, name=[*INPUTS, "output_projection"])
def test_magnitude_is_rayleigh_and_phase_uniform(kind, name):
    layer = LAYERS[kind]()
    assert not getattr(layer, name).bias.any()
    weight = complex_weight(layer, name)
    scale = SCALE * (math.sqrt(0.5) if name == "output_projection" else 1.0)
    assert stats.kstest(np.abs(weight).ravel(), stats.rayleigh(scale=scale).cdf).pvalue > LEAST_P
    assert stats.kstest(np.angle(weight).ravel(), stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > LEAST_P


@pytest.mark.parametrize("name", INPUTS)
def test_magnitude_and_phase_do_not_depend_on_each_other(name):
    """Spearman's rank correlation of two independent samples of 16,384 has a deviation of 1/128."""
    weight = complex_weight(RobustFilterAttention(SIZE, HEADS), name).ravel()
    assert abs(stats.spearmanr(np.abs(weight), np.angle(weight)).statistic) < 4 / 128


def test_projections_are_drawn_apart():
    layer = RobustFilterAttention(SIZE, HEADS)
    drawn = [complex_weight(layer, name).ravel() for name in INPUTS]
    correlation = np.corrcoef(np.concatenate([[w.real, w.imag] for w in drawn]))
    assert np.abs(correlation - np.eye(6)).max() < 5 / 128  # deviation 1/128
