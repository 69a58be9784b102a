"""The machine code of the Triton kernels, read without a GPU: instructions for each pair, registers, spills, occupancy.

`cases.py` lists the calls, `launches.py` records what their host code launches, `count.py` compiles a launch for an
architecture and counts, `machine_code.py` finds the loops in the listing, `units.py` knows the instructions and the
multiprocessors. `flash.py` has plain attention, for comparison.
"""

from .cases import DTYPES, SCORES, TIMES, KernelCase, cases
from .count import as_json, run
from .units import ARCHITECTURES

__all__ = ["ARCHITECTURES", "DTYPES", "SCORES", "TIMES", "KernelCase", "as_json", "cases", "run"]
