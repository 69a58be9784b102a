"""The registered operators of pairs: their contracts with PyTorch, the shapes without any pair."""

import pytest
import torch
from cover import slow
from torch.func import jvp
from torch.utils._python_dispatch import TorchDispatchMode

from rfa.ops import robust_filter_attention
from rfa.ops.backends import BACKENDS
from rfa.ops.kernel import kernel_inputs, rotation_tables
from rfa.ops.prior import kernel_prior
from rfa.ops.problem import Options, Parameters, Problem
from rfa.ops.transforms import BODIES

from ..problems import PARAMETERS, irregular_times, located, problem
from .fused_problems import DEVICE, SINGLE, needs_triton, rounded, triton_attention

pytestmark = needs_triton
pairs_operator = pytest.importorskip("rfa.ops.triton.pairs_operator")
pairs_prior = pytest.importorskip("rfa.ops.triton.pairs_prior")
KERNELS = [(pairs_prior, name) for name in ("phases_kernel", "path_kernel", "path_gradient_kernel")]
KERNELS += [(pairs_operator, f"pairs_{name}_kernel") for name in ("states", "forward", "key", "query")]
KERNELS += [(pairs_operator, "delta_kernel")]


def arguments(prior="lyapunov", irregular=False, queries=5, keys=6, mask=False):
    """Of `rfa::pairs_forward`, everything that may requiring a gradient."""
    made = rounded(problem(batch=1, keys=keys, queries=queries, modes=8), torch.float32)
    inputs = {n: x.to(DEVICE) for n, x in made.items()}
    parameters = Parameters(*(inputs[name] for name in PARAMETERS), None)
    present = torch.arange(keys, device=DEVICE)[None] > 1 if mask else None
    times = irregular_times(0, keys).to(DEVICE) if irregular else None
    positions = located(queries, keys, inputs["query"].device, times, None, present, None)
    options = Options(True, "student_t", True, prior, True, False, True)
    made = kernel_prior(Problem(parameters, positions, options), tables=False)
    learned = {n: x.detach().requires_grad_() for n, x in made._asdict().items() if x is not None and n != "bound"}
    states = [inputs[n].detach().requires_grad_() for n in ("query", "key", "value")]
    rotation = rotation_tables(parameters.frequency, positions)
    options = {"causal": True, "score_kind": "student_t", "rotate_values": True}
    return kernel_inputs(*states, rotation, made._replace(**learned), positions, **options)


@pytest.mark.parametrize(("prior", "irregular", "mask"), [("lyapunov", False, False), ("riccati", True, True)])
def test_opcheck(prior, irregular, mask):
    torch.library.opcheck(torch.ops.rfa.pairs_forward, arguments(prior, irregular, mask=mask))


@slow
def test_opcheck_of_the_gradient():
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments()]
    out, log_sum = torch.ops.rfa.pairs_forward(*given)
    incoming = torch.ones_like(out), torch.ones_like(log_sum), out, log_sum, True
    torch.library.opcheck(torch.ops.rfa.pairs_backward, (*incoming, *given))


def test_compiles_without_graph_breaks():
    def loss(*given):
        out, log_sum = torch.ops.rfa.pairs_forward(*given)
        return out.square().sum() + log_sum.sum()

    given = arguments()
    learned = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    expected = torch.autograd.grad(loss(*given), learned)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*given), learned)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 4), (3, 0)])
