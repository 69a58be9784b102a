"""The operator through the Triton kernels, from the arguments of the public function, against the float64 reference."""

import importlib.util

import pytest
import torch

from rfa.ops import robust_filter_attention
from rfa.ops.backends import BACKENDS
from rfa.ops.problem import Options, Parameters, Problem

from ..problems import PARAMETERS, STATES, located, problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# float32 (eps 1.2e-7), relative to the largest entry: residuals of order 10 from three terms; the gradient of a
# parameter sums some 1000 pairs of both signs, and what is left may be a hundredth of them.
SINGLE = 1e-4
# States are rounded once more in the frame, weights and incoming gradients once: each off by eps / 2, and logits of
# order 10 multiply it. The gradient of a small parameter is a difference of larger sums.
HALF = {torch.bfloat16: 5e-2, torch.float16: 7e-3}
if DEVICE == "cuda":  # products truncate, exp2 and log2 are approximate: parameters are off by 5.3e-2, 1.3e-2 on an H200
    HALF = {torch.bfloat16: 7e-2, torch.float16: 2e-2}

DEFAULTS = {
    "times": None,
    "query_times": None,
    "key_mask": None,
    "segment_ids": None,
    "causal": True,
    "weight": "student_t",
    "rotate_values": True,
    "prior": "lyapunov",
    "gate": True,
    "query_noise_in_bias": False,
    "horizon": None,
}


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def one_head(seed, **sizes):
    """A problem of one head, with a decay."""
    inputs = problem(seed, heads=1, modes=sizes.pop("modes", 8), **sizes)
    inputs["decay"] = inputs["decay"] + 0.2
    return inputs


def triton_attention(query, key, value, **arguments):
    """`(output, log_precision)` on the device, wherever the arguments are."""
    query, key, value = (x.to(DEVICE) for x in (query, key, value))
    given = {**DEFAULTS, **arguments}
    given = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    parameters = Parameters(*(given[name] for name in PARAMETERS), given["horizon"])
    chosen = ("causal", "weight", "rotate_values", "prior", "gate", "query_noise_in_bias")
    options = Options(*(given[name] for name in chosen), log_precision=True)
    places = ("times", "query_times", "key_mask", "segment_ids")
    positions = located(query.shape[2], key.shape[2], query.device, *(given[name] for name in places))
    return BACKENDS["triton"].run(query, key, value, Problem(parameters, positions, options))


def reference_attention(**arguments):
    return robust_filter_attention(**arguments, return_log_precision=True, backend="reference")


def rounded(inputs, dtype):
    """States in `dtype`, parameters in float32."""
    return {name: x.to(dtype if name in STATES else torch.float32) for name, x in inputs.items()}


def with_gradients(function, inputs, cotangents, constant, **arguments):
    """Both results and the gradient of every input but the `constant` ones, in float64 on the CPU, by name."""
    leaves = {name: x.detach().clone().requires_grad_(name not in constant) for name, x in inputs.items()}
    out, log_precision = function(**leaves, **arguments)
    seen = log_precision > -torch.inf
    weights = [c.to(out.device) for c in cotangents]
    total = (out.double() * weights[0]).sum() + (log_precision.double() * weights[1])[seen].sum()
    learned = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(total, list(learned.values()), allow_unused=True)
    found = {"output": out.detach(), "log_precision": log_precision.detach()}
    for (name, leaf), gradient in zip(learned.items(), gradients, strict=True):
        found[name] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: x.double().cpu() for name, x in found.items()}


def errors(inputs, *, dtype=torch.float32, constant=("frequency",), **arguments):
    """The largest error of each result and gradient, relative to its largest entry, by name.

    The reference gets the rounded inputs, so the errors are those of the computation. Where the frequency is constant
    the kernels turn the states, otherwise autograd does.
    """
    g = torch.Generator().manual_seed(0)
    shape = (*inputs["query"].shape[:3], inputs["value"].shape[-1])
    cotangents = [torch.randn(*s, generator=g, dtype=torch.float64) for s in (shape, shape[:3])]
    cotangents[0] = cotangents[0].to(dtype).double()
    inputs = rounded(inputs, dtype)
    exact = {name: x.double() for name, x in inputs.items()}
    expected = with_gradients(reference_attention, exact, cotangents, constant, **arguments)
    actual = with_gradients(triton_attention, inputs, cotangents, constant, **arguments)
    found = {}
    for name, wanted in expected.items():
        finite = wanted.isfinite()
        assert torch.equal(actual[name][~finite], wanted[~finite]), name
        error = (actual[name] - wanted)[finite].abs().max() if finite.any() else torch.zeros(())
        assert error.isfinite(), name
        found[name] = float(error / wanted[finite].abs().max().clamp(min=1e-2)) if finite.any() else 0.0
    return found


def assert_accurate(inputs, *, tolerance=None, dtype=torch.float32, **arguments):
    tolerance = tolerance or (SINGLE if dtype == torch.float32 else HALF[dtype])
    found = errors(inputs, dtype=dtype, **arguments)
    wrong = {name: error for name, error in found.items() if error > tolerance}
    assert not wrong, wrong
