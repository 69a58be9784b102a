"""Layers on a content clock by the Triton kernels: values and gradients are the reference's."""

import pytest
import torch
from nn.by_hand import hidden
from nn.test_clock import layer_of

from .fused_problems import DEVICE, needs_triton

pytestmark = needs_triton


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
