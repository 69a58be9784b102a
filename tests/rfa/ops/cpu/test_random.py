"""40 or 200 random shapes, parameters and options: as good as float32 can be, measured on the dense computation."""

import pytest
from cover import ALL

from .random_problems import errors, random_problem

# Against the float32 reference's own error: other orders of the same sums, and another polynomial for 2^x.
OF_DENSE = 4
# Where the true gradient vanishes both are rounding and nothing else, of the same order.
OF_NOISE = 20
# Of the largest number: the dense error may be small by chance, and after n nats of decay float32 keeps n eps of E.
FLOOR = 1e-5
EPS = 1.2e-7


@pytest.mark.parametrize("first", range(0, 200 if ALL else 40, 10))
def test_errors_are_those_of_a_dense_float32_computation(first):
    """Gradients of scores have one term more.

    A kernel that forms its weights anew has the gradient `A_ij (<g_i, v_j> - <g_i, out_i>)` of a score by rounding
    both products, each relative to `|g_i| |v_j|`, where the dense softmax subtracts from a number its multiple; and a
    score of size z has an error `eps z`, which may hit the dense computation elsewhere.
    """
    for seed in range(first, first + 10):
        inputs, options, learned = random_problem(seed)
        found = errors(inputs, options, learned, "cpu")
        depth = 4 + found["log_precision"][2]
        worst = {}
        for name, (error, dense, scale, uncancelled) in found.items():
            scale = max(scale, 1.0) if name == "log_precision" else scale  # a difference of numbers of order one
            allowed = (OF_NOISE if scale < dense else OF_DENSE) * dense + FLOOR * scale + EPS * depth * uncancelled
            if error > allowed + 1e-6:  # what vanishes exactly in the dense computation too
                worst[name] = f"error {error:.1e}, allowed {allowed:.1e}, dense {dense:.1e}, scale {scale:.1e}"
        assert not worst, (seed, worst, options)
