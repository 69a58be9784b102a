"""All measurements of the Triton backend on one GPU, in one command of nine and a half minutes.

    python benchmarks/gpu.py [--out FOLDER] [--limit SECONDS]
    python benchmarks/gpu.py --tiny          without a GPU: the same stages with small numbers, under the interpreter

Every stage is a process of its own with a limit, and appends its results to FOLDER/results.jsonl as they come. Values
and gradients, times beside SDPA, certified windows and training steps come in the first three minutes. Stages for which
no time is left are named and skipped.

On a machine that is lent by the tool `run`, which has no package registry: prepare here, in the root of the checkout,

    echo /.gpu_run/ >> .git/info/exclude; rm -rf .gpu_run
    python -m pip download -q --no-deps -d .gpu_run platformdirs beartype fla-core

and call `run` with carry [".gpu_run"], kind "nvidia-h100-x1", timeout_s 595 and the command

    set -o pipefail; for each in .gpu_run/*.whl; do python3 -m zipfile -e $each /tmp/site; done
    PYTHONPATH=/tmp/site:src python3 benchmarks/gpu.py --out $OUT --limit 570 2>&1 | tee $OUT/log.txt

For the first three minutes alone: timeout_s 215, --limit 190. Keep results.jsonl in benchmarks/results.
What comes next on a GPU is training: benchmarks/gpu_training.sh.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CHECKS: dict[str, dict[str, Any]] = {  # kinds of calls that are compared with float64
    "bf16": {},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "riccati": {"prior": "riccati"},
    "padding": {"present": True},
    "segments": {"segments": True},
    "fast head": {"decays": (0.5, 0.01, 3.0)},
    "irregular times": {"times": True},
    "riccati, irregular times": {"times": True, "prior": "riccati"},
    "exponential": {"weight": "exponential", "times": True, "dtype": "float32"},
    "both directions": {"causal": False, "times": True},
    "learned decay": {"learned": ("decay", "frequency")},
    "dot product": {"dot_product": True, "learned": ("decay", "slopes")},
}
PRESETS = ("b1-rope", "m2-sc-rfa", "x2-riccati-alibi")  # of training steps
STOPPED = "stopped at its limit"
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")


class Round(NamedTuple):
    """Stages that run side by side. What is timed runs alone.

    Fields:
        limit: seconds; fewer where fewer are left.
        stages: names and arguments.
        within: a program in which they run.
    """

    limit: float
    stages: list[list[str]]
    within: tuple[str, ...] = ()


PLAN = [
    # a kernel is compiled in 15 seconds: all kinds of calls side by side, before anything is timed
    Round(100, [["versions"], ["times", "warm"], ["windows", "warm"], ["step", "eager", "warm"],
                *(["check", name] for name in CHECKS)]),
    Round(35, [["times"]]),
    Round(25, [["windows"]]),
    Round(30, [["step", "eager"]]),
    Round(110, [["pairs", "warm"], ["fla", "warm"], ["small"],
                *(["step", "compiled", "warm", name] for name in PRESETS)]),
    Round(40, [["step", "graph"]]),
    Round(30, [["pairs"]]),
    Round(30, [["fla"]]),
    Round(90, [["small"]], SANITIZER),
    Round(60, [["huge"]]),  # takes most of the memory
    Round(90, [["step", "compiled"]]),
]  # fmt: skip
TESTS = Round(600, [["tests"]])


def main() -> int:
    """Run the plan; returns the number of stages that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of results")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds of all stages")
    parser.add_argument("--tiny", action="store_true", help="without a GPU, at tiny sizes, one stage after another")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results, began = options.out.absolute() / "results.jsonl", time.time()
    os.environ |= {"GPU_RESULTS": str(results), "GPU_BEGAN": str(began)}
    os.environ |= {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    if options.tiny:
        paths = [str(ROOT / "benchmarks" / "stand_in"), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {"GPU_TINY": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    until, failed, late = began + (1e6 if options.tiny else options.limit), 0, []
    for limit, stages, within in [*PLAN, Round(60, late), TESTS]:
        for together in [[stage] for stage in stages] if options.tiny else [list(stages)]:
            end = until if options.tiny else min(until, time.time() + limit)
            for stage, status in side_by_side(together, within, options.tiny, end):
                failed += status != 0
                if status == STOPPED and stages is not late:
                    late.append(stage)  # once more at the end: some of its kernels are compiled now
                line = json.dumps({"stage": " ".join([*within[:1], *stage]), "status": status})
                print(f"[{time.time() - began:5.0f}] {line}", flush=True)
                with results.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    return failed


def side_by_side(
    stages: list[list[str]], within: tuple[str, ...], tiny: bool, end: float
) -> list[tuple[list[str], int | str]]:
    """Start stages, and wait for them until a time; returns what did not end well, or has a program around it."""
    if within and shutil.which(within[0]) is None:
        return [(stage, f"{within[0]} is not installed" if not tiny else 0) for stage in stages]
    if end - time.time() < 5:
        return [(stage, "no time is left") for stage in stages]
    # a sanitizer sees no access beyond a tensor that is within a larger block of the allocator's cache
    environment = {**os.environ, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if within else {})}
    started = [
        subprocess.Popen([*within, sys.executable, *arguments(stage, tiny)], cwd=ROOT, env=environment,
                         start_new_session=True)
        for stage in stages
    ]  # fmt: skip
    found: list[tuple[list[str], int | str]] = []
    for stage, process in zip(stages, started, strict=True):
        status: int | str
        try:
            status = process.wait(max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = STOPPED
        if status != 0 or within:
            found.append((stage, status))
    return found


def arguments(stage: list[str], tiny: bool) -> list[str]:
    """Of Python, for a stage."""
    if stage != ["tests"]:
        return [str(ROOT / "benchmarks" / "gpu_stages.py"), *stage]
    few = ["-k", "repeatable"] if tiny else ["-n", "12"]
    return ["-m", "pytest", "tests/rfa/ops/triton", "-q", "--tb=short", "-p", "no:cacheprovider", *few]


if __name__ == "__main__":
    sys.exit(main())
