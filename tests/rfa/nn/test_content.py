"""Content-dependent dynamics: the isotropic layer as its constant case, token-by-token recursions, gradients, scans."""

import numpy as np
import pytest
import torch
from cover import cover
from ops import oracle
from shapes import only_our_own_checks

import rfa.ops.dense
from rfa.nn import ContentFilterAttention, RobustFilterAttention

from .by_hand import (
    EXACT,
    assert_near,
    hidden,
    merged,
    perturb,
    positive,
    softplus,
    states,
)

SIZE, HEADS, MODES = 16, 2, 8
BACKENDS = {"reference": (torch.float64, EXACT), "cpu": (torch.float32, 1e-5)}


def layer_with(dtype=torch.float64, content=True, seed=1, **options):
    layer = ContentFilterAttention(SIZE, HEADS, decay=torch.tensor([0.05, 0.3]), **options)
    perturb(layer, seed)
    if not content:
        torch.nn.init.zeros_(layer.dynamics.weight)
    return layer.to(dtype)


def isotropic(layer, **options):
    """`RobustFilterAttention` with the dynamics that all tokens of a layer without content share."""
    dynamics = layer.dynamics
    token, _ = dynamics(dynamics.rates(torch.zeros(1, 1, SIZE, dtype=dynamics.weight.dtype)))
    frequency, decay = token.frequency[0, ..., 0].detach(), token.decay[0, :, 0].detach()
    other = RobustFilterAttention(SIZE, HEADS, frequency=frequency, decay=decay, **options).to(decay.dtype)
    kept = {name: value for name, value in layer.state_dict().items() if not name.startswith("dynamics.")}
    kept |= {f"dynamics.{name}": value for name, value in layer.dynamics.state_dict().items() if "raw" in name}
    kept["dynamics.raw_process_noise"] = layer.dynamics.bias.view(HEADS, -1)[:, 1]
    kept |= {f"dynamics.{name}": other.dynamics.state_dict()[name] for name in ("frequency", "decay")}
    kept["dynamics.noise_floor"] = layer.dynamics.noise_floor
    other.load_state_dict(kept)
    return other


def whereabouts(kind, length):
    generator = torch.Generator().manual_seed(3)
    times = positive(generator, 2, length, low=0.1, high=2.0).cumsum(-1)
    mask = torch.rand(2, length, generator=generator) > 0.3
    segments = torch.randint(0, 3, (2, length), generator=generator)
    return {
        "uniform": {},
        "irregular": {"times": times[0]},
        "times of each row": {"times": times},
        "masked": {"key_mask": mask},
        "masked, irregular": {"key_mask": mask, "times": times},
        "packed": {"segment_ids": segments.sort(-1).values, "times": times},
        "interleaved and masked": {"segment_ids": segments, "key_mask": mask},
    }[kind]


WHERE = ["uniform", "irregular", "times of each row", "masked", "masked, irregular", "packed", "interleaved and masked"]


@cover(where=WHERE, weight=["student_t", "exponential"], backend=BACKENDS)
def test_constant_content_is_the_isotropic_layer(backend, weight, where):
    dtype, tolerance = BACKENDS[backend]
    layer = layer_with(dtype, content=False, weight=weight, backend=backend)
    other = isotropic(layer, weight=weight, backend=backend)
    x, given = hidden(length=37, dtype=dtype), whereabouts(where, 37)
    torch.testing.assert_close(layer(x, **given), other(x, **given), rtol=tolerance, atol=tolerance)


def test_it_begins_as_the_isotropic_layer():
    layer = ContentFilterAttention(SIZE, HEADS).double()
    x = hidden()
    expected = isotropic(layer)(x)
    torch.testing.assert_close(layer(x), expected, rtol=EXACT, atol=EXACT)
    found = isotropic(layer).dynamics()
    default = RobustFilterAttention(SIZE, HEADS).dynamics()
    np.testing.assert_allclose(oracle.as_array(found["frequency"]), oracle.as_array(default["frequency"]), rtol=1e-5)
    np.testing.assert_allclose(oracle.as_array(found["decay"]), 1e-6, rtol=1e-5)  # both default heads do not decay


