"""What is no number reaches the queries that see it, and nothing else: no other estimate and no other gradient."""

import pytest
import torch

from .problems import PRIORS, WEIGHTS, attend, irregular_times, problem

LENGTH, AT = 140, 130  # the poisoned key shares its block with keys of other queries
BAD = [torch.nan, torch.inf]


def found(inputs, rows, backend, **options):
    """Estimates and log precisions of some rows, and all gradients of a loss of them alone."""
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    output, log_precision = (x[0, 0, rows] for x in attend(leaves, backend, **options))
    g = torch.Generator().manual_seed(0)
    total = sum((x * torch.randn(x.shape, generator=g)).sum() for x in (output, log_precision))
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {"output": output, "log_precision": log_precision, **dict(zip(leaves, gradients, strict=True))}


def assert_untouched(clean, poisoned, place):
    for name, wanted in clean.items():
        actual = poisoned[name]
        if name == place:
            actual, wanted = (torch.cat([x[:, :, :AT], x[:, :, AT + 1 :]], 2) for x in (actual, wanted))
        scale = float(wanted.abs().max())
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5 * max(scale, 1e-6), msg=name)


@pytest.mark.parametrize("turned", ["by the kernel", "by autograd"])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["query", "key", "value"])
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


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", ["key", "value"])
def test_other_segments(name, weight, prior, backend):
    """Not causal: what hides the poison is the segment, which changes within its block."""
    inputs = problem(1, batch=1, heads=1, keys=LENGTH, dtype=torch.float32)
    segments = torch.arange(LENGTH)[None] % 3
    options = {"segment_ids": segments, "causal": False, "weight": weight, "prior": prior}
    rows = segments[0] != segments[0, AT]
    clean = found(inputs, rows, backend, **options)
    inputs[name] = inputs[name].clone()
    inputs[name][0, 0, AT, 1] = torch.nan
    assert_untouched(clean, found(inputs, rows, backend, **options), name)
