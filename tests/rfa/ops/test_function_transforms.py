"""`torch.func`, `torch.vmap`, batched gradients, dual numbers and second derivatives through the operators."""

import pytest
import torch
from cover import cover
from torch.autograd import forward_ad, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from rfa.nn import DotProductAttention
from rfa.ops import robust_filter_attention
from rfa.ops.dot_product import decayed_dot_product_attention

from .problems import irregular_times, located, problem

# float32 (eps 1.2e-7) as in triton/fused_problems.py: the gradient of a parameter sums pairs of both signs.
SINGLE = 1e-4
PRESENT = torch.arange(10).view(2, 5) % 4 > 0
PROBLEMS = {
    "uniform": {},
    "riccati, masked": {"prior": "riccati", "key_mask": PRESENT},
    "times, not causal": {"times": irregular_times(0, 5), "causal": False, "weight": "exponential"},
    "times a row, riccati": {"times": irregular_times(0, 2, 5), "prior": "riccati"},
}


def made(dtype=torch.float32):
    """Inputs of the operator; every decay is positive, where gradients have two sides."""
    inputs = problem(0, modes=3)
    inputs["decay"] = inputs["decay"] + 0.1
    return {n: x.to(dtype) for n, x in inputs.items()}


def moved(inputs):
    """Another problem like it, and so a direction from one to the other."""
    g = torch.Generator().manual_seed(1)
    factors = {n: 1 + 0.3 * torch.rand(x.shape, generator=g, dtype=torch.float64) for n, x in inputs.items()}
    return {n: x * factors[n].to(x) for n, x in inputs.items()}


def losses_of(backend, **options):
    """A function of the inputs: `(2,)`, sums of the estimates and log precisions with two sets of weights."""

    def losses(inputs):
        results = robust_filter_attention(**inputs, **options, return_log_precision=True, backend=backend)
        total = 0.0
        for x in results:
            weights = torch.arange(2 * x.numel()).cos().view(2, *x.shape)
            seen = torch.where(x.isfinite(), x, 0.0)  # a query without keys has a log precision of -inf
            total = total + (weights * seen).flatten(1).sum(1)
        return total

    return losses


def gradients(inputs, **options):
    """Of both losses, in float64 by the reference and plain reverse mode: `(2, ...)` by name."""
    leaves = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    total = losses_of("reference", **options)(leaves)
    rows = [torch.autograd.grad(part, list(leaves.values()), retain_graph=True) for part in total]
    return {n: torch.stack(parts) for n, parts in zip(leaves, zip(*rows, strict=True), strict=True)}


def batched(f, x):
    """The Jacobian by one batch of cotangents."""
    given = (*x.values(),)
    rows = torch.autograd.functional.jacobian(lambda *y: f(dict(zip(x, y, strict=True))), given, vectorize=True)
    return dict(zip(x, rows, strict=True))


def of_a_sample(f, x):
    """The Jacobian of the first of two samples."""
    other = moved(x)
    return {n: rows[0] for n, rows in vmap(jacrev(f))({n: torch.stack([x[n], other[n]]) for n in x}).items()}


def dual(f, x, direction):
    with forward_ad.dual_level():
        value = f({n: forward_ad.make_dual(x[n], direction[n]) for n in x})
        return forward_ad.unpack_dual(value).tangent


def columns(f, x, direction):
    return sum((rows * direction[n]).flatten(1).sum(1) for n, rows in jacfwd(f)(x).items())


REVERSE = {"jacrev": lambda f, x: jacrev(f)(x), "batched": batched, "vmap of jacrev": of_a_sample}
FORWARD = {
    "jvp": lambda f, x, direction: jvp(f, (x,), (direction,))[1],
    "jacfwd": columns,
    "dual": dual,
    "dual without gradients": lambda f, x, direction: torch.no_grad()(dual)(f, x, direction),
}


@cover(1, transform=REVERSE, name=PROBLEMS)
def test_reverse_mode(name, transform):
    """Kernels serve a batch of cotangents; within a transform "auto" takes the reference."""
    inputs, options = made(), PROBLEMS[name]
    expected = gradients(inputs, **options)
    for backend in ("auto", "cpu"):
        if backend == "cpu" and transform != "batched":
            with pytest.raises(ValueError, match=r"backend: got 'cpu' .* transform of torch.func, .*'reference'"):
                REVERSE[transform](losses_of(backend, **options), inputs)
            continue
        for n, found in REVERSE[transform](losses_of(backend, **options), inputs).items():
            assert (found.double() - expected[n]).abs().max() < SINGLE * expected[n].abs().max(), n


@cover(1, transform=FORWARD, name=PROBLEMS)
def test_forward_mode(name, transform):
    """Of all inputs at once: right, or refused by a name that says what serves; never zero."""
    inputs, options = made(), PROBLEMS[name]
    direction = {n: x - inputs[n] for n, x in moved(inputs).items()}
    expected = sum((x * direction[n].double()).flatten(1).sum(1) for n, x in gradients(inputs, **options).items())
    found = FORWARD[transform](losses_of("auto", **options), inputs, direction)
    torch.testing.assert_close(found.double(), expected, rtol=SINGLE, atol=SINGLE)
    with pytest.raises(ValueError, match=r"backend: got 'cpu' in forward-mode.* backend='reference'"):
        FORWARD[transform](losses_of("cpu", **options), inputs, direction)
    ordinary = losses_of("auto")(inputs)  # kernels serve again
    assert torch.equal(ordinary, losses_of("cpu")(inputs))


