"""Everything for a machine with a GPU, in stages of at most nine minutes. `make gpu` runs it.

    python benchmarks/gpu.py                        every stage, one after another
    python benchmarks/gpu.py fuzz operator-bf16     these
    python benchmarks/gpu.py --list                 their names
    python benchmarks/gpu.py --tiny                 all of it without a GPU, at a tiny size

Results go to a folder of the commit in `--out`: a JSON file for each stage, written whole after each of its commands;
`bench.jsonl` with the lines of `rfa bench`; and what the commands said. A stage that is done at this commit is skipped
unless `--again` is given, which renames what was there. A stage that was stopped, by Ctrl-C or because its time was
over, keeps what it has and goes on with the same command. The exit status is 1 if a stage failed; the others still run.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_stages import ROOT, Part, Place, Stage, stages
from kept import Kept, is_known

import rfa.version
from rfa.version import short_commit, source_commit

LIMIT = 540.0  # seconds of a stage
GRACE = 20.0  # of these, for a command that is stopped to save
TAIL = 12  # lines of what a command said last, in the stage's file
STAND_IN = ROOT / "benchmarks" / "stand_in"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run stages; returns the exit status."""
    options = parser().parse_args(arguments)
    commit = source_commit(Path(rfa.version.__file__).parent)
    name = "unknown" if commit is None else short_commit(commit)
    folder = options.out.absolute() / f"{name}{'-tiny' if options.tiny else ''}"
    data = str(Path(options.data).absolute()) if options.data and Path(options.data).exists() else options.data
    made = stages(Place(folder, options.tiny, data))
    if options.list:
        print("\n".join(f"{stage.name:15} {stage.about}" for stage in made))
        return 0
    if unknown := sorted(set(options.stages) - {stage.name for stage in made}):
        print(f"gpu: got {', '.join(unknown)}, expected some of {', '.join(s.name for s in made)}", file=sys.stderr)
        return 2
    environment = surroundings(options.tiny)
    machine = described(environment)
    if machine["device"] == "cpu":
        print("gpu: there is no CUDA device; --tiny (TINY=1) runs every stage without one", file=sys.stderr)
        return 2
    print(f"gpu: {machine['device']}, results in {folder}", flush=True)
    if not is_known(commit):
        print("gpu: the sources differ from their commit, so that nothing counts as done", flush=True)
    found: dict[str, str] = {}
    for stage in made:
        if options.stages and stage.name not in options.stages:
            continue
        try:
            found[stage.name] = Run(stage, folder, machine, environment, options.limit, options.again).run()
        except KeyboardInterrupt:
            print(f"gpu: stopped; go on with: make gpu STAGE={stage.name}", file=sys.stderr)
            return 130
    for name, status in found.items():
        print(f"gpu: {name}: {status}" + (f"; go on with: make gpu STAGE={name}" if status == "unfinished" else ""))
    return 1 if "failed" in found.values() else 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("stages", nargs="*", metavar="STAGE", help="all by default")
    made.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of results")
    made.add_argument("--data", help="the text of the recipe, if not its own: a folder with the novels")
    made.add_argument("--again", action="store_true", help="run what is done, too")
    made.add_argument("--tiny", action="store_true", help="without a GPU: its stand-in, and Triton's interpreter")
    made.add_argument("--limit", type=float, default=LIMIT, help="seconds of a stage")
    made.add_argument("--list", action="store_true", help="name the stages, and run nothing")
    return made


def surroundings(tiny: bool) -> dict[str, str]:
    """The environment of the commands."""
    folders = [*([STAND_IN] if tiny else []), ROOT / "benchmarks"]
    before = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join([*map(str, folders), *([before] if before else [])])
    given = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "160"}
    given.pop("TRITON_INTERPRET", None)
    return given | ({"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"} if tiny else {})


