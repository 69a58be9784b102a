"""A table and its three forms, Markdown, LaTeX (booktabs) and CSV, and the insertion of text into a page.

All text of a table is plain text, some of it from result files. In no form can it act as markup or as a formula.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

_MINUS, _DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
_LATEX = {letter: "\\" + letter for letter in "&%$#_{}"} | {
    _DASH: "--",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"\ensuremath{\pm}",
    _MINUS: r"\ensuremath{-}",
}
_MARKDOWN = {letter: "\\" + letter for letter in "\\`*_[]#|"}
_MARKDOWN |= {"<": "&lt;", ">": "&gt;", "&": "&amp;", "$": "&#36;", "~": "&#126;"}
_TO_LATEX, _TO_MARKDOWN = str.maketrans(_LATEX), str.maketrans(_MARKDOWN)
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # a spreadsheet reads text that begins so as a formula


@dataclass(frozen=True)
class NumberCell:
    """A number with the half-width of its interval, or both ends of an interval, and a remark."""

    value: float
    error: float | None = None  # half-width of an interval around it
    interval: tuple[float, float] | None = None  # lower and upper end of another interval
    digits: int = 2  # decimal places
    best: bool = False  # set in bold
    signed: bool = False  # with a plus sign if it is positive
    grouped: bool = False  # with commas between the thousands
    remark: str = ""  # in the report's own words

    def __str__(self) -> str:
        text = self._write(self.value)
        if self.error is not None:
            text += f" ± {self.error:{',' * self.grouped}.{self.digits}f}"
        if self.interval is not None:
            text += f" [{self._write(self.interval[0])}, {self._write(self.interval[1])}]"
        return f"{text} {self.remark}".rstrip()

    def _write(self, value: float) -> str:
        sign, comma = "+" * self.signed, "," * self.grouped
        return f"{value:{sign}{comma}.{self.digits}f}".replace("-", _MINUS)


Cell = NumberCell | str | None


def first_number(row: Sequence[Cell], column: int, missing: float = math.inf) -> float:
    """The number in a column of a row, by which rows are sorted."""
    cell = row[column]
    return cell.value if isinstance(cell, NumberCell) else missing


def with_best(rows: Sequence[Sequence[Cell]], columns: int | None = None) -> list[list[Cell]]:
    """Set the lowest number of each column in bold, if the column has at least two. Numbers are compared as printed.

    Only so many columns from the left are compared; None for all.
    """
    lowest: list[float | None] = []
    for column in list(zip(*rows, strict=True))[:columns]:
        printed = [_printed(cell) for cell in column if isinstance(cell, NumberCell)]
        lowest.append(min(printed) if len(printed) > 1 else None)

    def marked(cell: Cell, least: float | None) -> Cell:
        if isinstance(cell, NumberCell) and least is not None and _printed(cell) == least:
            return replace(cell, best=True)
        return cell

    return [[*map(marked, row, lowest), *row[len(lowest) :]] for row in rows]


def _printed(cell: NumberCell) -> float:
    return round(cell.value, cell.digits)


@dataclass(frozen=True)
class Table:
    """A table with its caption above and its notes below. Each row has a cell for each column."""

    name: str  # for file names and labels
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"rows: got one of {len(row)} cells, expected {len(self.columns)}: {row}")


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    """The page with `text` in place of what was between its marks. Raises `ValueError` for a page without them."""
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise ValueError(f"page: got one without {begin} and {end} in this order, expected both")
    return f"{before}{begin}{text}{end}{after}"


def pipe_table(rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table without a line end, of cells that are Markdown. The first rows are the head and the rule."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def markdown(table: Table, caption: str | None = None) -> str:
    """A Markdown table with the caption above and the notes below.

    A `caption` replaces the table's. It is Markdown and must not contain text from a result file.
    """

    def written(cell: Cell) -> str:
        if not isinstance(cell, NumberCell):
            return markdown_text(text_of(cell))
        return f"**{cell}**" if cell.best else str(cell)  # the brackets of an interval make no link

    rules = ["---" if aligned == "l" else "---:" for aligned in alignment(table)]
    rows = [map(markdown_text, table.columns), rules, *(map(written, row) for row in table.rows)]
    notes = [f"- {markdown_text(note)}" for note in table.notes]
    above = markdown_text(table.caption) if caption is None else caption
    return "\n".join([above, "", pipe_table(rows), *([""] if notes else []), *notes]) + "\n"


def markdown_text(text: str) -> str:
    """Plain text as Markdown, on one line."""
    return one_line(text).translate(_TO_MARKDOWN)


def _latex_text(text: str) -> str:
    return one_line(text).translate(_TO_LATEX)


def latex(table: Table) -> str:
    """A LaTeX table environment. It needs only the package booktabs."""

    def cell(of: Cell) -> str:
        text = _latex_text(text_of(of))
        return rf"\textbf{{{text}}}" if isinstance(of, NumberCell) and of.best else text

    body = [" & ".join(map(cell, row)) + r" \\" for row in table.rows]
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{_latex_text(table.caption)}}}",
            rf"\label{{tab:{table.name}}}",
            r"\small",
            rf"\begin{{tabular}}{{{''.join(alignment(table))}}}",
            r"\toprule",
            " & ".join(map(_latex_text, table.columns)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *(rf"\par\smallskip {{\footnotesize {_latex_text(note)}}}" for note in table.notes),
            r"\end{table}",
            "",
        ]
    )


def comma_separated(table: Table) -> str:
    """A CSV table of unrounded numbers. Half-widths, intervals and remarks have columns of their own.

    Text that a spreadsheet would read as a formula begins with an apostrophe.
    """
    columns: list[list[str]] = []
    for name, *cells in zip(table.columns, *table.rows, strict=True):
        columns.append([_no_formula(name), *map(_csv_text, cells)])
        numbers = [cell if isinstance(cell, NumberCell) else NumberCell(math.nan) for cell in cells]
        ends = [number.interval or (None, None) for number in numbers]
        parts: dict[str, list[Any]] = {"half-width": [number.error for number in numbers]}
        parts |= {"low": [low for low, _ in ends], "high": [high for _, high in ends]}
        parts["remark"] = [number.remark or None for number in numbers]
        for part, values in parts.items():
            if any(value is not None for value in values):
                columns.append([_no_formula(f"{name} {part}"), *map(_plain, values)])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(zip(*columns, strict=True))
    return out.getvalue()


def text_of(cell: Cell) -> str:
    """The text of a cell; a dash for a missing number."""
    return _DASH if cell is None else str(cell)


def _csv_text(cell: Cell) -> str:
    return _plain(cell.value) if isinstance(cell, NumberCell) else _no_formula(cell or "")


def _plain(value: str | float | None) -> str:
    """A number with all its digits; a remark as it is; nothing for None."""
    if value is None or isinstance(value, str):
        return value or ""
    return repr(float(value))


def _no_formula(text: str) -> str:
    text = one_line(text)
    return f"'{text}" if text.startswith(_FORMULA) else text


def alignment(table: Table) -> list[str]:
    """The alignment of each column: `l` (left) for text, `r` (right) for numbers."""
    texts = [any(isinstance(row[k], str) for row in table.rows) for k in range(len(table.columns))]
    return ["l" if text or k == 0 else "r" for k, text in enumerate(texts)]


def one_line(text: str) -> str:
    """The text on one line, without the control characters on which a terminal, an editor or TeX would act."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
