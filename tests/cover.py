"""Rows of options that meet in pairs, in the place of their product. `RFA_TESTS=all` gives the whole product."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest

ALL = os.environ.get("RFA_TESTS") == "all"
slow = pytest.mark.slow  # for `make test-all` alone


def some(values: Iterable[Any], count: int) -> list[Any]:
    """`count` of the values, evenly spaced with both ends among them; all of them in `make test-all`."""
    values = list(values)
    if ALL or count >= len(values):
        return values
    return [values[round(place * (len(values) - 1) / max(count - 1, 1))] for place in range(count)]


def cover(meeting: int = 2, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by rows in which any `meeting` options take all their combinations of values.

    Args:
        meeting: 2 for every pair of values, 1 for every single value, 3 for every triple.
        axes: the values of each argument of the test.
    """
    values = {name: list(choices) for name, choices in axes.items()}
    rows = list(itertools.product(*map(range, map(len, values.values())))) if ALL else _rows(values, meeting)
    shown = [tuple(choices[place] for choices, place in zip(values.values(), row, strict=True)) for row in rows]
    if len(values) == 1:
        shown = [row[0] for row in shown]
    return pytest.mark.parametrize(",".join(values), shown)


def _rows(values: dict[str, list[Any]], meeting: int) -> list[tuple[int, ...]]:
    """Greedy: each row begins with a combination that no row has yet, and takes what covers most of the others."""
    sizes = [len(choices) for choices in values.values()]
    meeting = min(meeting, len(sizes))
    open_ = {
        tuple(zip(places, chosen, strict=True))
        for places in itertools.combinations(range(len(sizes)), meeting)
        for chosen in itertools.product(*(range(sizes[place]) for place in places))
    }
    rows = []
    while open_:
        row = dict(min(open_))
        for place in sorted(set(range(len(sizes))) - row.keys()):
            covered = [
                sum(set(each) <= {**row, place: choice}.items() for each in open_ if (place, choice) in each)
                for choice in range(sizes[place])
            ]
            equal = [choice for choice, count in enumerate(covered) if count == max(covered)]
            row[place] = equal[len(rows) % len(equal)]  # among equals another one in each row
        open_ -= {each for each in open_ if set(each) <= row.items()}
        rows.append(tuple(row[place] for place in range(len(sizes))))
    return rows
