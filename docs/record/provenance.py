"""The commits and the machines that made a record, for the pages that show it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rfa.version import short_commit


def made_by(runs: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """How many runs each commit and each machine made.

    Args:
        runs: the environments of each run, from the start of its training to its evaluation.
    """
    commits, machines = Counter[str](), Counter[str]()
    for environments in runs:
        commits[" then ".join(dict.fromkeys(short_commit(one.get("commit")) for one in environments))] += 1
        machines[" then ".join(dict.fromkeys(one["machine"] for one in environments))] += 1
    return f"Runs by commit: {_listed(commits)}.\nBy machine: {_listed(machines)}."


def _listed(counts: Counter[str]) -> str:
    return "; ".join(f"{name} {count}" for name, count in counts.most_common())