def described(environment: dict[str, str]) -> dict[str, Any]:
    """The device, its driver and the versions, as a process of its own sees them: a context on the GPU takes memory."""
    code = "import json; from rfa.environment import environment; print(json.dumps(environment()))"
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if told.returncode:
        raise SystemExit(f"gpu: rfa cannot be imported: {(told.stderr.strip() or 'no message').splitlines()[-1]}")
    machine = json.loads(told.stdout.splitlines()[-1])
    if (smi := shutil.which("nvidia-smi")) is not None:
        asked = [smi, "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
        machine["nvidia-smi"] = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return machine


class Run:
    """One stage: what it has done, and what is left."""

    def __init__(
        self,
        stage: Stage,
        folder: Path,
        machine: dict[str, Any],
        environment: dict[str, str],
        limit: float = LIMIT,
        again: bool = False,
    ):
        self.stage, self.folder, self.environment = stage, folder, environment
        fields = {"stage": stage.name, "about": stage.about, "status": "unfinished", "parts": {}}
        for path in (path for part in stage.parts for path in part.keeps):
            if path.exists() and (again or (path.is_file() and not is_known(machine["commit"]))):
                path.rename(path.with_name(f"{path.name}.before-{time.time_ns() // 10**9}"))
        self.kept = Kept(folder / f"{stage.name}.json", {"device": machine["device"]}, again, **fields)
        self.kept["machine"] = machine
        self.until, self.limit = time.monotonic() + limit - GRACE, limit

    def run(self) -> str:
        """Run the commands that are left; returns "done", "unfinished" or "failed"."""
        parts = self.kept["parts"]
        if self.kept["status"] == "done":
            print(f"gpu: {self.stage.name}: done before at this commit", flush=True)
            return "done"
        begun = 0
        for part in self.stage.parts:
            if parts.get(part.name, {}).get("status") == "done":
                continue
            if begun and time.monotonic() >= self.until:
                break
            print(f"gpu: {self.stage.name}: {part.name} ... ", end="", flush=True)
            parts[part.name] = self._command(part, first=not begun)
            begun += 1
            self._write()
            print(f"{parts[part.name]['status']}, {parts[part.name]['seconds']:.0f} s", flush=True)
            if parts[part.name]["status"] == "failed":
                print("\n".join(f"    {line}" for line in parts[part.name]["said"][-3:]), flush=True)
            if parts[part.name].pop("stopped", False):
                raise KeyboardInterrupt
        return self._write()

    def _write(self) -> str:
        found = [self.kept["parts"].get(part.name, {}).get("status", "unfinished") for part in self.stage.parts]
        status = next((each for each in ("failed", "unfinished") if each in found), "done")
        self.kept |= {"status": status, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        self.kept.write()
        return status

    def _command(self, part: Part, first: bool) -> dict[str, Any]:
        log = self.folder / "logs" / f"{self.stage.name}-{part.name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        began, stopped, late = time.monotonic(), False, False
        command = [sys.executable, *part.arguments]
        with log.open("w", encoding="utf-8") as said:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self.environment, **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(max(1.0, self.until - began))
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
                stopped, late = isinstance(reason, KeyboardInterrupt), True
                _end(process)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        status = "done" if process.returncode == 0 else "failed"
        if late:
            status = "unfinished" if stopped or part.keeps or not first else "failed"
            lines += [f"stopped after {time.monotonic() - began:.0f} s"] if status == "failed" else []
        elif part.keeps and status == "done" and any(line.startswith("stopped after") for line in lines):
            status = "unfinished"
        result = {"status": status, "command": part.arguments, "returncode": process.returncode}
        result |= {"seconds": round(time.monotonic() - began, 1), "said": lines}
        return {**result, **({"stopped": True} if stopped else {})}


def _end(process: subprocess.Popen) -> None:
    """End a command: first as Ctrl-C does, so that it can save."""
    for number, seconds in ((signal.SIGINT, GRACE - 5), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(main())
