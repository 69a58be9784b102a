"""Speed and memory compared with PyTorch's attention, measured in turns, each after a correctness check.

`suite.py` lists the cases and writes the result file. `operator.py`, `decode.py`, `memory.py` and `models.py` each have
one kind of case: its check and its contestants. `peers.py` has the peers of the operator. `measurement.py` has the
setting, the tolerances and the timing in turns. `bound.py` computes the shortest possible time of the work on this
machine. `instructions/` reads the machine code of GPU kernels.
"""

from .measurement import LARGEST, THREADS, Case, Setting
from .peers import PEERS
from .suite import WHAT, append, cases, read, run

__all__ = ["LARGEST", "PEERS", "THREADS", "WHAT", "Case", "Setting", "append", "cases", "read", "run"]
