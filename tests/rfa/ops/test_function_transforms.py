"""`torch.func`, `torch.vmap`, batched gradients and dual numbers through the operators; Triton's are in triton/."""

import pytest
import torch
from cover import cover
from torch.autograd import forward_ad, gradgradcheck
from torch.func import grad, hessian, jacrev, jvp, vmap

from rfa.appendix import tensor_filter_attention
from rfa.nn import DotProductAttention
from rfa.ops import robust_filter_attention
from rfa.ops.dot_product import decayed_dot_product_attention

from .derivatives import FORWARD, PRESENT, PROBLEMS, REVERSE, along, errors, gradients, losses_of, made, moved
from .problems import irregular_times, located

# float32 (eps 1.2e-7) as in triton/fused_problems.py: the gradient of a parameter sums pairs of both signs.
SINGLE = 1e-4


@cover(1, transform=REVERSE, name=PROBLEMS)
def test_reverse_mode(name, transform):
    inputs, options = made(), PROBLEMS[name]
    expected = gradients(inputs, **options)
    for backend in ("cpu", "reference"):
        found = errors(REVERSE[transform](losses_of(backend, **options), inputs), expected)
        assert max(found.values()) < SINGLE, (backend, found)


@cover(1, transform=FORWARD, name=PROBLEMS)
def test_forward_mode(name, transform):
    """Of all inputs at once: right, or refused by a name that says what serves; never zero."""
    inputs, options = made(), PROBLEMS[name]
    direction = {n: x - inputs[n] for n, x in moved(inputs).items()}
    expected = along(gradients(inputs, **options), direction)
    for backend in ("auto", "reference"):
        found = FORWARD[transform](losses_of(backend, **options), inputs, direction)
        torch.testing.assert_close(found.double(), expected, rtol=SINGLE, atol=SINGLE)
    with pytest.raises(ValueError, match=r"backend: got 'cpu' in forward-mode.* backend='reference'"):
        FORWARD[transform](losses_of("cpu", **options), inputs, direction)


def test_forward_mode_of_the_anisotropic_operator():
    """Forward mode says what reverse mode does, in float64."""
    inputs = made(dtype=torch.float64)
    for name in ("decay", "process_noise", "key_noise", "query_noise"):
        inputs[name] = inputs[name][:, None] * torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    names, given = zip(*inputs.items(), strict=True)

    def loss(*x):
        output, total = tensor_filter_attention(**dict(zip(names, x, strict=True)), return_log_precision=True)
        return output.square().sum() + total.sum()

    leaves = [x.clone().requires_grad_() for x in given]
    loss(*leaves).backward()
    expected = sum((x.grad * x).sum() for x in leaves)
    torch.testing.assert_close(jvp(loss, given, given)[1], expected.detach(), rtol=1e-12, atol=1e-12)


def test_forward_mode_goes_back_to_the_kernels():
    """Only where a level of it is open does "auto" take the reference."""
    inputs = made()
    before = losses_of("auto")(inputs)
    with forward_ad.dual_level():
        within = losses_of("auto")(inputs)
    assert torch.equal(within, losses_of("reference")(inputs))
    assert torch.equal(losses_of("auto")(inputs), before)
    assert torch.equal(before, losses_of("cpu")(inputs))


def test_second_derivatives():
    """The reference has them, in every combination; "auto" where forward mode is a part; kernels raise."""

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
    with pytest.raises(RuntimeError, match="no second derivatives; backend='reference' has"):
        jacrev(jacrev(of("auto")))(decay)
    with pytest.raises(ValueError, match="backend='reference'"):
        jvp(grad(of("cpu")), (decay,), (decay,))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_batched_positions(prior, backend):
    """`vmap` over masks, segments and times, with and without parameters of their own: a loop says the same."""
    inputs = made()
    other = moved(inputs)
    samples = {n: torch.stack([x, other[n]]) for n, x in inputs.items()}
    segments = torch.tensor([[3, 3, -1, -1, -1], [7, 7, 7, 7, 9]])
    given = {
        "key_mask": torch.stack([PRESENT, PRESENT.flip(1)]),
        "segment_ids": torch.stack([segments, segments.flip(0)]),
        "times": torch.stack([irregular_times(0, 2, 5), irregular_times(1, 2, 5)]),
    }
    for name, batched in given.items():
        of = lambda x, at, name=name: losses_of(backend, prior=prior, **{name: at})(x)  # noqa: E731
        shared = vmap(of, (None, 0))(inputs, batched)
        expected = torch.stack([of(inputs, at) for at in batched])
        torch.testing.assert_close(shared, expected, rtol=SINGLE, atol=SINGLE)
        own = vmap(jacrev(of))(samples, batched)
        for i, at in enumerate(batched):
            expected = gradients({n: x[i] for n, x in samples.items()}, prior=prior, **{name: at})
            found = errors({n: x[i] for n, x in own.items()}, expected)
            assert max(found.values()) < SINGLE, (name, found)


def test_batched_values_are_not_checked_and_others_are():
    inputs = made()
    states = {n: torch.stack([inputs[n]] * 3) for n in ("query", "key", "value")}
    rest = {n: x for n, x in inputs.items() if n not in states}

    def attend(given, times, decay):
        return robust_filter_attention(**given, **{**rest, "decay": decay}, times=times, backend="cpu")

    times = irregular_times(0, 5)
    expected = attend({n: inputs[n] for n in states}, times, rest["decay"])
    found = vmap(attend, (0, None, None))(states, times, rest["decay"])
    torch.testing.assert_close(found, expected.expand_as(found), rtol=SINGLE, atol=SINGLE)
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
BIASES = {"plain": {}, "slopes": {"slopes": RATES}, "gates": {"log_gate": GATES}}
LAYERS = {"plain": {}, "window": {"window": 3}, "slopes": {"slopes": RATES}}


def states(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 5, 4, generator=g, dtype=dtype).requires_grad_() for _ in range(3)]


def attention(backend="reference", **biases):
    positions = located(5, 5, torch.device("cpu"), None, None, None, None)
    return lambda *x: decayed_dot_product_attention(*x, positions=positions, backend=backend, **biases)


@cover(1, decay=[None, RATES], bias=BIASES)
def test_second_derivatives_of_dot_products(bias, decay):
    assert gradgradcheck(attention(decay=decay, **BIASES[bias]), states(), fast_mode=True)


def test_second_derivative_of_no_decay_is_that_of_a_decay_of_zero():
    """In float32, for which PyTorch has kernels of its own."""
    found = []
    for decay in (None, torch.zeros(2)):
        given = states(torch.float32)
        slopes = torch.autograd.grad(attention(decay=decay)(*given).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in slopes), given))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_of_a_layer(name):
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
