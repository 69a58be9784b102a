"""Starts the processes of a test: one interpreter imports the libraries once, and forks."""

import datetime
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


def together(function, number: int, *arguments: str, seconds: float = 240) -> None:
    """Call a function of a test's module in `number` gloo processes of one thread; each must end without an error."""
    command = [sys.executable, "-m", "parallel.processes", f"{function.__module__}:{function.__name__}", str(number)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]


def member(function, rank: int, number: int, store: str, arguments: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=number, timeout=datetime.timedelta(seconds=120)
    )
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    module, name = sys.argv[1].split(":")
    function, number = getattr(importlib.import_module(module), name), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        of_member = [(function, rank, number, str(Path(folder) / "store"), sys.argv[3:]) for rank in range(number)]
        processes = [context.Process(target=member, args=given) for given in of_member]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
