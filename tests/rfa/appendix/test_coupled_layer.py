"""Two coupled processes: the paper's formula by hand, absent tokens, gradients, extremes and bad input."""

import numpy as np
import pytest
import torch
from cover import cover
from nn.by_hand import EXACT, SINGLE, assert_near, hidden, linear, merged, perturb, states
from ops import oracle
from shapes import only_our_own_checks

import rfa.ops.dense
from rfa.appendix import CoupledFilterAttention

SIZE, OTHER, HEADS, MODES = 16, 6, 2, 8
FREQUENCY = torch.tensor([0.5, -0.5, 2.0, -2.0, 0.1, -0.1, 1.0, -1.0]).expand(HEADS, -1) * torch.tensor([[1.0], [0.3]])


def layer_with(dtype=torch.float64, **options):
    given = {"auxiliary_size": OTHER, "frequency": FREQUENCY, "decay": torch.tensor([0.0, 0.3])}
    given |= {"auxiliary_frequency": 0.7 * FREQUENCY, "auxiliary_decay": torch.tensor([0.2, 0.1]), "coupling": 0.4}
    return perturb(CoupledFilterAttention(SIZE, HEADS, **{**given, **options})).to(dtype)


def other(length=5, dtype=torch.float64):
    return hidden(seed=7, length=length, size=OTHER, dtype=dtype)


# In row 0 a target token, in row 1 an auxiliary one, stands before all of the other process.
TIMES = torch.tensor([[0.05, 1, 1.5, 2.2, 4, 4.1, 7], [1.0, 2, 3, 4, 5, 6, 7]], dtype=torch.float64)
AUXILIARY_TIMES = torch.tensor([[0.1, 1.2, 1.4, 4, 6.9], [0.5, 2, 2.5, 2.6, 7.5]], dtype=torch.float64)
MASKS = {
    "key_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1, 1]]).bool(),
    "auxiliary_key_mask": torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 0, 1]]).bool(),
}


def cross(x, y, lag):
    """Distinct rates only."""
    return (np.exp(y * lag) - np.exp(x * lag)) / (y - x)


def by_hand(layer, x, y, times, auxiliary_times, key_mask=None, auxiliary_key_mask=None):
    """Pair by pair, in complex numbers."""
    q, k, v = (oracle.as_complex(s) for s in states(layer, x))
    batch, heads, length, modes = q.shape
    projections = layer.auxiliary_key_projection, layer.auxiliary_value_projection
    ky, vy = (
        oracle.as_complex(np.moveaxis(linear(p, oracle.as_array(y)).reshape(batch, y.shape[1], heads, -1), 2, 1))
        for p in projections
    )
    px, py, judge = layer.target_process(torch.float64), layer.auxiliary_process(torch.float64), layer.judge
    px, py = ({n: oracle.as_array(p) for n, p in each._asdict().items()} for each in (px, py))
    gamma2, floor, nu, beta = (oracle.as_array(p) for p in judge(torch.float64))
    coupling = oracle.as_array(judge.coupling)
    t, s = oracle.as_array(times), oracle.as_array(auxiliary_times)
    seen_x = np.ones(t.shape, bool) if key_mask is None else key_mask.numpy()
    seen_y = np.ones(s.shape, bool) if auxiliary_key_mask is None else auxiliary_key_mask.numpy()
    out = np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            lx, ly = -px["decay"][h] + 1j * px["frequency"][h], -py["decay"][h] + 1j * py["frequency"][h]

            def driver(m, b=b, h=h, ly=ly):
                past = [j for j in range(len(s[b])) if seen_y[b, j] and s[b, j] <= t[b, m]]
                if not past:
                    return 0, 0, py["prior_variance"][h]
                lag = t[b, m] - s[b, past[-1]]
                grown = py["process_noise"][h] * oracle.phi(py["decay"][h], lag)
                variance = py["key_noise"][h] * np.exp(-2 * py["decay"][h] * lag) + grown
                return np.exp(ly * lag) * ky[b, h, past[-1]], np.exp(ly * lag) * vy[b, h, past[-1]], variance

            def moved(xs, variance, ys, driver_variance, lag, h=h, lx=lx, ly=ly):
                kernel = coupling[h] * cross(lx, ly, lag)
                square = np.mean(np.abs(kernel) ** 2)
                total = np.exp(-2 * px["decay"][h] * lag) * variance
                total += px["process_noise"][h] * oracle.phi(px["decay"][h], lag)
                total += square * (driver_variance + py["process_noise"][h] * oracle.phi(py["decay"][h], lag))
                return [np.exp(lx * lag) * a + kernel * c for a, c in zip(xs, ys, strict=True)], total

            for i in range(length):
                scores, carried = [], []
                for j in [j for j in range(len(s[b])) if seen_y[b, j] and s[b, j] <= t[b, i]]:
                    past = [m for m in range(length) if seen_x[b, m] and t[b, m] <= s[b, j]]
                    pair, variance = [0, 0], px["prior_variance"][h]
                    if past:
                        m = past[-1]
                        *driven, driven_variance = driver(m)
                        own = [k[b, h, m], v[b, h, m]]
                        pair, variance = moved(own, px["key_noise"][h], driven, driven_variance, s[b, j] - t[b, m])
                    drive = [ky[b, h, j], vy[b, h, j]]
                    (key, value), sigma = moved(pair, variance, drive, py["key_noise"][h], t[b, i] - s[b, j])
                    sigma += floor[h]
                    distance = np.sum(np.abs(q[b, h, i] - key) ** 2) / (nu[h] * modes * (sigma + gamma2[h]))
                    evidence = (nu[h] + 1) * np.log1p(distance) if layer.weight == "student_t" else distance
                    scores.append(beta[h] * (-np.log(sigma) - evidence))
                    carried.append(value)
                if scores:
                    weights = np.exp(np.array(scores) - max(scores))
                    out[b, h, i] = (weights / weights.sum()) @ np.array(carried)
                out[b, h, i] -= v[b, h, i]
    return merged(layer, np.concatenate([out.real, out.imag], -1))


