"""Every number and figure of README.md and of the two pages of evidence: `python docs/record/evidence.py`.

They come from result files alone. The six rows are the answers for users; `evidence_record.py` has all claims.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import evidence_record
from evidence_answers import Answer, errors, filters, pooled
from evidence_figures import FIGURES

from rfa.files import write_text_whole
from rfa.forecasting.style import save
from rfa_lab.report.layout import replace_between

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "evidence.md")
_BEGIN, _END = "<!-- answers: docs/record/evidence.py -->", "<!-- end of answers -->"
_RFA, _GATE = "x2-riccati-alibi no-innovation", "c4-fox rope-normalised"


class Row(NamedTuple):
    """A claim for users: its words, what is told of the number, seeds, whether it was asked before, and the answer."""

    claim: str
    number: str
    seeds: int
    asked: str
    of: Callable[[], Answer]


ROWS = (
    Row(
        "`RobustFilter`, given the model and without tuning, has at most 1.05 times the error of the best tuned filter",
        "{} times",
        20,
        "before",
        partial(filters, 1.05, ("WoLF", "variational")),
    ),
    Row(
        "`rfa` predicts code better than `forget-gate`, the best baseline, within the trained length",
        "{}",
        3,
        "before *",
        partial(pooled, _RFA, _GATE, 256, "matched", "context"),
    ),
    Row(
        "The same at eight times the trained length",
        "{}",
        3,
        "before *",
        partial(pooled, _RFA, _GATE, 2048, "matched", "context"),
    ),
    Row(
        "The paper's model, `sc-rfa`, predicts novels better than `rope` within the trained length",
        "{}",
        3,
        "before",
        partial(pooled, "m2-sc-rfa", "b1-rope", 128, "blocks", "novels-small"),
    ),
    Row(
        "A network with `rfa` forecasts irregular series better than a forget gate whose values turn",
        "{} times the squared error",
        3,
        "after",
        partial(errors, "oscillator", "x2 no innovation", "c9"),
    ),
    Row(
        "The robust weight predicts series with wrong readings better than a dot product",
        "{} times the squared error",
        3,
        "after",
        partial(errors, "contamination", "student-t", "dot product"),
    ),
)


def table() -> str:
    """The six rows in Markdown."""
    lines = ["| claim | difference | seeds | asked | answer |", "| --- | --- | --- | --- | --- |"]
    for row in ROWS:
        found = row.of()
        number = row.number.format(found.number.partition(";")[0].partition(",")[0])
        lines.append(f"| {row.claim} | {number} | {row.seeds} | {row.asked} | {found.answer} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """A page with the rows between its marks. Raises `ValueError` for a page without them."""
    return replace_between(page, _BEGIN, _END, f"\n{table()}\n")


if __name__ == "__main__":
    for page in PAGES:
        write_text_whole(page, written(page.read_text(encoding="utf-8")))
    evidence_record.write()
    for name, draw in FIGURES.items():
        save(draw(), ROOT / "docs" / "figures" / f"{name}.png")
