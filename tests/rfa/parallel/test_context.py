"""The ring against the operator in one process: output, log precision and every gradient."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cover import slow
from models.small import small
from ops.problems import PARAMETERS, STATES, irregular_times, problem

from parallel.processes import together
from rfa.dynamics import TimeDependentNoise
from rfa.ops import robust_filter_attention
from rfa.parallel import fully_sharded, ring_filter_attention, sequence_shard

LENGTH = 12
SEGMENTS = torch.tensor([[0] * 5 + [1] + [2] * 6, [3] * 8 + [7] * 4])  # across shards, alone in the middle, at an edge
MASK = torch.ones(2, LENGTH, dtype=torch.bool)
MASK[0, [0, 3, 8, 9, 10, 11]] = MASK[1, 4:8] = False  # a whole shard among them


def share(x):
    """This process's part along the tokens."""
    length = x.shape[-1] // dist.get_world_size()
    return x.narrow(-1, dist.get_rank() * length, length)


def leaves(inputs, part):
    given = {n: part(x.mT).mT if n in STATES else x for n, x in inputs.items()}
    return {n: x.detach().clone().requires_grad_() for n, x in given.items()}


def compare(exact, dtype, backend, seed, marks, length=LENGTH, **options):
    inputs = problem(seed, keys=length, modes=4, dtype=dtype)
    g = torch.Generator().manual_seed(seed)
    sent = torch.randn(inputs["value"].shape, generator=g, dtype=torch.float64)
    sent_log = torch.randn(sent.shape[:3], generator=g, dtype=torch.float64)

    def run(operator, part, more):
        tensors = leaves(inputs, part)
        marked = {name: part(x) for name, x in marks.items()}
        out, log = operator(**tensors, **marked, **options, backend=backend, return_log_precision=True, **more)
        seen = log > -torch.inf
        loss = (out * part(sent.mT).mT).sum() + (log * part(sent_log))[seen].sum()
        (loss + 0 * log.masked_fill(~seen, 0).sum()).backward()
        return out, log, {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in tensors.items()}

    whole_out, whole_log, whole = run(robust_filter_attention, lambda x: x, {})
    out, log, found = run(ring_filter_attention, share, {})
    for name in PARAMETERS:
        dist.all_reduce(found[name])
    pairs = {"output": (out, share(whole_out.mT).mT), "log precision": (log, share(whole_log))}
    pairs |= {name: (found[name], share(whole[name].mT).mT if name in STATES else whole[name]) for name in found}
    for name, (mine, expected) in pairs.items():
        scale = max(1.0, float(expected[expected.isfinite()].abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(
            mine, expected, rtol=0, atol=exact * scale, msg=lambda m, n=name: f"{n} {seed} {options} {list(marks)}: {m}"
        )


def check_all_variants(kind):
    """`kind` is the reference in float64, where only rounding differs, or the compiled kernel in float32."""
    exact, dtype, backend = (1e-11, torch.float64, "reference") if kind == "exact" else (1e-5, torch.float32, "cpu")
    times = irregular_times(1, 2, LENGTH)
    places = {
        "plain": {},
        "times": {"times": times[0]},
        "segments": {"times": times, "segment_ids": SEGMENTS},
        "mask": {"times": times, "key_mask": MASK},
        "both": {"key_mask": MASK, "segment_ids": SEGMENTS},
    }
    seeds = itertools.count()
    for (_, marks), prior in itertools.product(places.items(), ("lyapunov", "riccati")):
        compare(exact, dtype, backend, next(seeds), marks, prior=prior)
    alone = {"times": times[:, : dist.get_world_size()]}  # one token a process
    compare(exact, dtype, backend, next(seeds), alone, length=dist.get_world_size(), prior="riccati")
    ahead = torch.tensor([0.5, 1.5])
    for options in (
        {"causal": False},
        {"causal": False, "prior": "riccati"},
        {"weight": "exponential", "rotate_values": False, "query_noise_in_bias": True},
        {"horizon": ahead, "gate": False},
    ):
        compare(exact, dtype, backend, next(seeds), places["segments"], **options)


def check_three():
    check_all_variants("exact")
    parts = [[[0.3, 0.1], [0.2, 0.2]], [[0.5, 0.0], [0.1, 0.3]], [[0.0, 0.7], [0.4, 0.3]], [[0.1, 0.9], [0.0, 0.2]]]
    noise = TimeDependentNoise(*torch.tensor(parts).double())
    compare(1e-11, torch.float64, "reference", 0, {}, noise=noise)
    check_bytes()


def test_ring_is_exact_in_float64():
    together(check_three, 3)


def check_bytes():
    """What a ring sends: blocks of keys and values in both directions, and their gradients, at least in float32.

    The Riccati prior adds two numbers a head in float64.
    """
    sent, operation = [], dist.P2POp

    def counted(kind, tensor, **options):
        sent.append(tensor.nbytes if kind is dist.isend else 0)
        return operation(kind, tensor, **options)

    dist.P2POp = counted
    processes, tokens, channels = dist.get_world_size(), 8, 2 * 8
    for prior, dtype, riccati_heads in (("lyapunov", torch.bfloat16, 0), ("riccati", torch.float32, 2)):
        sent.clear()
        inputs = {n: x.requires_grad_() for n, x in problem(0, batch=1, keys=8, modes=4, dtype=dtype).items()}
        ring_filter_attention(**inputs, prior=prior)[0, 0, 0].sum().backward()
        riccati = tokens * riccati_heads * 2 * 8
        block, gradients = (tokens * 2 * channels * size + riccati for size in (dtype.itemsize, 4))
        assert sum(sent) == 2 * (processes - 1) * block + processes * gradients
    dist.P2POp = operation


def expect(message, call):
    """All processes raise, so that none waits for another."""
    with pytest.raises(ValueError, match=message):
        call()


def check_bad_input():
    rank = dist.get_rank()
    good = problem(0, keys=6, modes=4, dtype=torch.float32)

    def call(number=6, **changed):
        inputs = {n: x[:, :, :number] if n in STATES else x for n, x in good.items()}
        return lambda: ring_filter_attention(**{**inputs, **changed})

    expect(r"length \[6, 5\] on the 2 processes, expected the same", call(6 - rank))
    expect("decay: got" if rank else "rank 1 were refused", call(decay=good["decay"] - rank))
    expect(r"times \['none', 'torch.float32 \[\]'\]", call(**({"times": torch.arange(6.0)} if rank else {})))
    half = (torch.bfloat16, torch.float16)[rank]
    expect(r"dtype \['torch.bfloat16', 'torch.float16'\]", call(**{n: good[n].to(half) for n in STATES}))
    expect(r"causal \[True, False\]", call(causal=not rank))
    expect(r"horizon \[False, True\]", call(horizon=good["decay"] if rank else None))
    expect("strictly increasing", call(times=torch.arange(6.0)))  # each is, the whole is not
    expect("shards pass none", call(times=torch.arange(6.0).requires_grad_()))
    expect(
        "expected 6, one for each",
        call(
            query=good["query"][:, :, :1].repeat(1, 1, 6, 1), key=good["key"][:, :, :5], value=good["value"][:, :, :5]
        ),
    )
    torn = torch.tensor([[0, 1] * 3] * 2)
    expect("together with prior='riccati'", call(segment_ids=torn, prior="riccati"))
    call(segment_ids=torn)()


def test_without_processes():
    for argument, call in (
        ("group", lambda: ring_filter_attention(**problem(0))),
        ("group", lambda: sequence_shard(torch.arange(4))),
        ("mesh", lambda: fully_sharded(small("m2-sc-rfa"))),
    ):
        with pytest.raises(ValueError, match=rf"{argument}: torch\.distributed is not initialised"):
            call()


def resident(name):
    """Kilobytes of this process by Linux: VmRSS now, VmHWM at most since it was reset."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def check_memory(folder):
    """Kilobytes by which a process grows in one pass over its share, with the prior that needs more."""
    inputs = problem(0, batch=1, keys=2**14 // dist.get_world_size(), modes=16, dtype=torch.float32)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    ring_filter_attention(**inputs, prior="riccati").sum().backward()
    Path(folder, f"{dist.get_world_size()}-{dist.get_rank()}").write_text(str(resident("VmHWM") - before))


@slow
def test_memory_of_a_process_falls_with_their_number(tmp_path):
    for number in (1, 2, 4):
        together(check_memory, number, str(tmp_path))
    peaks = {n: max(int(path.read_text()) for path in tmp_path.glob(f"{n}-*")) for n in (1, 2, 4)}
    assert peaks[2] < 0.85 * peaks[1], peaks  # besides its own a process holds the block that passes and the next one
    assert peaks[4] < 0.6 * peaks[1], peaks
