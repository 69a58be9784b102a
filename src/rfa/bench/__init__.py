"""Speed and memory against PyTorch's attention: measured in turns, each after its correctness check.

Read `suite.py` first (what is measured, case by case, and the result file), then `operator.py`, `step.py`, `decode.py`
and `memory.py` (each case: its check and its contestants), then `measurement.py` (where it runs, the tolerances, timing
in turns) and `bound.py` (the least time that the work can take on this machine).
"""

from .measurement import Setting
from .suite import WHAT, Case, append, cases, read, run

__all__ = ["WHAT", "Case", "Setting", "append", "cases", "read", "run"]