def by_hand(layer, x, times, weight):
    """Every pair by walking from its key to its query, one interval at a time: no sums from an origin."""
    q, k, v = (oracle.as_complex(s) for s in states(layer, x))
    batch, heads, length, modes = q.shape
    d = layer.dynamics
    rates = softplus(oracle.as_array(x) @ oracle.as_array(d.weight).T + oracle.as_array(d.bias))
    rates = rates.reshape(batch, length, heads, -1)
    eta2, gamma2, nu, beta = (
        softplus(getattr(d, f"raw_{n}")) for n in ("key_noise", "query_noise", "robustness", "inverse_temperature")
    )
    floor = oracle.as_array(d.noise_floor)
    out = np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                scores, carried = [], []
                for j in range(i + 1):
                    factor, variance = np.ones(modes, complex), 0.0
                    for step in range(j, i):
                        mu, sigma2, *half = rates[b, step, h]
                        omega = np.stack([half, np.negative(half)], -1).ravel()
                        dt = times[b][step + 1] - times[b][step]
                        factor = factor * np.exp((-mu + 1j * omega) * dt)
                        left = np.exp(-2 * mu * dt)
                        variance = left * variance + sigma2 * (1 - left) / (2 * mu)
                    sigma = variance + eta2[h] * np.abs(factor[0]) ** 2 + floor[h]
                    distance = np.sum(np.abs(q[b, h, i] - factor * k[b, h, j]) ** 2)
                    distance = distance / (nu[h] * modes * (sigma + gamma2[h]))
                    evidence = (nu[h] + 1) * np.log1p(distance) if weight == "student_t" else distance
                    scores.append(beta[h] * (-np.log(sigma) - evidence))
                    carried.append(factor * v[b, h, j])
                weights = np.exp(np.array(scores) - max(scores))
                out[b, h, i] = (weights / weights.sum()) @ np.array(carried) - v[b, h, i]
    return merged(layer, np.concatenate([out.real, out.imag], -1))


@cover(irregular=[False, True], weight=["student_t", "exponential"], backend=BACKENDS)
def test_layer_is_a_walk_along_the_path(backend, weight, irregular):
    dtype, tolerance = BACKENDS[backend]
    layer, x = layer_with(dtype, weight=weight, backend=backend), hidden(dtype=dtype)
    times = whereabouts("times of each row", 7)["times"] if irregular else None
    walked = torch.arange(7).expand(2, -1) if times is None else times
    assert_near(layer(x, times=times), by_hand(layer, x, walked.double().numpy(), weight), max(tolerance, 1e-9))


@pytest.mark.parametrize("where", WHERE)
def test_gradients_of_the_fused_backend(where):
    """Against the dense form in float64: for the input, the content map, the noises and the projections."""
    layer = layer_with(torch.float32, backend="cpu")
    exact = layer_with(torch.float64, backend="reference")
    exact.load_state_dict(layer.state_dict())
    x, given = hidden(length=37, dtype=torch.float32), whereabouts(where, 37)
    target = hidden(seed=9, length=37)
    found = []
    for each in (layer, exact):
        start = x.detach().clone().to(each.dynamics.weight.dtype).requires_grad_()
        each(start, **given).mul(target.to(start.dtype)).sum().backward()
        found.append([("input", start.grad), *((name, p.grad) for name, p in each.named_parameters())])
    for (name, single), (_, double) in zip(*found, strict=True):
        assert double.abs().max() > 0, name
        scale = max(1.0, float(double.abs().max()))
        error = float((single - double).abs().max()) / scale
        assert error < 1e-4, (name, error)  # float32 sums over 37 x 37 pairs, whose scores reach a hundred


