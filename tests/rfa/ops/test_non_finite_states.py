"""What is no number reaches the queries that see it, and nothing else: no other estimate and no other gradient."""

import pytest
import torch
from cover import cover
from nn.by_hand import hidden
from nn.layers import build

from rfa.appendix import CoupledFilterAttention, TensorFilterAttention

from .problems import attend, irregular_times, problem

LENGTH, AT = 140, 130  # the key that is not finite shares its block with keys of other queries
BAD = [torch.nan, torch.inf]


def found(inputs, rows, backend, **options):
    """Estimates and log precisions of some rows, and all gradients of a loss of them alone."""
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    output, log_precision = (x[0, 0, rows] for x in attend(leaves, backend, **options))
    g = torch.Generator().manual_seed(0)
    total = sum((x * torch.randn(x.shape, generator=g)).sum() for x in (output, log_precision))
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {"output": output, "log_precision": log_precision, **dict(zip(leaves, gradients, strict=True))}


def assert_untouched(clean, found, place):
    for name, wanted in clean.items():
        actual = found[name]
        if name == place:
            actual, wanted = (torch.cat([x[:, :, :AT], x[:, :, AT + 1 :]], 2) for x in (actual, wanted))
        scale = float(wanted.abs().max())
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5 * max(scale, 1e-6), msg=name)


@cover(1, turned=["by the kernel", "by autograd"], timed=[False, True], bad=BAD, name=["query", "key", "value"])
def test_earlier_queries(name, bad, timed, turned, backend):
    """Causality holds for what is no number too."""
    inputs = problem(0, batch=1, heads=1, keys=LENGTH, dtype=torch.float32)
    options = {"times": irregular_times(0, LENGTH)} if timed else {}
    if turned == "by the kernel":
        options["frequency"] = inputs.pop("frequency")
    clean = found(inputs, slice(0, AT), backend, **options)
    inputs[name] = inputs[name].clone()
    inputs[name][0, 0, AT, 1] = bad
    assert_untouched(clean, found(inputs, slice(0, AT), backend, **options), name)
    output, log_precision = attend({**inputs, **options}, backend)
    seeing = slice(AT, AT + 1 if name == "query" else None)
    assert not output[0, 0, seeing].isfinite().all(-1).any()
    if name != "value":
        assert bool(log_precision[0, 0, seeing].isnan().all())


def coupled(x):
    torch.manual_seed(0)
    return CoupledFilterAttention(16, 2, auxiliary_size=16).double()(x, x)


def anisotropic(x):
    torch.manual_seed(0)
    return TensorFilterAttention(16, 2).double()(x)


OTHERS = {name: lambda x, name=name: build(name, backend="reference")(x) for name in ("content", "b3", "routing")}
OTHERS |= {"coupled": coupled, "anisotropic": anisotropic}


@pytest.mark.parametrize("name", OTHERS)
def test_earlier_tokens_of_other_layers(name):
    found = []
    for number in (0.0, torch.nan):
        x = hidden(length=9)
        x[0, 6, 2] = number
        output = OTHERS[name](x.requires_grad_())
        early = output[:, :6]
        (gradient,) = torch.autograd.grad(early.square().sum(), x)
        found.append([early.detach(), gradient[:, :6], output[1].detach()])
    assert bool(output[0, 6].isnan().any())
    for clean, spoilt in zip(*found, strict=True):
        torch.testing.assert_close(spoilt, clean)
