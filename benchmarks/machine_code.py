"""Count the machine instructions of the GPU kernels for each pair of a query and a key. No GPU is needed.

    python benchmarks/machine_code.py --arch sm_90 sm_100 --json F
    python benchmarks/machine_code.py --dtype bfloat16 --channels 64 --times uniform --only forward key

It compiles every kernel of the Triton backend as it is launched, and plain attention beside it, and reads the loops
over pairs. It prints instructions by unit, registers, spills, shared memory, and programs a multiprocessor. Cycles are
estimates. A kernel takes some three seconds.
"""

import argparse
import sys
from pathlib import Path

from gpu_code import ARCHITECTURES, DTYPES, SCORES, TIMES, as_json, cases, run
from gpu_code.tables import instruction_tables
from rich.console import Console

from rfa.files import check_writable, write_text_whole
from rfa_lab.cli.console import progress_bars


def main() -> None:
    """Count what the options name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=["sm_90"], help=f"some of {', '.join(ARCHITECTURES)}")
    parser.add_argument("--dtype", nargs="+", default=[], help=f"{', '.join(DTYPES)}; both by default")
    parser.add_argument("--channels", nargs="+", type=int, default=[], help="of a head; 64 and 128 by default")
    parser.add_argument("--times", nargs="+", default=[], help=f"{', '.join(TIMES)}; both by default")
    parser.add_argument("--score", nargs="+", default=[], help=f"some of {', '.join(SCORES)}; student_t by default")
    parser.add_argument("--only", nargs="+", default=[], help="kernels by the beginnings of their names")
    parser.add_argument("--json", type=Path, help="file for the list of all kernels with all counts")
    given = parser.parse_args()
    try:
        chosen = cases(given.arch, given.dtype, given.channels, given.times, given.score)
        if given.json is not None:
            check_writable("--json", given.json)
        with progress_bars() as bar:
            lines = list(run(chosen, given.only, lambda stage, *far: bar(stage.name, *far, key="bench")))
    except ValueError as error:
        parser.exit(2, f"machine_code: {error}\n")
    Console(width=None if sys.stdout.isatty() else 160).print(instruction_tables(lines))
    if given.json is not None:
        write_text_whole(given.json, as_json(lines))


if __name__ == "__main__":
    main()