@cover(
    masks=[{}, MASKS],
    options=[{}, {"weight": "exponential"}],
    dtype=[torch.float64, torch.float32],
)
def test_layer_is_its_formula(dtype, options, masks):
    layer, x, y = layer_with(dtype, **options), hidden(dtype=dtype), other(dtype=dtype)
    found = layer(x, y, times=TIMES, auxiliary_times=AUXILIARY_TIMES, **masks)
    expected = by_hand(layer, x, y, TIMES, AUXILIARY_TIMES, **masks)
    assert_near(found, expected, 1e-9 if dtype == torch.float64 else SINGLE)


def test_masked_tokens_are_as_if_absent():
    layer, x, y = layer_with(), hidden(), other()
    kept, kept_y = (m[0].nonzero()[:, 0] for m in MASKS.values())
    masks = {name: mask[:1].expand(2, -1) for name, mask in MASKS.items()}
    clock = {"times": TIMES[0], "auxiliary_times": AUXILIARY_TIMES[0]}
    expected = layer(x[:, kept], y[:, kept_y], times=TIMES[0, kept], auxiliary_times=AUXILIARY_TIMES[0, kept_y])
    x[~masks["key_mask"]], y[~masks["auxiliary_key_mask"]] = torch.nan, torch.inf
    found = layer(x, y, **clock, **masks)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, kept], expected, rtol=EXACT, atol=EXACT)


def test_rows_in_blocks_are_the_whole(monkeypatch):
    layer, x, y = layer_with(), hidden(), other()
    whole = layer(x, y, times=TIMES, auxiliary_times=AUXILIARY_TIMES)
    monkeypatch.setattr(rfa.ops.dense, "_SCORES", 2 * HEADS * 5 * 2 * MODES * 2)  # two rows at a time
    with torch.no_grad():
        found = layer(x, y, times=TIMES, auxiliary_times=AUXILIARY_TIMES)
    torch.testing.assert_close(found, whole, rtol=EXACT, atol=EXACT)


def test_every_parameter_gets_a_gradient():
    layer = layer_with(torch.float32)
    target = torch.randn(2, 7, SIZE)
    layer(hidden(dtype=torch.float32), other(dtype=torch.float32), times=TIMES, auxiliary_times=AUXILIARY_TIMES).mul(
        target
    ).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extremes_stay_finite(dtype):
    """Large inputs, lags of a million, processes that do not decay; a shift of all times changes nothing."""
    decay = torch.zeros(HEADS)
    layer = layer_with(dtype, decay=decay, auxiliary_decay=decay, auxiliary_frequency=FREQUENCY)
    x, y = 1e3 * hidden(dtype=dtype), 1e3 * other(dtype=dtype)
    out = layer(x.requires_grad_(), y, times=1e6 * TIMES, auxiliary_times=1e6 * AUXILIARY_TIMES)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in (x.grad, *(p.grad for p in layer.parameters())))
    clock = torch.arange(7), torch.arange(5)
    shifted = layer(x, y, times=clock[0] + 10**15, auxiliary_times=clock[1] + 10**15)
    assert torch.equal(shifted, layer(x, y))


def test_half_precision():
    layer = layer_with(torch.float32).bfloat16()
    assert layer.target_process.raw_key_noise.dtype == torch.float32
    x, y = hidden(dtype=torch.bfloat16), other(dtype=torch.bfloat16)
    out = layer(x, y)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer.float()(x.float(), y.float()), rtol=0.05, atol=0.05)  # 8 bits


def test_bad_input_is_refused():
    layer, x, y = layer_with(), hidden(), other()
    with only_our_own_checks():
        for options, name in (
            ({"weight": "misspelt"}, "weight"),
            ({"auxiliary_decay": torch.tensor([0.1, -0.1])}, "auxiliary_decay"),
            ({"auxiliary_frequency": torch.rand(HEADS, 3)}, "auxiliary_frequency"),
            ({"coupling": float("nan")}, "coupling"),
            ({"steady_state": -1.0}, "steady_state"),
            ({"auxiliary_size": 0}, "auxiliary_size"),
        ):
            with pytest.raises(ValueError, match=rf"^{name}: got"):
                layer_with(**options)
        with pytest.raises(ValueError, match="hidden_size: got 15"):
            CoupledFilterAttention(15, HEADS)
        for given, name in (
            ({"times": torch.zeros(7)}, "times"),
            ({"auxiliary_times": torch.zeros(5)}, "auxiliary_times"),
            ({"auxiliary_times": torch.zeros(4)}, "auxiliary_times"),
            ({"key_mask": torch.ones(2, 6, dtype=torch.bool)}, "key_mask"),
            ({"auxiliary_key_mask": torch.ones(2, 7, dtype=torch.bool)}, "auxiliary_key_mask"),
        ):
            with pytest.raises(ValueError, match=rf"^{name}: got"):
                layer(x, y, **given)
        for wrong, name in (((x, x), "auxiliary_states"), ((y, y), "hidden_states"), ((x, y[:1]), "auxiliary_states")):
            with pytest.raises(ValueError, match=rf"^{name}: got"):
                layer(*wrong)