@pytest.mark.parametrize("where", ["times of each row", "interleaved and masked"])
def test_gradients_of_the_reference(where):
    layer = layer_with(backend="reference")
    x, given = hidden(length=5), whereabouts(where, 5)
    if "times" in given:
        given["times"].requires_grad_()
    names, parameters = zip(*layer.dynamics.named_parameters(), strict=True)

    def run(x, times, *values):
        with_times = given if times is None else {**given, "times": times}
        return torch.func.functional_call(
            layer, {f"dynamics.{n}": p for n, p in zip(names, values, strict=True)}, (x,), with_times
        )

    inputs = [p.detach().clone().requires_grad_() for p in parameters]
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), given.get("times"), *inputs), fast_mode=True)


def test_masked_tokens_are_as_if_absent():
    layer, x = layer_with(), hidden()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, [0, 3, 4]] = False
    kept = [1, 2, 5, 6]
    expected = layer(x[:, kept], times=torch.tensor(kept))
    torch.testing.assert_close(layer(x, key_mask=mask)[:, kept], expected, rtol=EXACT, atol=EXACT)
    x[~mask] = torch.nan
    torch.testing.assert_close(layer(x, key_mask=mask)[:, kept], expected, rtol=EXACT, atol=EXACT)
    times = torch.tensor([50.0, 1, 2, -9, 1e6, 5, 6], dtype=torch.float64)  # padding may carry any time
    found = layer(x, key_mask=mask, times=times)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, kept], expected, rtol=EXACT, atol=EXACT)


@cover(1, backend=BACKENDS, scale=[1e-8, 1e3])
def test_extreme_content_stays_finite(backend, scale):
    dtype, _ = BACKENDS[backend]
    layer, x = layer_with(dtype, backend=backend), scale * hidden(dtype=dtype)
    times = torch.tensor([0.0, 1e-6, 1, 2, 1e3, 1e6, 1e6 + 1], dtype=torch.float64)
    out = layer(x.requires_grad_(), times=times)
    assert out.isfinite().all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name


def test_rows_in_blocks_are_the_whole(monkeypatch):
    layer, x = layer_with(backend="reference"), hidden()
    whole = layer(x)
    monkeypatch.setattr(rfa.ops.dense, "_SCORES", 2 * HEADS * 7 * 2)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), whole, rtol=EXACT, atol=EXACT)


def test_half_precision_keeps_dynamics_whole():
    layer = layer_with(torch.float32, backend="cpu").bfloat16()
    assert layer.query_projection.weight.dtype == torch.bfloat16
    assert layer.dynamics.weight.dtype == torch.float32
    x = hidden(dtype=torch.bfloat16)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer.float()(x.float()), rtol=0.05, atol=0.05)  # 8 bits, some dozen terms


def test_bad_input_is_refused():
    layer, x = layer_with(), hidden()
    with only_our_own_checks():
        for options, name in (
            ({"weight": "misspelt"}, "weight"),
            ({"decay": torch.tensor([0.1, -0.1])}, "decay"),
            ({"frequency": torch.rand(HEADS, MODES)}, "frequency"),
            ({"frequency": torch.rand(HEADS, 3)}, "frequency"),
            ({"steady_state": -1.0}, "steady_state"),
            ({"backend": "misspelt"}, "backend"),
            ({"causal": False}, "causal"),
            ({"dropout": 0.1, "backend": "reference"}, "dropout"),
            ({"clock": "content"}, "clock"),
        ):
            with pytest.raises(ValueError, match=rf"^{name}: got"):
                ContentFilterAttention(SIZE, HEADS, **options)
        with pytest.raises(ValueError, match="hidden_size: got 15"):
            ContentFilterAttention(15, HEADS)
        for given, name in (
            ({"times": torch.zeros(7)}, "times"),
            ({"key_mask": torch.ones(2, 6, dtype=torch.bool)}, "key_mask"),
            ({"segment_ids": torch.zeros(2, 7)}, "segment_ids"),
        ):
            with pytest.raises(ValueError, match=rf"^{name}: got"):
                layer(x, **given)
        with pytest.raises(ValueError, match="hidden_states: got"):
            layer(x[..., :5])
        with pytest.raises(ValueError, match=r"hidden_states: got 'torch.int64 .*expected floating-point"):
            layer(x.long())
