"""The tables of docs/recall.md, from the record in results/recall: `python docs/recall_record.py`."""

from dataclasses import replace
from pathlib import Path

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


def written(page: str, record: Path = RECORD) -> str:
    """The page with the record's tables, each between its marks; as it is where there is no record.

    Raises:
        ValueError: for a page that lacks the marks of a table, or a damaged record.
    """
    if not record.is_dir():
        return page
    for mark, table in tables(record).items():
        text = markdown(replace(table, caption="", notes=()))
        begin, end = f"<!-- {mark}: docs/recall_record.py -->", f"<!-- end of {mark} -->"
        page = replace_between(page, begin, end, f"\n{text}\n")
    return page


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
