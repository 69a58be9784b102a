"""Gradients of the output and of the log precision, for every tensor, by finite differences.

Finite differences need float64, the reference's; a fused backend is held against the reference's gradients.
"""

import itertools

import numpy as np
import pytest
import torch
from cover import cover, some

from . import oracle
from .problems import (
    FUSED,
    PARAMETERS,
    PRIORS,
    SINGLE,
    STATES,
    WEIGHTS,
    attend,
    irregular_times,
    problem,
    with_gradients,
    within,
)

TIMES = torch.tensor([0.0, 0.7, 1.1, 2.4], dtype=torch.float64)


def small_problem(seed=0, **shape):
    """Every parameter inside its range, so that finite differences stay legal."""
    shape = {"batch": 1, "heads": 2, "keys": 4, "modes": 2, **shape}
    inputs = problem(seed, **shape)
    inputs["decay"][0] = 0.07
    return inputs


def gradcheck(inputs, backend, *, entrywise=False, **options):
    """All tensors of `inputs` and all float tensors of `options`: each Jacobian along random directions, or whole."""
    tensors = {
        **inputs,
        **{n: x for n, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()},
    }
    fixed = {n: x for n, x in options.items() if n not in tensors}
    leaves = [x.clone().requires_grad_() for x in tensors.values()]

    def call(*leaves):
        output, log_precision = attend(dict(zip(tensors, leaves, strict=True)), backend, **fixed)
        return output, torch.where(log_precision.isinf(), 0.0, log_precision)  # -inf has no differences

    if backend in FUSED:
        assert_gradients(tensors, backend, fixed)
        return
    # The differences' error at h = 1e-6: h^2 f''' ~ 1e-11, and rounding 1e-15 / h = 1e-9.
    assert torch.autograd.gradcheck(call, leaves, atol=1e-7, rtol=1e-6, fast_mode=not entrywise)


def assert_gradients(tensors, backend, fixed):
    """Every gradient of a fused backend is the float64 reference's at the same float32 numbers."""
    rounded = {n: x.float().double() if n in (*STATES, *PARAMETERS) else x for n, x in tensors.items()}
    found = with_gradients(rounded, backend, **fixed)
    for name, expected in with_gradients(rounded, "reference", **fixed).items():
        # float32 roundings of sums over a few dozen pairs, relative to the tensor's largest number.
        error = (found[name] - expected).masked_fill(expected.isinf(), 0.0).abs().max()
        assert error < SINGLE * (1 + expected.masked_fill(expected.isinf(), 0.0).abs().max()), name


@cover(causal=[True, False], prior=PRIORS, weight=WEIGHTS)
def test_all_twelve_tensors(weight, prior, causal, backend):
    inputs = small_problem(1, heads=1)
    gradcheck(inputs, backend, entrywise=True, times=TIMES, weight=weight, prior=prior, causal=causal)
    gradcheck(small_problem(2, batch=2), backend, weight=weight, prior=prior, causal=causal)  # at times 0, 1, 2, ...


@cover(1, causal=[True, False], prior=PRIORS)
def test_query_times_mask_segments_and_horizon(prior, causal, backend):
    """Separate query times and per-batch key times get gradients too; one row sees no key at all."""
    inputs = small_problem(3, batch=2, heads=1, queries=3)
    options = {
        "times": irregular_times(3, 2, 4),
        "query_times": torch.tensor([-9.0, 2.03, 7.7], dtype=torch.float64),
        "key_mask": torch.tensor([[True, False, True, True], [True, True, True, False]]),
        "horizon": torch.tensor([0.6], dtype=torch.float64),
    }
    gradcheck(inputs, backend, prior=prior, causal=causal, **options)
    options["segment_ids"] = torch.tensor([[0, 0, 1, 0], [2, 5, 5, 5]])
    gradcheck(inputs, backend, prior=prior, causal=causal, **options)


@cover(1, switch=["gate", "query_noise_in_bias", "rotate_values", "rotate_values, wide"], weight=WEIGHTS)
def test_switches(weight, switch, backend):
    name, *wide = switch.split(", ")
    inputs = small_problem(4, keys=3, value_modes=3 if wide else None)
    gradcheck(inputs, backend, weight=weight, times=TIMES[:3], **{name: name == "query_noise_in_bias"})


