"""Which tables belong to results, and which of the paper's tables stands beside them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from .layout import Table
from .retrieval_tables import accuracy_table, attention_table, probe_table
from .runs import Run, damping_of, is_sweep
from .summary import protocols, runs_table, setting
from .tables import BASELINES, difference_table, published_results, table1, table2, table3


class ListedTable(NamedTuple):
    """A table of a report: its name, and what makes it, or raises `MissingData` with a reason."""

    name: str
    make: Callable[[], Table]


def listed_tables(runs: Sequence[Run]) -> list[ListedTable]:
    """The tables that belong to these results, in their order on the page.

    Where three values of the damping b are there, they stand in table 2, and those set by the recipe only there; all
    others stand in table 3 where the recipe's name begins with table3 or the text is BabyLM's, else in table 1.
    Without runs: what the paper published.
    """
    published = published_results()
    if not runs:
        papers: dict[str, Callable[..., Table]] = {"table1": table1, "table2": table2, "table3": table3}
        return [_of_protocol("blocks", name, partial(make, runs, published), runs) for name, make in papers.items()]
    found: list[ListedTable] = []
    swept = is_sweep(runs)
    others = [run for run in runs if not swept or damping_of(run) is None or "damping" not in run["spec"]["model"]]
    for protocol in protocols(runs):
        makers: dict[str, Callable[[], Table]] = {}
        if any(run["label"] not in BASELINES for run in others) or not swept:
            of = "table3" if any(map(_is_babylm, runs)) else "table1"
            makers[of] = partial({"table1": table1, "table3": table3}[of], others, published, protocol)
        if swept:
            makers["table2"] = partial(table2, runs, published, protocol=protocol)
        makers["differences"] = partial(difference_table, runs, protocol=protocol)
        found += [_of_protocol(protocol, name, make, runs) for name, make in makers.items()]
    found += [ListedTable(f"probe-{kind}", partial(probe_table, runs, kind)) for kind in ("passkey", "repeat")]
    found.append(ListedTable("probe-accuracy", partial(accuracy_table, runs)))
    if any(run.get("attention_summary") for run in runs):
        found.append(ListedTable("attention", partial(attention_table, runs)))
    return [*found, ListedTable("runs", partial(runs_table, runs))]


def _is_babylm(run: Run) -> bool:
    return run["recipe"].startswith("table3") or run["spec"].get("data") == "babylm-2025"


def _of_protocol(protocol: str, of: str, make: Callable[[], Table], runs: Sequence[Run]) -> ListedTable:
    """The table of a protocol, with the protocol in its name and caption and the set-up in its notes."""
    name = f"{of}-{protocol}"

    def named() -> Table:
        table = make()
        aside = ("The paper's figures are of the protocol blocks.",) * (of != "differences" and protocol != "blocks")
        caption, here = f"{table.caption} Protocol {protocol}.", (setting(runs),) if runs else ()
        return replace(table, name=name, caption=caption, notes=(*here, *table.notes, *aside))

    return ListedTable(name, named)
