"""What a comparison with the reference does not show: hostile inputs, repeatability."""

import numpy as np
import pytest
import torch

from ..problems import irregular_times, problem
from .fused_problems import (
    DEVICE,
    HALF,
    errors,
    needs_triton,
    one_head,
    rounded,
    triton_attention,
)

pytestmark = needs_triton


def test_states_in_any_memory_order():
    """As a projection gives them: `(batch, length, heads, channels)`; and a gradient without memory of its own."""
    inputs = {n: x.to(DEVICE) for n, x in rounded(problem(keys=20, modes=8), torch.float32).items()}
    expected, _ = triton_attention(**inputs)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out, _ = triton_attention(**inputs)
    assert torch.equal(out, expected)
    out.sum().backward()
    strange = inputs["query"].grad
    inputs = {n: x.detach().contiguous() for n, x in inputs.items()}
    inputs["query"].requires_grad_()
    out, _ = triton_attention(**inputs)
    out.backward(torch.ones_like(out))
    assert torch.equal(strange, inputs["query"].grad)


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_steps_of_one_far_from_the_origin(prior):
    """A jump within a block: rows and columns of one tile lie 1e6 apart, and what counts are lags of 1."""
    times = torch.arange(35.0, dtype=torch.float64) + irregular_times(0, 35) / 1e3
    times[10:] += 1e6
    inputs = one_head(4, batch=1, keys=35)
    inputs["decay"][0] = 1e-4
    # gradients of the decay weigh single-precision terms with times of 1e6: all but 1e-4 of that must cancel
    assert not {n: e for n, e in errors(inputs, times=times, prior=prior).items() if e > 1e-3}


def far_apart(x):
    """The same numbers, two sequences of which lie 2^31 numbers apart. Memory that is not touched is not taken."""
    memory = torch.from_numpy(np.empty(2**31 + 2 * x[0].numel(), np.int16)).view(x.dtype)
    return memory.as_strided(x.shape, (2**31, *x.stride()[1:])).copy_(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="12 GB of a device")
@pytest.mark.parametrize("irregular", [False, True])
def test_addresses_beyond_32_bits(irregular):
    inputs = rounded(problem(keys=20, modes=8), torch.bfloat16)
    times = irregular_times(0, 20) if irregular else None
    expected, _ = triton_attention(**inputs, times=times)
    for name in ("query", "key", "value"):
        inputs[name] = far_apart(inputs[name])
    assert torch.equal(triton_attention(**inputs, times=times)[0], expected)


def test_gradients_of_times_under_autocast():
    """A backward pass within the context would multiply in half precision."""
    inputs = {n: x.to(DEVICE) for n, x in rounded(problem(batch=1, keys=9, modes=8), torch.float32).items()}
    found = []
    for enabled in (False, True):
        times = irregular_times(0, 9).to(DEVICE).requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            out, _ = triton_attention(**inputs, times=times)
            out.square().sum().backward()
        found.append(times.grad)
    torch.testing.assert_close(*found)


def test_keys_near_the_end_of_float16():
    """Twice such a key is beyond its range, and a tile against its last key doubles them."""
    inputs = one_head(3, batch=1, keys=130)
    inputs["decay"] = inputs["decay"] / 40
    inputs["key"] = inputs["key"] * 1e4
    inputs["key"][0, 0, 5, 2] = 4e4
    inputs["query"] = inputs["query"] * 1e4
    found = errors(inputs, dtype=torch.float16, times=irregular_times(0, 130) / 9, constant=("frequency", "decay"))
    assert max(found.values()) < HALF[torch.float16], found
