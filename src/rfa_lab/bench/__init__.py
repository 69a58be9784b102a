"""Speed and memory compared with PyTorch's attention, measured in turns, each after a correctness check.

`suite.py` lists the cases and measures them, `results.py` has the file of results. `operator.py`, `decode.py`,
`memory.py` and `models.py` each have one kind of case: its check and its contestants. `peers.py` has the peers of the
operator. `measurement.py` has the setting, the tolerances and the timing in turns. `bound.py` computes the shortest
possible time of the work on this machine.
"""

from .measurement import LARGEST, THREADS, Case, Setting
from .peers import PEERS
from .results import append, read
from .suite import WHAT, cases, run

__all__ = ["LARGEST", "PEERS", "THREADS", "WHAT", "Case", "Setting", "append", "cases", "read", "run"]
