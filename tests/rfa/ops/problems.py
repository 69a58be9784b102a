"""Small random problems for the operator, and the comparison with the oracle."""

import numpy as np
import torch

from rfa.ops import robust_filter_attention
from rfa.ops.positions import Positions, checked_positions

from . import oracle

STATES = ("query", "key", "value")
PARAMETERS = (
    "decay",
    "frequency",
    "process_noise",
    "key_noise",
    "query_noise",
    "noise_floor",
    "robustness",
    "inverse_temperature",
)
WEIGHTS = ("student_t", "exponential")
PRIORS = ("lyapunov", "riccati")

# Both sides work in float64 on numbers of order one, with a few dozen roundings each: 1e4 to spare.
EXACT = 1e-10
# float32 (eps 1.2e-7): residuals of order 10 expanded into three terms, and logits of order 10 exponentiated.
SINGLE = 5e-5
# What fused kernels take; float64 is the reference's alone.
FUSED = ("cpu",)


def within(exact, backend):
    """The tolerance of a comparison that float64 passes to `exact`: a fused backend computes in float32."""
    return max(exact, SINGLE) if backend in FUSED else exact


def uniform(generator, low, high, *shape):
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)


def problem(seed=0, *, batch=2, heads=2, queries=None, keys=5, modes=3, value_modes=None, dtype=torch.float64):
    """Inputs and parameters; `queries` defaults to `keys`. Head 0 has decay 0, a legal value."""
    g = torch.Generator().manual_seed(seed)
    queries = keys if queries is None else queries

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {
        "query": normal(batch, heads, queries, 2 * modes),
        "key": normal(batch, heads, keys, 2 * modes),
        "value": normal(batch, heads, keys, 2 * (value_modes or modes)),
        "decay": uniform(g, 0.05, 0.5, heads),
        "frequency": normal(heads, modes),
        "process_noise": uniform(g, 0.1, 1.0, heads),
        "key_noise": uniform(g, 0.1, 1.0, heads),
        "query_noise": uniform(g, 0.1, 1.0, heads),
        "noise_floor": uniform(g, 0.01, 0.1, heads),
        "robustness": uniform(g, 0.5, 6.0, heads),
        "inverse_temperature": uniform(g, 0.5, 1.5, heads),
    }
    inputs["decay"][0] = 0.0
    return {name: x.to(dtype) for name, x in inputs.items()}


def irregular_times(seed, *shape, dtype=torch.float64):
    """Increasing along the last axis, with steps between 0.1 and 2."""
    g = torch.Generator().manual_seed(1000 + seed)
    return (uniform(g, 0.1, 2.0, *shape).cumsum(-1) - 1.5).to(dtype)


def attend(inputs, backend, **options):
    """`(output, log_precision)` of the operator under test. Float64 goes through a fused backend in float32."""
    narrowed = backend in FUSED and inputs["query"].dtype == torch.float64
    if narrowed:  # times and horizon stay float64, as they do in use
        inputs = {n: x.float() if n in (*STATES, *PARAMETERS) else x for n, x in inputs.items()}
    results = robust_filter_attention(**inputs, **options, return_log_precision=True, backend=backend)
    return tuple(x.double() for x in results) if narrowed else results


def with_gradients(inputs, operator, learned=None, **options):
    """Output, log precision, and the gradients of a random sum of both, by name; the -inf of an empty row counts as 0.

    `operator` is the name of a backend, or a function of the inputs; `learned` are the names that have a gradient.
    """
    leaves = {n: x.detach().clone().requires_grad_(learned is None or n in learned) for n, x in inputs.items()}
    results = attend(leaves, operator, **options) if isinstance(operator, str) else operator(leaves, **options)
    g = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x) for x in results]
    total = sum((w * x.masked_fill(x.isinf(), 0.0)).sum() for w, x in zip(cotangents, results, strict=True))
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(total, list(wanted.values()), allow_unused=True, materialize_grads=True)
    output, log_precision = (x.detach() for x in results)
    return {"output": output, "log_precision": log_precision, **dict(zip(wanted, grads, strict=True))}


def assert_matches_oracle(inputs, backend, exact=EXACT, **options):
    tolerance = within(exact, backend)
    output, log_precision = attend(inputs, backend, **options)
    expected, expected_log = oracle.filter_attention(**inputs, **options)
    np.testing.assert_allclose(oracle.as_array(output), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(oracle.as_array(log_precision), expected_log, rtol=tolerance, atol=tolerance)
    return output, log_precision


def assert_same(actual, expected, backend, exact=EXACT):
    """Both results of `attend`, or single tensors."""
    tolerance = within(exact, backend)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def located(queries, keys, device, times=None, query_times=None, key_mask=None, segment_ids=None) -> Positions:
    """Positions of states whose batch is that of what is given."""
    given = [x for x in (times, query_times, key_mask, segment_ids) if x is not None and x.dim() == 2]
    batch = max([x.shape[0] for x in given], default=1)
    return checked_positions(batch, queries, keys, device, times, query_times, key_mask, segment_ids)
