"""`torch.func`, `torch.vmap`, batched gradients and dual numbers through the Triton kernels."""

import pytest
import torch
from cover import some
from torch.func import jacrev, vjp, vmap

from rfa.ops import robust_filter_attention

from ..derivatives import FORWARD, PROBLEMS, REVERSE, errors, gradients, losses_of, made, moved
from .fused_problems import DEVICE, SINGLE, needs_triton

pytestmark = needs_triton


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


@pytest.mark.parametrize("heads", [1, 2])
def test_a_batch_of_cotangents(heads):
    """With one head the states that all samples share are views without strides of their own."""
    inputs = {n: x[:, :heads] if x.dim() == 4 else x[:heads] for n, x in made(8, device=DEVICE).items()}
    cotangents = torch.randn(3, *inputs["query"].shape, device=DEVICE)

    def found(backend):
        def estimate(query, key, value):
            return robust_filter_attention(**(inputs | {"query": query, "key": key, "value": value}), backend=backend)

        _, pull = vjp(estimate, *(inputs[name] for name in ("query", "key", "value")))
        return vmap(pull)(cotangents)

    for one, other in zip(found("triton"), found("reference"), strict=True):
        torch.testing.assert_close(one, other, rtol=SINGLE, atol=SINGLE)


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


class Filter(torch.nn.Module):
    """The operator with parameters of its own."""

    def __init__(self, inputs):
        super().__init__()
        given = {n: x.detach() for n, x in inputs.items() if n not in ("query", "key", "value")}
        self.dynamics = torch.nn.ParameterDict({n: torch.nn.Parameter(x) for n, x in given.items()})

    def forward(self, query, key, value):
        return robust_filter_attention(query, key, value, **dict(self.dynamics.items()), backend="triton")


def states(length):
    return [torch.randn(1, 2, length, 16, device=DEVICE) for _ in range(3)]


def test_an_exported_program_serves_all_lengths():
    filtering = Filter(made(8, device=DEVICE))
    length = {2: torch.export.Dim("length", min=4, max=64)}
    program = torch.export.export(filtering, tuple(states(20)), dynamic_shapes=(length,) * 3, strict=False)
    given = states(33)
    torch.testing.assert_close(program.module()(*given), filtering(*given))
