"""Speed and memory against PyTorch's attention: measured in turns, each after its correctness check.

How it reads: `suite.py` (what is measured, one case after another) -> `operator.py`, `step.py`, `decode.py` and
`memory.py` (a case: its check, its contestants) -> `timing.py` (turns and ratios), `checks.py` (errors against
float64), `bound.py` (the least time that the work can take here) -> `results.py` (JSON lines).
"""

from .results import append, read
from .setting import Setting
from .suite import WHAT, Case, cases, run

__all__ = ["WHAT", "Case", "Setting", "append", "cases", "read", "run"]
