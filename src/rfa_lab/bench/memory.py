"""Peak memory of the operator's forward and backward pass. Each contestant has a process of its own.

On a CPU it is the growth of the process's resident memory during the call. Inputs, libraries, threads and compiled
kernels are there before and do not count. On CUDA it is the growth of the memory of PyTorch's allocator.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .measurement import Setting, StateShape, Tick, summary
from .operator import OperatorProblem, StatesCase

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_WARM_UP = 128  # tokens


@dataclass(frozen=True)
class MemoryCase(StatesCase):
    """The memory of one preset at one shape."""

    benchmark = "memory"
    rounds = 2

    def described(self) -> dict[str, Any]:
        """The fields of every line."""
        return {"pass": "forward_backward", **super().described()}

    def measured(self, shared: OperatorProblem, tick: Tick) -> Iterator[dict[str, Any]]:
        """Bytes of both contestants, each in a process of its own."""
        growth = {}
        for name, contestant in (("rfa", "rfa"), ("peer", "sdpa")):
            growth[name] = self._in_a_process(contestant)
            tick()
        ratios = [growth["rfa"] / max(1, growth["peer"])]
        yield {"peer": "sdpa", "ratio": summary(ratios), "ratios": ratios, "bytes": growth}

    def _in_a_process(self, contestant: str) -> int:
        order = json.dumps([contestant, self.shape, self.preset, asdict(self.setting)])
        command = [sys.executable, "-m", __name__, order]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"memory: the process of {contestant} ended with status {done.returncode}: {last}")
        return int(done.stdout)


def growth(contestant: str, shape: StateShape, preset: str, setting: Setting) -> int:
    """The peak growth of this process in one forward and backward pass, in bytes."""
    for tried in (shape._replace(length=min(shape.length, _WARM_UP)), shape):
        problem = OperatorProblem(tried, preset, setting)
        run = _contestant_call(contestant, problem)
        before, peak = _memory_and_peak(setting.device)
        run()
    return peak() - before


def _contestant_call(contestant: str, problem: OperatorProblem) -> Callable[[], object]:
    if contestant == "rfa":
        return problem.gradients
    query, key, value = states = problem.states
    return lambda: torch.autograd.grad(
        F.scaled_dot_product_attention(query, key, value, is_causal=True), states, problem.grad
    )


def _memory_and_peak(device: str) -> tuple[int, Callable[[], int]]:
    """The memory in use now, and a function that returns the peak since this call, both in bytes."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated
    try:
        _RESET.write_text("5")  # resets the peak, if Linux permits it
        return _status("VmRSS"), lambda: _status("VmHWM")
    except OSError:
        return _high_water(), _high_water


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _high_water() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    contestant, shape, preset, options = json.loads(sys.argv[1])
    print(growth(contestant, StateShape(*shape), preset, Setting(**options)))
