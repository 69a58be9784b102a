"""The commits and the machines that made a record, for the pages that show it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


def made_by(environments: Iterable[Mapping[str, Any]]) -> str:
    """How many runs each commit and each machine made.

    Args:
        environments: of the results, each where its training began.
    """
    commits, machines = Counter[str](), Counter[str]()
    for environment in environments:
        commits[(environment.get("commit") or "not recorded")[:12]] += 1
        machines[environment["machine"]] += 1
    return f"Runs by commit: {_listed(commits)}. By machine: {_listed(machines)}."


def _listed(counts: Counter[str]) -> str:
    return "; ".join(f"{name} {count}" for name, count in counts.most_common())
