"""Count the instructions of one call of the operator. Other processes cannot disturb this count.

If timing noise hides a change of a few percent, compare two counts. The count includes the whole call, with PyTorch's
operators around the kernel. It excludes imports, inputs and a first call. The call runs on one thread under `valgrind
--tool=callgrind`, whose headers must be installed (Debian: `apt install valgrind`).

    python benchmarks/instructions.py [--shape 1 2 512 64 --contestant rfa|sdpa --pass forward|forward_backward]

The command appends a line to benchmarks/results/instructions.jsonl and prints the functions with the most instructions.
Valgrind does not support AVX-512. On a machine with AVX-512 the kernels are compiled for AVX2 (`--march`), and the
count is of that code.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

SWITCH = """
#include <valgrind/callgrind.h>
extern "C" void start() { CALLGRIND_START_INSTRUMENTATION; }
extern "C" void stop() { CALLGRIND_STOP_INSTRUMENTATION; }
"""
RESULTS = Path(__file__).parent / "results" / "instructions.jsonl"


def main() -> None:
    """Count under valgrind, print the result and append it to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=[1, 2, 512, 64], metavar=("B", "H", "T", "C"))
    parser.add_argument("--contestant", choices=["rfa", "sdpa"], default="rfa")
    parser.add_argument("--pass", dest="pass_", choices=["forward", "forward_backward"], default="forward_backward")
    parser.add_argument("--preset", default="m2-sc-rfa")
    parser.add_argument("--march", help="what the kernels are compiled for, if not for this machine")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--counted", help=argparse.SUPPRESS)  # used under valgrind: the library that starts the count
    options = parser.parse_args()
    if options.counted:
        run(options, ctypes.CDLL(options.counted))
        return
    with tempfile.TemporaryDirectory() as folder:
        count(options, Path(folder))


def run(options: argparse.Namespace, switch: ctypes.CDLL) -> None:
    """The program under valgrind: two calls, of which the second one is counted."""
    import torch

    from rfa_lab.bench.measurement import Setting, StateShape
    from rfa_lab.bench.operator import OperatorProblem
    from rfa_lab.bench.peers import dot_products

    torch.set_num_threads(1)
    setting = Setting(backend="cpu")
    problem = OperatorProblem(StateShape(*options.shape), options.preset, setting)
    backward = options.pass_ == "forward_backward"
    if options.contestant == "rfa":
        call = problem.gradients if backward else problem.estimate
    else:

        def call():
            attended = dot_products(problem.states)
            return torch.autograd.grad(attended, problem.states, problem.grad) if backward else attended

    with torch.set_grad_enabled(backward):
        call()
        switch.start()
        call()
        switch.stop()


def count(options: argparse.Namespace, folder: Path) -> None:
    """Check correctness, then run this script under valgrind."""
    from rfa.environment import environment
    from rfa_lab.bench import append
    from rfa_lab.bench.bound import EXPONENTIAL, LOGARITHM, attention_work
    from rfa_lab.bench.measurement import Setting, StateShape
    from rfa_lab.bench.operator import OperatorProblem
    from rfa_lab.bench.suite import processor

    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    march = options.march or ("x86-64-v3" if "avx512f" in flags else None)
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    if march:  # a compiler that replaces -march=native
        wrapper = folder / "compiler"
        wrapper.write_text(f'#!/bin/bash\nexec {compiler} "${{@/-march=native/-march={march}}}"\n')
        wrapper.chmod(0o755)
        os.environ |= {"CXX": str(wrapper), "RFA_CACHE": str(folder / "cache")}
    problem = OperatorProblem(StateShape(*options.shape), options.preset, Setting(backend="cpu"))
    check = problem.check()  # this also compiles the kernels, which must not happen under valgrind
    if not check["passed"]:
        sys.exit(f"instructions: the check failed: {check}")

    (folder / "switch.cpp").write_text(SWITCH)
    library, report = folder / "switch.so", folder / "callgrind.out"
    subprocess.run([compiler, "-shared", "-fPIC", folder / "switch.cpp", "-o", library], check=True)
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
    command += [f"--callgrind-out-file={report}", sys.executable, *sys.argv, "--counted", str(library)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"instructions: valgrind ended with status {done.returncode}\n{done.stderr[-2000:]}")
    total = int(re.search(r"Collected : (\d+)", done.stderr)[1])

    logarithm = problem.logarithm and options.contestant == "rfa"
    work = attention_work(problem.shape, options.pass_ == "forward_backward", logarithm, 4)
    lanes = 8 if march or "avx2" in flags else 4  # float32 numbers in a register
    pairs = problem.shape.batch * problem.shape.heads * problem.shape.length * (problem.shape.length + 1) / 2
    products = work.flops / 2 / lanes  # one fused multiply-add for all numbers in a register
    functions = (work.exponentials * EXPONENTIAL + work.logarithms * LOGARITHM) / lanes
    line = {
        "benchmark": "instructions",
        "contestant": options.contestant,
        "pass": options.pass_,
        "preset": options.preset,
        **problem.shape._asdict(),
        "march": march or "native",
        "check": check,
        "instructions": total,
        "per_pair": total / pairs,
        "products_per_pair": products / pairs,
        "functions_per_pair": functions / pairs,
        "share": (products + functions) / total,
        "processor": processor("cpu"),
        "environment": environment(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    append(options.out, line)
    print(json.dumps(line))
    listing = subprocess.run(["callgrind_annotate", str(report)], capture_output=True, text=True).stdout
    rows = [row[:140] for row in listing.splitlines() if re.match(r"\s*[\d,]+ \(", row)]
    print("\n".join(rows[:20]))


if __name__ == "__main__":
    main()
