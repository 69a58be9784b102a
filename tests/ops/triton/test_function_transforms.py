"""`torch.func`, `torch.vmap`, batched gradients and dual numbers through the Triton kernels."""

import pytest
import torch
from cover import some
from torch.func import jacrev, vmap

from rfa.ops.backends import BACKENDS

from ..derivatives import FORWARD, PROBLEMS, REVERSE, errors, gradients, losses_of, made, moved
from .fused_problems import DEVICE, SINGLE, needs_triton

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def _by_name(monkeypatch):
    """Whether triton runs here was asked, and kept, before its interpreter was chosen."""
    monkeypatch.setattr("rfa.ops.backends._missing", lambda name: BACKENDS[name].missing())


def on_device(options):
    return {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in options.items()}


@pytest.mark.parametrize(
    ("name", "transform"),
    some(
        [
            ("uniform", "vmap of jacrev"),
            ("uniform", "grad"),
            ("riccati, masked", "jacrev"),
            ("times, not causal", "functional.jacobian"),
            ("times a row, riccati", "is_grads_batched"),
        ],
        2,
    ),
)
def test_reverse_mode(name, transform):
    inputs, options = made(8, device=DEVICE), on_device(PROBLEMS[name])
    expected = gradients(inputs, **options)
    found = errors(REVERSE[transform](losses_of("triton", **options), inputs), expected)
    assert max(found.values()) < SINGLE, found


def test_batched_positions():
    """Each sample has a mask of its own, so each is a call of its own."""
    inputs, masks = made(8, device=DEVICE), torch.arange(20, device=DEVICE).view(2, 2, 5) % 4 > 0
    found = vmap(lambda mask: losses_of("triton", key_mask=mask)(inputs))(masks)
    expected = torch.stack([losses_of("reference", key_mask=mask)(inputs) for mask in masks])
    torch.testing.assert_close(found, expected, rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize("transform", FORWARD)
def test_forward_mode_is_refused(transform):
    inputs = made(8, device=DEVICE)
    with pytest.raises(ValueError, match=r"backend: got 'triton' in forward-mode.* backend='reference'"):
        FORWARD[transform](losses_of("triton"), inputs, moved(inputs))


def test_second_derivatives_are_refused():
    inputs = made(8, device=DEVICE)

    def loss(decay):
        return losses_of("triton")({**inputs, "decay": decay}).sum()

    with pytest.raises(RuntimeError, match="the triton backend has no second derivatives; backend='reference' has"):
        jacrev(jacrev(loss))(inputs["decay"])
    decay = inputs["decay"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(decay), decay, create_graph=True)
    with pytest.raises(RuntimeError, match="the triton backend has no second derivatives; backend='reference' has"):
        slope.sum().backward()
