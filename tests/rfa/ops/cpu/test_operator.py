"""The registered operator: what PyTorch expects of one, threads, layouts, memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cover import cover, slow, some
from torch.library import opcheck

from rfa.ops.cpu.operator import backward, forward
from rfa.ops.kernel import kernel_inputs, rotation_tables
from rfa.ops.prior import kernel_prior
from rfa.ops.problem import Options, Parameters, Problem

from ..problems import PARAMETERS, PRIORS, STATES, attend, irregular_times, located, problem, with_gradients
from .compiled import give_library, python

SAMPLES = {
    "tables": {},
    "tables, few queries": {"queries": 3},
    "wide values": {"rotate_values": False, "value_modes": 4},
    "in the frame": {"in_frame": True},
    "path": {"times": irregular_times(0, 7)},
    "path per batch, not causal": {"times": irregular_times(0, 2, 7), "causal": False},
    "riccati": {"times": irregular_times(0, 7), "prior": "riccati"},
    "mask": {"key_mask": torch.arange(14).view(2, 7) % 3 > 0},
    "no keys": {"keys": 0, "queries": 2, "query_times": torch.arange(2.0)},
    "no queries": {"queries": 0},
    "bfloat16": {"dtype": torch.bfloat16},
}


def arguments(*, queries=None, keys=7, value_modes=None, in_frame=False, dtype=torch.float32, **given):
    """Of `torch.ops.rfa.cpu_forward`; everything that may be learned requires a gradient."""
    inputs = problem(0, queries=queries, keys=keys, value_modes=value_modes, dtype=torch.float32)
    states = [inputs[name].to(dtype).requires_grad_() for name in STATES]
    parameters = Parameters(*(inputs[name] for name in PARAMETERS), None)
    causal, rotate_values = given.get("causal", True), given.get("rotate_values", True)
    options = Options(causal, "student_t", rotate_values, given.get("prior", "lyapunov"), True, False, True)
    places = (given.get(name) for name in ("times", "query_times", "key_mask", "segment_ids"))
    positions = located(states[0].shape[2], keys, torch.device("cpu"), *places)
    prior = kernel_prior(Problem(parameters, positions, options))
    learned = {n: x.detach().requires_grad_() for n, x in prior._asdict().items() if x is not None and n != "bound"}
    rotation = None if in_frame else rotation_tables(parameters.frequency, positions)
    options = {"causal": causal, "score_kind": "student_t", "rotate_values": rotate_values}
    return kernel_inputs(*states, rotation, prior._replace(**learned), positions, **options)


@pytest.mark.parametrize("sample", some(SAMPLES, 4))
def test_opcheck_forward(sample):
    """Schema, fake tensors, autograd registration, and AOTAutograd with symbolic shapes."""
    opcheck(forward, arguments(**SAMPLES[sample]))


@pytest.mark.parametrize("sample", some(SAMPLES, 2))
def test_opcheck_backward(sample):
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments(**SAMPLES[sample])]
    out, log_sum, first_block = forward(*given)
    opcheck(backward, (torch.ones_like(out), torch.ones_like(log_sum), out, log_sum, first_block, *given))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def results(seed, **shape):
    """All results and gradients of a problem of several blocks, by name."""
    inputs = problem(seed, keys=700, modes=4, dtype=torch.float32, **shape)
    return [with_gradients(inputs, "cpu", times=times) for times in (None, irregular_times(seed, 700))]


def test_threads(threads):
    """Heads enough for the threads give the same bits. A head that is cut among them, whose gradients several tasks sum
    in a fixed order, has another rounding, the same each time.
    """
    for shape in ({}, {"batch": 1, "heads": 1}):
        threads(1)
        one = results(1, **shape)
        threads(2)
        for x, y, z in zip(one, results(1, **shape), results(1, **shape), strict=True):
            for name in x:
                assert torch.equal(z[name], y[name]), name
                # sums over 700 rows in another order, in float32
                rounding = 1e-5 * (x[name].abs().max() + 1e-3) if shape else 0.0
                assert (x[name] - y[name]).abs().max() <= rounding, name


@cover(1, prior=PRIORS, dtype=[torch.float32, torch.bfloat16], timed=[True, False])
def test_strides_are_no_concern(timed, dtype, prior):
    """Transposed, expanded, sliced, reversed in memory, every second channel: the same bits, forward and backward."""
    base = problem(3, batch=2, keys=40, modes=8, dtype=dtype)
    options = {"prior": prior, **({"times": irregular_times(3, 40)} if timed else {})}
    layouts = {
        "heads last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "channels first": lambda x: x.mT.contiguous().mT,
        "every second channel": lambda x: torch.stack([x, x * torch.nan], -1).flatten(-2)[..., ::2],
        "inside a larger one": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4), value=torch.nan)[:, :, 1:-4, 3:-2],
        "expanded": lambda x: x[:1, :, :1].expand_as(x),
    }
    for layout in layouts.values():
        strided = {n: layout(base[n]) for n in STATES}
        found = []
        for states in (strided, {n: x.clone(memory_format=torch.contiguous_format) for n, x in strided.items()}):
            leaves = {**{n: x.detach().clone() for n, x in base.items()}, **{n: x.detach() for n, x in states.items()}}
            for x in leaves.values():
                x.requires_grad_()
            output, log_precision = attend(leaves, "cpu", **options)
            ((output.float() ** 2).sum() + log_precision.sum()).backward()
            found.append([output, log_precision, *(x.grad for x in leaves.values())])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@cover(1, shape=[{"batch": 0}, {"queries": 0}, {"keys": 0}, {"keys": 0, "queries": 0}], timed=[0, 1], prior=PRIORS)
def test_nothing_to_do(timed, prior, shape):
    """All strides are zero, as NumPy makes empty arrays; for PyTorch they are contiguous."""
    inputs = problem(4, dtype=torch.float32, **({"queries": 5} | shape))
    states = {n: torch.from_numpy(np.zeros(x.shape, np.float32)) for n, x in inputs.items() if n in STATES}
    options = {"prior": prior}
    if timed or shape == {"keys": 0}:
        keys, queries = inputs["key"].shape[2], inputs["query"].shape[2]
        options |= {"times": irregular_times(4, keys), "query_times": irregular_times(5, queries)}
    for x in states.values():
        x.requires_grad_()
    output, log_precision = attend({**inputs, **states}, "cpu", **options)
    assert output.shape == states["query"].shape
    assert not output.any()
    assert bool((log_precision == -torch.inf).all())
    output.sum().backward()
    assert not any(x.grad.any() for x in states.values())


MEMORY = """
import resource
from ops.problems import attend, irregular_times, problem
import torch

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def step(length, **options):
    inputs = problem(0, batch=1, heads=1, keys=length, modes=32, dtype=torch.float32)
    attend({n: x.requires_grad_() for n, x in inputs.items()}, "cpu", **options)[0].sum().backward()

