"""What holds for every layer: absent tokens, packed sequences, blocks of rows, gradients, half precision."""

import pytest
import torch
from cover import cover

from rfa.nn.dynamics import FullPrecision

from .by_hand import EXACT, assert_near, hidden
from .layers import LAYERS, SITUATIONS, WAYS, build

SEGMENTS = torch.tensor([[5, 5, 2, 2, 2, 5, 9]])  # one of them in two parts
GIVEN = ["default times", "irregular", "each row its own", "padding longer than a chunk", "a gap", "segments"]
NO_SOURCE = ("precision", "routing", "all that")  # where a query sees no key the estimate is its value
RELATIVE = [name for name in WAYS if name != "as released"]  # which knows its origin


@pytest.mark.parametrize("name", RELATIVE)
def test_masked_tokens_are_as_if_absent(name):
    """Whatever they hold, and whatever their times are."""
    layer, x, kept = build(name), hidden(), [1, 2, 5, 6]
    expected = layer(x[:, kept], times=torch.tensor(kept))
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[:, kept] = True
    torch.testing.assert_close(layer(x, key_mask=mask)[:, kept], expected, rtol=EXACT, atol=EXACT)
    x[~mask] = torch.nan
    times = torch.tensor([50.0, 1, 2, -9, 1e6, 5, 6], dtype=torch.float64)
    found = layer(x, key_mask=mask, times=times)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, kept], expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", RELATIVE)
def test_packed_is_separate(name):
    layer, x = build(name), hidden()
    found = layer(x, segment_ids=SEGMENTS.expand(2, -1))
    for number in (5, 2, 9):
        kept = (SEGMENTS[0] == number).nonzero()[:, 0]
        torch.testing.assert_close(found[:, kept], layer(x[:, kept], times=kept), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", [name for name in WAYS if not name.startswith(NO_SOURCE)])
def test_nothing_to_see_gives_the_bias(name):
    """All keys masked: the estimate is zero, not NaN, forwards and backwards."""
    layer, x = build(name), hidden().requires_grad_()
    layer.innovation = False
    out = layer(x, key_mask=torch.zeros(2, 7, dtype=torch.bool))
    assert_near(out, layer.output_projection.bias.expand_as(out))
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@cover(1, situation=GIVEN, name=LAYERS)
def test_gradients_in_single_precision(name, situation):
    """On fused kernels where there are some, against the reference in float64: of the input and every parameter."""
    assert_gradients_of_the_reference(name, 9, **SITUATIONS[situation])


@pytest.mark.parametrize("name", ["forget gate", "gains", "clock of slopes", "c7", "gates and clock"])
def test_gradients_over_several_blocks_of_keys(name):
    assert_gradients_of_the_reference(name, 37)


def assert_gradients_of_the_reference(name, length, **given):
    single, double = build(name, torch.float32), build(name, backend="reference")
    double.load_state_dict(single.state_dict())
    x, found = hidden(length=length, dtype=torch.float32), []
    kept = given.get("key_mask", torch.ones(2, length, dtype=torch.bool))[..., None]
    for layer in (single, double):
        dtype = layer.query_projection.weight.dtype
        start = x.detach().clone().to(dtype).requires_grad_()
        target = hidden(seed=9, length=length).to(dtype) * kept
        layer(start, **given).mul(target).sum().backward()
        found.append({"input": start.grad, **{n: p.grad for n, p in layer.named_parameters()}})
    for parameter, exact in found[1].items():
        assert exact.isfinite().all(), parameter
        assert exact.any() or parameter == "key_projection.bias", parameter
        scale = max(1.0, float(exact.abs().max()))
        assert float((found[0][parameter] - exact).abs().max()) / scale < 1e-4, parameter  # sums over pairs


@cover(1, cast=["bfloat16", "half"], name=WAYS)
def test_half_precision(name, cast):
    """Dynamics, gates and frequencies stay as they are; the output is that of float32 to the precision of the cast."""
    layer, x = build(name, torch.float32), hidden(dtype=torch.float32)
    parts = [part for part in layer.modules() if isinstance(part, FullPrecision)]
    before = [{n: value.clone() for n, value in part.state_dict().items()} for part in parts]
    expected = layer(x)
    getattr(layer, cast)()
    for part, held in zip(parts, before, strict=True):
        assert all(torch.equal(value, held[n]) for n, value in part.state_dict().items())
    found = layer(x.to(layer.query_projection.weight.dtype))
    assert found.dtype == layer.query_projection.weight.dtype != torch.float32
    tolerance = {"bfloat16": 0.04, "half": 0.005}[cast]  # ten times eps: 2^-8, 2^-11; weights, states and two products
    assert (found.float() - expected).norm() / expected.norm() < tolerance
