"""The processes of a run: whether a launcher started all, which is the first, and what is said when one is lost.

They are apart from `train.py`, which knows neither launchers nor the messages of gloo.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

# what accelerate reads
_NUMBERS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def is_first_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for a launch: it is the first, or alone."""
    return all(environment.get(name, "0") == "0" for name in _RANKS)


def check_launch(world_size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `ValueError` where a launcher's processes do not work together, or where it started too few.

    `accelerate launch --cpu --num_processes 2` starts one process unless it is given hosts for mpirun. It sets address
    and port of a first process, but no number of processes. A batch job may set both for other programs, so the message
    says how one process is started there.
    """
    launched = int(environment.get("WORLD_SIZE", 1))
    if launched != world_size:
        raise ValueError(f"processes: {launched} were launched, {world_size} work together")
    by_accelerate = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys()
    if by_accelerate and not any(name in environment for name in _NUMBERS):
        raise ValueError(
            "processes: accelerate launch --cpu --num_processes N started one process, expected "
            "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N, or torchrun, or "
            "--mpirun_hostfile; where only one process is wanted, env -u MASTER_PORT before the command"
        )


@contextmanager
def lost_process_as_connection_error(world_size: int, begun: bool = True) -> Iterator[None]:
    """Raise `ConnectionError`, with what to do, where another process of the run has ended; `begun`: it can be resumed.

    Its group finds that within a second if the connection breaks. A process that only hangs is found after half an
    hour, the Trainer's `ddp_timeout`.
    """
    try:
        yield
    except RuntimeError as error:
        if world_size > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            reason = str(error).partition("] ")[2].partition(". ")[0] or type(error).__name__
            mend = "--resume with as many goes on from the last checkpoint" if begun else "start again, with as many"
            raise ConnectionError(
                f"processes: another one of the {world_size} of this run has ended ({reason}); {mend}"
            ) from error
        raise
