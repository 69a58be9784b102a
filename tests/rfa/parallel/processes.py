"""Starts the processes of tests: one interpreter imports the libraries once for all of them, and forks."""

import atexit
import datetime
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

_started: list[subprocess.Popen] = []


def together(function, number: int, *arguments: str, seconds: float = 240) -> None:
    """Call a function of a test's module in `number` gloo processes of one thread; each must end without an error."""
    if not _started:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "parallel.processes"]
        pipe = subprocess.PIPE
        server = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        _started.append(server)
        atexit.register(_end)
    server = _started[0]
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        print(json.dumps([function.__module__, function.__name__, number, folder, arguments]), file=server.stdin)
        server.stdin.flush()
        ready, _, _ = select.select([server.stdout], [], [], seconds)
        status = server.stdout.readline().strip() if ready else f"no end within {seconds} s"
        if status != "0":
            _end()  # what is left of this test must not disturb the next one
        assert status == "0", f"{status} {said.read_text()[-6000:] if said.exists() else ''}"


def _end() -> None:
    for server in _started:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
    _started.clear()


def member(function, rank: int, number: int, folder: str, arguments: list[str]) -> None:
    with open(Path(folder) / "said", "a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=number,
        timeout=datetime.timedelta(seconds=120),
    )
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def run(module: str, name: str, number: int, folder: str, arguments: list[str]) -> int:
    """The exit status of the worst process."""
    function = getattr(importlib.import_module(module), name)
    context = multiprocessing.get_context("fork")
    given = [(function, rank, number, folder, arguments) for rank in range(number)]
    processes = [context.Process(target=member, args=each, daemon=True) for each in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for line in sys.stdin:
        print(run(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
