"""The tables that belong to results, in their order on the page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from .difference_tables import difference_table
from .layout import Table
from .retrieval_tables import accuracy_table, attention_table, probe_table
from .runs import Run, damping_of, is_sweep
from .summary import protocols, runs_table, setting
from .tables import BASELINES, published_results, published_table, table1, table2, table3


class ListedTable(NamedTuple):
    """A table of a report: its name, and a function that makes it or raises `MissingData` with the reason."""

    name: str
    make: Callable[[], Table]


def listed_tables(runs: Sequence[Run]) -> list[ListedTable]:
    """The tables that belong to these results, in their order on the page.

    Results with at least three values of the damping b have table 2. Runs whose damping the recipe sets appear only
    there. All other runs are in table 3 if the recipe's name begins with table3 or the text is BabyLM's, and otherwise
    in table 1. The paper's published numbers are in tables of their own, because its training length is another.
    """
    published = published_results()
    if not runs:
        return [_published(name, published) for name in ("table1", "table2", "table3")]
    found: list[ListedTable] = []
    swept = is_sweep(runs)
    others = [run for run in runs if not swept or damping_of(run) is None or "damping" not in run["spec"]["model"]]
    beside: list[str] = []
    for protocol in protocols(runs):
        makers: dict[str, Callable[[], Table]] = {}
        if any(run["label"] not in BASELINES for run in others) or not swept:
            of = "table3" if any(map(_is_babylm, runs)) else "table1"
            makers[of] = partial({"table1": table1, "table3": table3}[of], others, published, protocol)
        if swept:
            makers["table2"] = partial(table2, runs, published, protocol=protocol)
        beside = list(makers)
        makers["differences"] = partial(difference_table, runs, protocol=protocol)
        found += [_of_protocol(protocol, name, make, runs) for name, make in makers.items()]
    found += [_published(name, published) for name in beside]
    found += [ListedTable(f"probe-{kind}", partial(probe_table, runs, kind)) for kind in ("passkey", "repeat")]
    found.append(ListedTable("probe-accuracy", partial(accuracy_table, runs)))
    if any(run.get("attention_summary") for run in runs):
        found.append(ListedTable("attention", partial(attention_table, runs)))
    return [*found, ListedTable("runs", partial(runs_table, runs))]


def _is_babylm(run: Run) -> bool:
    return run["recipe"].startswith("table3") or run["spec"].get("data") == "babylm-2025"


def _published(name: str, published: Mapping[str, Any]) -> ListedTable:
    return ListedTable(f"paper-{name}", partial(published_table, name, published))


def _of_protocol(protocol: str, of: str, make: Callable[[], Table], runs: Sequence[Run]) -> ListedTable:
    """The table of one protocol. Name and caption contain the protocol, and the notes contain the runs' setting."""
    name = f"{of}-{protocol}"

    def named() -> Table:
        table = make()
        caption = f"{table.caption} Protocol {protocol}."
        return replace(table, name=name, caption=caption, notes=(setting(runs), *table.notes))

    return ListedTable(name, named)
