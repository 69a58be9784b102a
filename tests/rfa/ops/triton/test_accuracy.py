"""Values and all gradients against the dense reference in float64, over what the public function takes."""

import pytest
import torch
from cover import cover, some
from nn.by_hand import hidden
from nn.test_clock import layer_of

from ..problems import PRIORS, STATES, WEIGHTS, irregular_times, problem
from .fused_problems import (
    DEVICE,
    assert_accurate,
    needs_triton,
    one_head,
    reference_attention,
    rounded,
    triton_attention,
    with_gradients,
)

pytestmark = needs_triton
pairs_operator = pytest.importorskip("rfa.ops.triton.pairs_operator")

LENGTH = 35  # two blocks of most float32 tiles, the second one ragged


def mask(seed, batch, length):
    """A third of the keys missing, the first dozen of the last sequence among them."""
    present = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) > 0.3
    present[-1, :12] = False
    return present


@cover(irregular=[False, True], weight=WEIGHTS, prior=PRIORS, causal=[True, False])
def test_variants(irregular, weight, prior, causal):
    times = irregular_times(0, LENGTH) if irregular else None
    inputs = problem(1, batch=1, keys=LENGTH, modes=8)
    assert_accurate(inputs, times=times, weight=weight, prior=prior, causal=causal)


@pytest.mark.parametrize(
    ("prior", "weight", "case"),
    [
        ("riccati", "student_t", "all keys"),
        ("lyapunov", "exponential", "noise in the bias, other queries"),
        ("riccati", "student_t", "mask"),
    ],
)
def test_fixed_decay(monkeypatch, prior, weight, case):
    """The path of constant dynamics comes from one launch, and its parameters from sums of scalars."""
    monkeypatch.setattr("rfa.ops.triton.pairs_prior.BLOCK", 16)  # several steps
    options = {"times": irregular_times(0, LENGTH), "weight": weight, "prior": prior}
    others = "other queries" in case
    options["query_noise_in_bias"] = others
    if others:
        options["query_times"] = irregular_times(1, 20) + 0.5
    if case == "mask":
        options["key_mask"] = mask(2, 2, LENGTH)
    inputs = one_head(1, batch=2, keys=LENGTH, queries=20 if others else None)
    assert_accurate(inputs, constant=("frequency", "decay"), **options)


@pytest.mark.parametrize("prior", PRIORS)
def test_parameters_in_half_precision(prior):
    """They are read as they are, and their gradients are rounded once, as is the estimate turned by the horizon."""
    inputs = rounded(one_head(3, batch=1, keys=8), torch.float32)
    inputs["horizon"] = torch.tensor([1.3])
    low = {n: x.bfloat16() for n, x in inputs.items() if n not in STATES}
    wide = {n: x.float() for n, x in low.items()}
    states = {n: inputs[n] for n in STATES}
    times, fixed = irregular_times(0, 8), {"decay", "frequency", "horizon"}
    cotangents = torch.ones(1, 1, 8, 16), torch.ones(1, 1, 8)
    for left_out in ((), ("horizon",)):
        found, expected = (
            with_gradients(
                triton_attention,
                {n: x for n, x in {**states, **held}.items() if n not in left_out},
                cotangents,
                fixed,
                times=times,
                prior=prior,
            )
            for held in (low, wide)
        )
        torch.testing.assert_close(found["output"], expected["output"], rtol=1e-5, atol=1e-5)
        for name in low.keys() - fixed:
            torch.testing.assert_close(found[name], expected[name], rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize(("modes", "value_modes"), some([(64, 8), (32, 64), (16, 16)], 1))
def test_head_sizes(modes, value_modes):
    inputs = one_head(8, batch=1, keys=35, modes=modes, value_modes=value_modes)
    assert_accurate(inputs, rotate_values=False)


NOISES = ("process_noise", "key_noise", "query_noise", "noise_floor")


@pytest.mark.parametrize(("prior", "none"), [("lyapunov", (*NOISES[:2], "noise_floor")), ("riccati", NOISES)])
def test_noises_of_zero_in_half_precision(prior, none):
    """A variance of zero counts as the least one and has no gradient, in tiles against their last key too."""
    inputs = rounded(one_head(3, batch=1, keys=130), torch.bfloat16)
    inputs["decay"] = inputs["decay"] / 40
    inputs |= {name: inputs[name] * 0 for name in none}
    cotangents = torch.ones(1, 1, 130, 16).cumsum(2).sin(), torch.ones(1, 1, 130)
    given = cotangents, ("frequency", "decay")
    options = {"times": irregular_times(0, 130) / 9, "prior": prior}
    expected = with_gradients(reference_attention, {n: x.float() for n, x in inputs.items()}, *given, **options)
    found = with_gradients(triton_attention, inputs, *given, **options)
    for name, wanted in expected.items():
        error = (found[name] - wanted).abs().max()
        assert error <= 0.1 * wanted.abs().max() + 1e-2, name


FRAMES = [
    {},
    {"prior": "riccati"},
    {"gate": False},
    {"query_noise_in_bias": True},
    {"key_mask": torch.arange(200) >= torch.tensor([[0], [70]])},
    {"segment_ids": torch.tensor([[0] * 200, [3] * 40 + [5] * 160])},
]


@cover(1, dtype=[torch.bfloat16, torch.float16], options=FRAMES)
def test_tiles_against_their_last_key(monkeypatch, dtype, options):
    """Half precision with a fixed decay: tiles of 64 keys in frames of their own, but for a gap and the newest."""
    found = []
    states = pairs_operator._states
    monkeypatch.setattr(pairs_operator, "_states", lambda *given: found.append(states(*given)) or found[-1])
    times = irregular_times(5, 200)
    times[150:] += 1e4
    inputs = one_head(9, keys=200, modes=8)
    inputs["decay"] = inputs["decay"] / 40
    assert_accurate(inputs, dtype=dtype, constant=("frequency", "decay"), times=times, **options)
    good = (found[0].frame[3] < 2**63 - 1).sum((0, 1)).tolist()
    assert good == {"key_mask": [1, 1, 0, 0], "segment_ids": [1, 2, 0, 0]}.get(next(iter(options), ""), [2, 2, 0, 0])


@pytest.mark.parametrize("name", ["riccati", "RoPER, slopes"])
def test_clocked_layers_are_the_reference(name):
    fused, exact = layer_of(name, torch.float32, backend="triton").to(DEVICE), layer_of(name, backend="reference")
    exact.load_state_dict(fused.state_dict())
    x, found = hidden(length=9, dtype=torch.float32), []
    for layer in (fused, exact):
        out = layer(x.to(layer.query_projection.weight))
        out.square().sum().backward()
        found.append([x.cpu() for x in (out.detach(), *(p.grad for p in layer.parameters()))])
    for single, double in zip(*found, strict=True):
        scale = max(1.0, float(double.abs().max()))
        assert float((single - double).abs().max()) / scale < 1e-4  # float32 sums over 9 x 9 pairs
