"""The tables of docs/recall.md, from the record in results/recall: `python docs/recall_record.py`."""

import re
from dataclasses import replace
from pathlib import Path

from provenance import made_by

from rfa.experiments import load_recall_recipe
from rfa.files import write_text_whole
from rfa.report.layout import Table, markdown, replace_between
from rfa.report.recall_tables import (
    accuracy_table,
    learning_table,
    lengths_of,
    overview_table,
    read_recall_results,
    tasks_of,
)

PAGE = Path(__file__).with_name("recall.md")
RECORD = Path(__file__).parents[1] / "results" / "recall"
RECIPE = Path(__file__).parents[1] / "recipes" / "recall.yaml"
_UNKNOWN = "Not run yet."


def tables(record: Path) -> dict[str, Table]:
    """The tables of the record by the names of their marks: two overviews, and two tables of each task."""
    results = read_recall_results(record)
    lengths = lengths_of(results)
    found = {"at the trained length": overview_table(results, lengths[0])}
    found["at the longest"] = overview_table(results, lengths[-1])
    for task in tasks_of(results):
        found[f"{task} accuracy"] = accuracy_table(results, task)
        found[f"{task} learning"] = learning_table(results, task)
    return found


def state(record: Path) -> str:
    """How many runs of the recipe are done, of which seeds, and what made them."""
    planned = load_recall_recipe(RECIPE).runs
    results = read_recall_results(record) if record.is_dir() else []
    if not results:
        return f"No run of {len(planned)} is done."
    seeds: dict[str, set[int]] = {}
    for result in results:
        seeds.setdefault(result["task"], set()).add(result["seed"])
    tasks: dict[str, list[str]] = {}
    for task, of in seeds.items():
        tasks.setdefault(f"{'seed' if len(of) == 1 else 'seeds'} {_listed(of)}", []).append(task)
    done = "; ".join(f"{which}: {', '.join(names)}" for which, names in tasks.items())
    made = made_by([result["environment"]] for result in results)
    return f"{len(results)} of {len(planned)} runs are done ({done}).\n\n{made}"


def _listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def written(page: str, record: Path = RECORD) -> str:
    """The page with the record's tables, each between its marks. A table without results says so.

    Raises:
        ValueError: for a page that lacks the marks of a table, or a damaged record.
    """
    texts = {mark: _UNKNOWN for mark in re.findall(r"<!-- (.+?): docs/recall_record.py -->", page)}
    if record.is_dir():
        tables_of = tables(record).items()
        texts |= {mark: markdown(replace(table, caption="", notes=())) for mark, table in tables_of}
    for mark, text in {**texts, "state": state(record)}.items():
        begin, end = f"<!-- {mark}: docs/recall_record.py -->", f"<!-- end of {mark} -->"
        page = replace_between(page, begin, end, f"\n{text.strip()}\n")
    return page


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
