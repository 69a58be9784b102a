"""Layers on a content clock by the Triton kernels: values and gradients are the reference's."""

import pytest
import torch
from nn.by_hand import hidden
from nn.test_clock import layer_of

from rfa.ops.backends import BACKENDS

from .fused_problems import DEVICE, needs_triton

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def _by_name(monkeypatch):
    """Whether triton runs here was asked, and kept, before its interpreter was chosen."""
    monkeypatch.setattr("rfa.ops.backends._missing", lambda name: BACKENDS[name].missing())


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


def test_folded_tiles_at_the_times_of_each_head(monkeypatch):
    """Each sequence and head has times of its own. A clock that learns turns its states in float32, without folds."""
    from rfa.ops.old_triton import folds

    dtype = torch.bfloat16
    fused, exact = layer_of("lyapunov", dtype, backend="triton").to(DEVICE), layer_of("lyapunov", backend="reference")
    exact.load_state_dict(fused.state_dict())
    x, seen, made = hidden(length=150, dtype=dtype), [], folds.path_folds
    monkeypatch.setattr(folds, "path_folds", lambda *given, **options: seen.append(made(*given, **options)) or seen[-1])

    def found(layer):
        layer.clock.requires_grad_(False)
        out = layer(x.to(layer.query_projection.weight))
        learned = [p for p in layer.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(out.double().square().sum(), learned)
        return [part.double().cpu() for part in (out.detach(), *gradients)]

    def errors():
        parts = zip(found(fused), wanted, strict=True)
        return [float((one - other).abs().max() / other.abs().max().clamp(min=1e-2)) for one, other in parts]

    wanted = found(exact)
    folded = errors()
    assert (seen[0][1].nearest == torch.tensor([0, 1, 2], device=DEVICE)).all()
    monkeypatch.setattr(folds, "may_fold", lambda _: False)
    for one, other in zip(folded, errors(), strict=True):
        assert one < max(1.5 * other, 2e-2), (folded, other)