step(1024)
step(1024, times=irregular_times(0, 1024))
before = peak()
step(8192)
step(8192, times=irregular_times(0, 8192))
print(peak() - before)
"""


@slow
def test_memory_grows_with_the_length_not_with_its_square(tmp_path):
    """8192 x 8192 scores are 256 MB, even a mask of bytes 64 MB more than the 60 MB of some thirty tensors of 2 MB."""
    give_library(tmp_path)
    done = python(MEMORY, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 110


REPEATED = """
from ops.problems import attend, problem
import pathlib, torch

def resident():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

inputs = problem(0, batch=1, heads=8, keys=512, modes=2, dtype=torch.float32)
torch.set_grad_enabled(False)
for calls in (100, 400):
    before = resident()
    for _ in range(calls):
        attend(inputs, "cpu")
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux counts the memory of a process")
def test_forward_alone_keeps_no_memory(tmp_path):
    """Each source of the kernels has its part of them; working memory of one was freed by another's backward pass."""
    give_library(tmp_path)
    done = python(REPEATED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 8  # MB; 400 times the lag tables of 8 heads are 29


def test_second_derivatives_raise():
    """They are not known here: a gradient penalty must not lose its term in silence."""
    sample = arguments(**SAMPLES[next(iter(SAMPLES))])
    wanted = [x.requires_grad_() for x in sample[:3]]
    out, *_ = forward(*sample)
    grads = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(sum(grad.square().sum() for grad in grads), wanted)