def boundary_gradient(zero, head, inputs, options, backend):
    """(the operator's gradient, the oracle's central difference) in one parameter of one head at 0.

    The oracle continues every formula analytically to negative parameters; the operator refuses them.
    """
    g = torch.Generator().manual_seed(99)
    output, log_precision = attend(inputs, backend, **options)
    left = torch.randn(output.shape, generator=g, dtype=torch.float64)
    right = torch.randn(log_precision.shape, generator=g, dtype=torch.float64)
    leaf = inputs[zero].clone().requires_grad_()
    output, log_precision = attend({**inputs, zero: leaf}, backend, **options)
    ((left * output).sum() + (right * log_precision).sum()).backward()

    def objective(shift):
        moved = inputs[zero].clone()
        moved[head] += shift
        out, log = oracle.filter_attention(**{**inputs, zero: moved}, **options)
        return float(np.sum(left.numpy() * out) + np.sum(right.numpy() * log))

    # Central differences at h and 2h, combined so that the h^2 term falls: error h^4 f5 ~ 1e-12 and rounding
    # 1e-15 / h ~ 1e-11.
    h = 3e-4
    near = (objective(h) - objective(-h)) / (2 * h)
    far = (objective(2 * h) - objective(-2 * h)) / (4 * h)
    return leaf.grad[head].item(), (4 * near - far) / 3


def assert_slope(actual, expected, backend):
    """Up to the differences' error."""
    assert actual == pytest.approx(expected, rel=within(1e-7, backend), abs=within(1e-8, backend))


ZEROS = ["decay", "process_noise", "key_noise", "query_noise", "noise_floor"]


# At zero process noise the Riccati gain is zero and its logarithm has no derivative.
BOUNDARIES = [pair for pair in itertools.product(PRIORS, ZEROS) if pair != ("riccati", "process_noise")]


def test_gradients_at_the_legal_boundary(backend):
    for prior, zero in some(BOUNDARIES, 5):
        for weight, causal in itertools.product(WEIGHTS, [True, False]):
            inputs = small_problem(5, heads=1)
            inputs[zero].zero_()
            inputs["key_noise"] += 0.5 * (zero == "noise_floor")  # keep Sigma well above zero
            options = {"times": TIMES, "weight": weight, "prior": prior, "causal": causal}
            actual, expected = boundary_gradient(zero, 0, inputs, options, backend)
            assert_slope(actual, expected, backend)


@cover(1, causal=[True, False], timed=[True, False])
def test_gradients_without_decay_and_process_noise(timed, causal, backend):
    """Nothing grows along a lag then, but E = exp(-mu |tau|) still knows which of the two is the later."""
    for zero in ("decay", "process_noise"):
        inputs = small_problem(7, heads=1)
        inputs["decay"].zero_(), inputs["process_noise"].zero_()
        options = {"causal": causal, **({"times": TIMES} if timed else {})}
        assert_slope(*boundary_gradient(zero, 0, inputs, options, backend), backend)


def test_float32_gradients_at_the_boundary_are_those_of_float64(backend):
    """Also at nearly zero decay, where (1 - exp(-2 mu tau)) / (2 mu) cancels."""
    for prior, zero in some(BOUNDARIES, 5):
        for tiny in (0.0, 1e-9, 1e-5):
            inputs = small_problem(7)
            inputs[zero].fill_(tiny)
            inputs["key_noise"] += 0.5 * (zero == "noise_floor")
            single = {n: x.float() for n, x in inputs.items()}
            gradients = []
            for tensors in (single, {n: x.double() for n, x in single.items()}):
                leaves = [x.clone().requires_grad_() for x in tensors.values()]
                output, log_precision = attend(dict(zip(tensors, leaves, strict=True)), backend, prior=prior)
                gradients.append(torch.autograd.grad(output.sum() + log_precision.sum(), leaves))
            for name, a, b in zip(single, *gradients, strict=True):
                # float32 roundings of sums over 16 pairs, relative to the tensor's largest gradient.
                error = (a.double() - b).abs().max() / (1 + b.abs().max())
                assert error < 5e-5, (name, tiny, error)


def test_only_what_requires_a_gradient_gets_one(backend):
    inputs = small_problem(8)
    for name in inputs:
        alone = {n: x.clone().requires_grad_(n == name) for n, x in inputs.items()}
        sum(x.sum() for x in attend(alone, backend)).backward()
        assert [n for n, x in alone.items() if x.grad is not None] == [name]
        assert bool(torch.isfinite(alone[name].grad).all())
