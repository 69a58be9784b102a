"""Rows without keys, and a parameter that vanishes; tests/rfa/ops/test_fuzz.py draws large and extreme numbers."""

import pytest
import torch
from cover import cover

from .problems import PRIORS, WEIGHTS, attend, irregular_times, problem, with_gradients


@cover(1, prior=PRIORS, weight=WEIGHTS, causal=[True, False], timed=[True, False], length=[6, 150])
def test_rows_without_keys(length, timed, causal, weight, prior, backend):
    """Some rows of a block, and all rows of a sequence; 150 tokens are several blocks of a fused kernel."""
    inputs = problem(8, keys=length, dtype=torch.float32)
    mask = torch.arange(2 * length).view(2, length) % 3 > 0
    mask[0, : length // 3], mask[1] = False, False
    options = {"key_mask": mask, "causal": causal, "weight": weight, "prior": prior}
    options |= {"times": irregular_times(8, length)} if timed else {}
    found = with_gradients(inputs, backend, **options)
    empty = ~mask.cummax(1).values if causal else ~mask.any(1, keepdim=True).expand(2, length)
    empty = empty[:, None].expand(2, 2, length)
    assert bool((found["output"][empty] == 0).all())
    assert torch.equal(found.pop("log_precision") == -torch.inf, empty)
    for name, x in found.items():
        assert bool(torch.isfinite(x).all()), name
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    sum(x.sum() for x in attend(leaves, backend, **options)).backward()  # of a loss that takes the -inf too
    assert all(bool(x.grad.isfinite().all()) for x in leaves.values())
    assert bool((found["query"][empty] == 0).all())
    for name in ("key", "value"):
        assert bool((found[name][~mask[:, None].expand(2, 2, length)] == 0).all()), name


def test_a_parameter_that_vanishes_in_the_inputs_precision(backend):
    inputs = problem(32, keys=4, dtype=torch.float32)
    inputs["robustness"] = torch.full((2,), 1e-50, dtype=torch.float64)
    with pytest.raises(ValueError, match="robustness"):
        attend(inputs, backend)
