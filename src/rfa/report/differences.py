"""Paired differences of log perplexity between runs of the same seeds, on the books that all of them have."""

from collections.abc import Sequence
from typing import NamedTuple

from .lacking import Lacking
from .runs import Run
from .statistics import Books, Difference, paired_difference

Pairs = Sequence[tuple[Run, Run]]


class Compared(NamedTuple):
    """A difference, None where there is none, and what is to be said of it, empty where nothing is."""

    difference: Difference | None
    problem: str


def pairs_of(runs: Sequence[Run], baseline: Sequence[Run]) -> Pairs:
    """Runs of one label beside the baseline's of the same seed."""
    against = {run["seed"]: run for run in baseline}
    return [(run, against[run["seed"]]) for run in runs if run["seed"] in against]


def compare(pairs: Pairs, length: int, protocol: str, level: float = 0.95, resamples: int = 10_000) -> Compared:
    """`log perplexity(run) - log perplexity(baseline)` at a context length, by `paired_difference`."""
    sides = [[_books(pair[side], protocol, length) for pair in pairs] for side in (0, 1)]
    every = [each for side in sides for each in side]
    common, known = set.intersection(*map(set, every)), set.union(*map(set, every))
    if not common:
        return Compared(None, "no losses by book" if not known else "no book in common")
    kept = [[{book: each[book] for book in common} for each in side] for side in sides]
    try:
        found = paired_difference(*kept, level=level, resamples=resamples)
    except Lacking as error:
        return Compared(None, str(error))
    if known - common:
        return Compared(found, f"without {', '.join(sorted(known - common))}, not in every run")
    return Compared(found, "one book, no interval" if found.low is None else "")


def _books(run: Run, protocol: str, length: int) -> Books:
    books = ((run.get("evaluations") or {}).get(protocol) or {}).get("books") or {}
    return {book: tuple(of[str(length)]) for book, of in books.items() if str(length) in of}
