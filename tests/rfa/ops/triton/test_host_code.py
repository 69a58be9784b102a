"""What the host does for a call, on the device "meta": it refuses tensors of the CPU, and a look at a value.

So no call waits for the GPU, and a CUDA graph can hold it. The kernels are not launched.
"""

import torch
from cover import cover

from rfa.ops.kernel import kernel_inputs, rotation_tables
from rfa.ops.positions import Positions
from rfa.ops.prior import kernel_prior
from rfa.ops.problem import Options, Parameters, Problem
from rfa.ops.transforms import BODIES
from rfa.ops.old_triton.kernels import forward
from rfa.ops.old_triton.lag_tables import lag_tables

from ..problems import PARAMETERS, problem
from .fused_problems import needs_triton

pytestmark = needs_triton


@cover(
    irregular=[False, True],
    prior=["lyapunov", "riccati"],
    groups=[False, True],
    turned=[False, True],
    dtype=[torch.float32, torch.bfloat16],
    weight=["student_t", "exponential"],
)
def test_all_is_on_the_device_and_nothing_waits(monkeypatch, irregular, prior, groups, turned, dtype, weight):
    launched = []

    def launch(kernel, grid):
        def run(*given, **options):
            launched.append(kernel)
            assert all(x.is_meta for x in given if isinstance(x, torch.Tensor)), (
                "a kernel is handed a tensor of the CPU"
            )

        return run

    monkeypatch.setattr(type(forward.forward_kernel), "__getitem__", launch)
    inputs = {n: x.to("meta", dtype if x.dim() == 4 else torch.float32) for n, x in problem(keys=70, modes=8).items()}
    times = torch.arange(70.0, dtype=torch.float64, device="meta")[None]
    marks = torch.zeros(2, 70, dtype=torch.int32, device="meta") if groups else None
    positions = Positions(times, times, marks, marks, uniform=not irregular)
    options = Options(True, weight, turned, prior, True, False, True)
    parameters = Parameters(*(inputs[name] for name in PARAMETERS), None)
    states = [inputs[name] for name in ("query", "key", "value")]
    rotation = rotation_tables(parameters.frequency, positions) if turned else None
    made = kernel_prior(Problem(parameters, positions, options), tables_of=lag_tables)
    given = kernel_inputs(*states, rotation, made, positions, causal=True, score_kind=weight, rotate_values=turned)
    out, log_sum = BODIES["rfa::triton_forward"](*given)
    incoming = torch.empty_like(out), torch.empty_like(log_sum), out, log_sum, True
    gradients = BODIES["rfa::triton_backward"](*incoming, *given)
    assert all(x.is_meta for x in (out, log_sum, *gradients))
    assert [x.shape for x in gradients[:3]] == [x.shape for x in states]
    if not irregular and prior == "lyapunov":
        given = [*(inputs[name] for name in PARAMETERS if name != "frequency"), None, None, None]
        numbers = (70, 8.0, 1e-38, weight == "student_t", True, False)
        of_tables = BODIES["rfa::triton_lag_tables_backward"](gradients[3], gradients[-1][0], *given, *numbers)
        assert of_tables.is_meta
        assert of_tables.shape == (10, inputs["decay"].shape[0])
    assert len(launched) >= 4  # forward, and two gradients with what they need
