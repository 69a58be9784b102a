"""The memory of a process in docs/scaling.md: `torchrun --nproc-per-node 2 docs/scaling_memory.py`, on a CPU.

Each process says by how much it grows in one forward and backward pass over its shard of a sequence of 32,768 tokens,
with 2 heads of 32 channels in float32 and the Lyapunov prior.
"""

import gc
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from rfa.ops.problem import Prior
from rfa.parallel import ring_filter_attention

LENGTH, HEADS, CHANNELS = 2**15, 2, 32


def peak_of(call: Callable[[], object]) -> int:
    """Bytes by which the process grows at most; Linux counts them."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _kilobytes("VmRSS")
    call()
    return 1024 * (_kilobytes("VmHWM") - before)


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def one_pass(length: int, prior: Prior = "lyapunov") -> None:
    """Forward and backward over this process's share of `length` tokens."""
    own = length // dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    states = torch.randn(3, 1, HEADS, own, CHANNELS, generator=generator).unbind()
    small, one = torch.full((HEADS,), 0.1), torch.ones(HEADS)
    of_heads = dict.fromkeys(("decay", "process_noise", "key_noise", "query_noise", "noise_floor"), small)
    of_heads |= {"robustness": one, "inverse_temperature": one}
    of_heads["frequency"] = torch.linspace(0.01, 1, CHANNELS // 2).repeat(HEADS, 1)
    given = {name: x.clone().requires_grad_() for name, x in of_heads.items()}
    ring_filter_attention(*(x.clone().requires_grad_() for x in states), **given, prior=prior).sum().backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    peak = peak_of(lambda: one_pass(LENGTH))
    print(f"{dist.get_world_size()} processes, rank {dist.get_rank()}: {peak / 1e6:.0f} MB")
    dist.destroy_process_group()
