"""The registered operators of pairs: their contracts with PyTorch, the shapes without any pair."""

import pytest
import torch
from cover import slow

from rfa.ops.kernel import kernel_inputs, rotation_tables
from rfa.ops.prior import kernel_prior
from rfa.ops.problem import Options, Parameters, Problem

from ..problems import PARAMETERS, irregular_times, located, problem
from .fused_problems import DEVICE, needs_triton, rounded

pytestmark = needs_triton
pairs_operator = pytest.importorskip("rfa.ops.triton.pairs_operator")


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
