"""Second derivatives of softmax attention, which PyTorch's kernels lack: where the reference is asked for by name."""

import pytest
import torch
from cover import cover
from torch.autograd import gradgradcheck

from rfa.nn import DotProductAttention
from rfa.ops.dot_product import decayed_dot_product_attention

from .problems import located

RATES = torch.tensor([0.1, 0.4], dtype=torch.float64)
GATES = -torch.rand(1, 2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BIASES = {"plain": {}, "slopes": {"slopes": RATES}, "gates": {"log_gate": GATES}}
LAYERS = {"plain": {}, "window": {"window": 3}, "slopes": {"slopes": RATES}}


def states(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 5, 4, generator=g, dtype=dtype).requires_grad_() for _ in range(3)]


def attention(backend="reference", **biases):
    positions = located(5, 5, torch.device("cpu"), None, None, None, None)
    return lambda *x: decayed_dot_product_attention(*x, positions=positions, backend=backend, **biases)


@cover(1, decay=[None, RATES], bias=BIASES)
def test_of_the_operator(bias, decay):
    assert gradgradcheck(attention(decay=decay, **BIASES[bias]), states(), fast_mode=True)


def test_of_no_decay_is_that_of_a_decay_of_zero():
    """In float32, for which PyTorch has kernels of its own."""
    found = []
    for decay in (None, torch.zeros(2)):
        given = states(torch.float32)
        slopes = torch.autograd.grad(attention(decay=decay)(*given).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in slopes), given))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_of_a_layer(name):
    """And elsewhere, nothing is slower: PyTorch chooses its kernel."""
    x = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for backend in ("reference", "auto") if name != "slopes" else ("reference",):
        torch.manual_seed(0)
        layer = DotProductAttention(8, 2, backend=backend, **LAYERS[name]).double()
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(given).square().sum(), given, create_graph=True)
        if backend == "reference":
            assert torch.autograd.grad(slope.square().sum(), given)[0].isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="not implemented"):
                torch.autograd.grad(slope.square().sum(), given)