def test_nothing_to_see(queries, keys):
    inputs = rounded(problem(batch=1, queries=queries, keys=keys, modes=8), torch.float32)
    leaves = {n: x.to(DEVICE).requires_grad_(n != "frequency") for n, x in inputs.items()}
    query_times = torch.arange(float(queries), dtype=torch.float64, device=DEVICE)
    times = torch.arange(float(keys), dtype=torch.float64, device=DEVICE)
    out, log_precision = triton_attention(**leaves, times=times, query_times=query_times)
    assert out.shape == (1, 2, queries, 16)
    assert not out.any()
    assert (log_precision == -torch.inf).all()
    out.sum().backward()
    assert not any(leaves[n].grad.any() for n in ("query", "key", "value"))


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_several_cotangents_at_once(prior):
    """As one after the other; there is no second derivative, and no tangent of forward mode."""
    inputs = {n: x.to(DEVICE) for n, x in rounded(problem(batch=1, keys=6, modes=8), torch.float32).items()}
    leaves = {n: x.requires_grad_() for n, x in inputs.items() if n != "frequency"}
    out, _ = triton_attention(**inputs, prior=prior, times=irregular_times(0, 6).to(DEVICE))
    wanted, cotangents = list(leaves.values()), torch.stack([out.detach(), -2 * out.detach()])
    together = torch.autograd.grad(out, wanted, cotangents, is_grads_batched=True, retain_graph=True)
    alone = torch.autograd.grad(out, wanted, cotangents[0], create_graph=True)
    for both, one in zip(together, alone, strict=True):
        torch.testing.assert_close(both, torch.stack([one, -2 * one]), rtol=SINGLE, atol=SINGLE)
    with pytest.raises(RuntimeError, match="the triton backend has no second derivatives; backend='reference' has"):
        alone[0].sum().backward()
    with pytest.raises(ValueError, match=r"backend: got 'triton' in forward-mode.* backend='reference'"):
        jvp(lambda x: robust_filter_attention(**{**inputs, "query": x}, backend="triton"), *[(inputs["query"],)] * 2)


class Filter(torch.nn.Module):
    """The operator with parameters of its own."""

    def __init__(self, inputs):
        super().__init__()
        given = {n: x.detach() for n, x in inputs.items() if n not in ("query", "key", "value")}
        self.dynamics = torch.nn.ParameterDict({n: torch.nn.Parameter(x) for n, x in given.items()})

    def forward(self, query, key, value):
        return robust_filter_attention(query, key, value, **dict(self.dynamics.items()), backend="triton")


def test_an_exported_program_serves_all_lengths():
    made = rounded(problem(batch=1, keys=6, modes=8), torch.float32)
    filtering = Filter({n: x.to(DEVICE) for n, x in made.items()})
    short, long = ([torch.randn(1, 2, n, 16, device=DEVICE) for _ in range(3)] for n in (20, 33))
    length = {2: torch.export.Dim("length", min=4, max=64)}
    program = torch.export.export(filtering, tuple(short), dynamic_shapes=(length,) * 3, strict=False)
    torch.testing.assert_close(program.module()(*long), filtering(*long))


class Launches(TorchDispatchMode):
    """Counts what a GPU would run: kernels of PyTorch, not views and allocations, within `rfa`'s operators too."""

    FREE = ("view", "expand", "t", "transpose", "select", "slice", "unsqueeze", "detach", "alias", "empty", "new_empty")
    FREE += ("as_strided", "permute", "squeeze", "unbind", "_unsafe_view", "is_same_size", "split_with_sizes")
    FREE += ("empty_like", "promote_types", "broadcast_tensors", "numpy_T")
    FREE += ("to", "contiguous")  # they copy by operators of their own

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "rfa":
            with self:
                return BODIES[func._schema.name](*args, **(kwargs or {}))
        if func._schema.name.split("::")[1] not in self.FREE:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Noted:
    """A kernel that notes its launches and computes nothing."""

    def __init__(self, name, found):
        self.name, self.found = name, found

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.found.append(self.name)


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_launches_at_given_times(monkeypatch, prior):
    """At most 12 of a forward and backward pass in half precision, the prior and the phases included."""
    launches = Launches()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Noted(name, launches.found))
    inputs = {n: x.to(DEVICE) for n, x in rounded(problem(batch=2, keys=9, modes=8), torch.bfloat16).items()}
    leaves = {n: x.requires_grad_(n not in ("decay", "frequency")) for n, x in inputs.items()}
    states = [leaves.pop(n) for n in ("query", "key", "value")]
    positions = located(9, 9, states[0].device, irregular_times(0, 2, 9).to(DEVICE), None, None, None)
    given = Problem(Parameters(**leaves), positions, Options(prior=prior))
    cotangent = torch.ones_like(states[2])
    with launches:
        BACKENDS["triton"].run(*states, given)[0].backward(cotangent)
    assert len(launches.found) <= 12, launches.found
