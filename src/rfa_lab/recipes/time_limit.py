"""A limit of time for all runs of a call: it stops between two parts of the work, or after a step of training."""

import re
import time

from rfa.progress import Stage, StageProgress

_UNITS = {"h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)
_LONGEST = 1e9  # seconds, thirty years


class TimeIsUp(Exception):
    """The time given is over, at a place where nothing has to be saved."""


class TimeLimit:
    """The time until which a call may go on.

    Args:
        seconds: from now on; None for no limit.
        progress: called with every stage, as if there were no limit.
        saves: whether training is saved when its time is over. If not, a run that was begun begins anew.
    """

    def __init__(self, seconds: float | None, progress: StageProgress | None, saves: bool = True):
        self.until = None if seconds is None else time.monotonic() + seconds
        self._saves = saves
        self._progress = progress or (lambda *_: None)
        self._seconds = seconds
        self._where, self._evaluating = "before the first run", False
        self._steps: set[tuple[str, int]] = set()  # of training, made by this call

    def report(self, stage: Stage, done: int, total: int) -> None:
        """Report progress.

        Raises:
            TimeIsUp: if the time is over, except in training that saves first.
        """
        self._progress(stage, done, total)
        if not self._saves and stage.run:
            anew = f"in {stage.run}, which begins anew (a run has to fit into the time given)"
            self._where = f"before {stage.run}" if stage.name == "runs" else anew
        elif stage.name == "training":
            self._where, self._evaluating = f"at step {done:,} of {total:,} of {stage.run}", False
            if "validated" not in (stage.metrics or {}):
                self._steps.add((stage.run, done))
            return
        elif stage.run:
            self._where, self._evaluating = f"in {stage.run}: {stage.name}", stage.name != "text"
        if stage == Stage("runs") and done == total:
            return
        if self.until is not None and time.monotonic() >= self.until:
            raise TimeIsUp

    def where(self) -> str:
        """Where the call stopped, in words; how little it did, if it made at most one step."""
        if not self._saves:
            return self._where
        given = f"{self._seconds or 0:g} s"
        if len(self._steps) == 1 and self._where.startswith("at step"):
            return f"{self._where} ({given} are less than one step takes from the start: one step was made and saved)"
        if self._evaluating:
            anew = "this part of the evaluation begins anew and has to fit into the time; those before it are kept"
            return f"{self._where} ({anew})"
        if not self._steps:
            return f"{self._where} ({given} were over before a step of training; nothing is lost, give more time)"
        return self._where


def seconds_of(duration: str) -> float:
    """The seconds of a duration such as `9m`, `90s` or `1h30m`.

    Raises:
        ValueError: for another text, or no time at all.
    """
    found = _DURATION.fullmatch(duration)
    seconds = (
        sum(int(n) * unit for n, unit in zip(found.groups(default="0"), _UNITS.values(), strict=True)) if found else 0
    )
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"for: got {duration!r:.40}, expected a duration such as 9m, 90s or 1h30m")
    return float(seconds)