def test_second_derivatives():
    """The reference has them, in every combination; "auto" within transforms; kernels raise."""

    def of(backend):
        inputs = {n: x.double() if backend == "reference" else x for n, x in made().items()}
        return lambda decay: losses_of(backend)({**inputs, "decay": decay}).sum()

    decay = made()["decay"]
    exact = decay.double()
    step = 1e-5 * torch.eye(2, dtype=torch.float64)
    slope = grad(of("reference"))
    numeric = torch.stack([(slope(exact + d) - slope(exact - d)) / 2e-5 for d in step])
    for transform in (hessian, lambda f: jacrev(jacrev(f))):
        torch.testing.assert_close(transform(of("reference"))(exact), numeric, rtol=1e-6, atol=1e-6)  # a step of 1e-5
    torch.testing.assert_close(hessian(of("auto"))(decay).double(), numeric, rtol=1e-3, atol=1e-3)  # float32, twice
    (slope,) = torch.autograd.grad(of("auto")(leaf := decay.clone().requires_grad_()), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives; backend='reference' has"):
        slope.sum().backward()
    with pytest.raises(ValueError, match="backend='reference'"):
        jvp(grad(of("cpu")), (decay,), (decay,))


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_batched_positions(prior):
    """`vmap` over masks, segments and times: a loop says the same."""
    inputs = made()
    segments = torch.tensor([[3, 3, -1, -1, -1], [7, 7, 7, 7, 9]])
    given = {
        "key_mask": torch.stack([PRESENT, PRESENT.flip(1)]),
        "segment_ids": torch.stack([segments, segments.flip(0)]),
        "times": torch.stack([irregular_times(0, 2, 5), irregular_times(1, 2, 5)]),
    }
    for name, each in given.items():
        of = lambda at, name=name: losses_of("auto", prior=prior, **{name: at})(inputs)  # noqa: E731
        torch.testing.assert_close(vmap(of)(each), torch.stack([of(at) for at in each]), rtol=SINGLE, atol=SINGLE)


def test_batched_values_are_not_checked_and_others_are():
    inputs = made()
    states = {n: torch.stack([inputs[n]] * 3) for n in ("query", "key", "value")}
    rest = {n: x for n, x in inputs.items() if n not in states}

    def attend(given, times, decay):
        return robust_filter_attention(**given, **{**rest, "decay": decay}, times=times)

    times = irregular_times(0, 5)
    with pytest.raises(ValueError, match="decay: got"):
        vmap(attend, (0, None, None))(states, times, -rest["decay"])
    with pytest.raises(ValueError, match="times: got"):
        vmap(attend, (0, None, None))(states, times.flip(0), rest["decay"])
    assert vmap(attend, (None, None, 0))({n: inputs[n] for n in states}, times, rest["decay"][None]).shape[0] == 1


def test_compiled_before_forward_mode_began():
    """The compiler does not ask again which backend serves; the kernel itself must refuse tangents."""
    inputs = made()
    losses = losses_of("cpu")

    def traced(*given):  # as a compiled graph has it: the operator, called with what was traced
        return losses(dict(zip(inputs, given, strict=True)))

    graph = torch.fx.experimental.proxy_tensor.make_fx(traced)(*inputs.values())
    with forward_ad.dual_level(), pytest.raises(ValueError, match="backend: got 'cpu' in forward-mode"):
        graph(*(forward_ad.make_dual(x, x) for x in inputs.values()))


# of softmax attention, which PyTorch's kernels lack: where the reference is asked for by name
RATES = torch.tensor([0.1, 0.4], dtype=torch.float64)
GATES = -torch.rand(1, 2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def states(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 5, 4, generator=g, dtype=dtype).requires_grad_() for _ in range(3)]


def attention(backend="reference", **biases):
    positions = located(5, 5, torch.device("cpu"), None, None, None, None)
    return lambda *x: decayed_dot_product_attention(*x, positions=positions, backend=backend, **biases)


def test_second_derivatives_of_dot_products():
    for biases in ({"decay": RATES}, {"slopes": RATES}, {"log_gate": GATES}):
        assert gradgradcheck(attention(**biases), states(), fast_mode=True)


def test_second_derivatives_of_a_layer():
    """And elsewhere, nothing is slower: PyTorch chooses its kernel."""
    x = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for backend, options in (("reference", {}), ("reference", {"slopes": RATES}), ("auto", {})):
        torch.manual_seed(0)
        layer = DotProductAttention(8, 2, backend=backend, **options).double()
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(given).square().sum(), given, create_graph=True)
        if backend == "reference":
            assert torch.autograd.grad(slope.square().sum(), given)[0].isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="not implemented"):
                torch.autograd.grad(slope.square().sum(), given)
