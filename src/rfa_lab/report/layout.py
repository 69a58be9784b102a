"""A table and its three forms, Markdown, LaTeX (booktabs) and CSV, and the insertion of text into a page.

All text of a table is plain text, some of it from result files. In no form can it act as markup or as a formula.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_MINUS, _DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
_LATEX = {
    _DASH: "--",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"\ensuremath{\pm}",
    _MINUS: r"\ensuremath{-}",
    **{letter: "\\" + letter for letter in "&%$#_{}"},
}
_MARKDOWN = {
    **{letter: "\\" + letter for letter in "\\`*_[]#|"},
    **{letter: f"&{name};" for letter, name in (("<", "lt"), (">", "gt"), ("&", "amp"), ("$", "#36"), ("~", "#126"))},
}
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # a spreadsheet reads text that begins so as a formula


@dataclass(frozen=True)
class NumberCell:
    """A number with the half-width of its interval, or both ends of an interval, and a remark.

    Args:
        value: the number.
        error: half-width of an interval around it.
        interval: lower and upper end of another interval.
        remark: a word or two about the number, in the report's own words.
        digits: number of decimal places.
        best: whether to set it in bold.
        signed: whether a positive number has a plus sign.
        grouped: whether commas separate the thousands.
    """

    value: float
    error: float | None = None
    interval: tuple[float, float] | None = None
    digits: int = 2
    best: bool = False
    signed: bool = False
    grouped: bool = False
    remark: str = ""

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


@dataclass(frozen=True)
class Table:
    """A table with its caption and notes.

    Args:
        name: a short name, for file names and labels.
        caption: description of the numbers.
        columns: headings of the columns.
        rows: cells of each row, one for each column; None for a missing number.
        notes: remarks below the table, for example on missing runs.
    """

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"rows: got one of {len(row)} cells, expected {len(self.columns)}: {row}")


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    """The page with `text` between its marks `begin` and `end`, in place of what was there.

    Raises:
        ValueError: for a page without both marks in this order.
    """
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise ValueError(f"page: got one without {begin} and {end} in this order, expected both")
    return f"{before}{begin}{text}{end}{after}"


def markdown(table: Table, caption: str | None = None) -> str:
    """A Markdown table with the caption above and the notes below.

    Args:
        table: all its text is plain text.
        caption: replaces the table's caption. It is Markdown and must not contain text from a result file.
    """

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def cell(of: Cell) -> str:
        if not isinstance(of, NumberCell):
            return _escaped(text_of(of), _MARKDOWN)
        return f"**{of}**" if of.best else str(of)  # the brackets of an interval make no link

    rules = ["---" if aligned == "l" else "---:" for aligned in alignment(table)]
    lines = [line(_escaped(column, _MARKDOWN) for column in table.columns), line(rules)]
    lines += [line(map(cell, row)) for row in table.rows]
    notes = [f"- {_escaped(note, _MARKDOWN)}" for note in table.notes]
    above = _escaped(table.caption, _MARKDOWN) if caption is None else caption
    return "\n".join([above, "", *lines, *([""] if notes else []), *notes]) + "\n"


def markdown_text(text: str) -> str:
    """Plain text as Markdown, on one line."""
    return _escaped(text, _MARKDOWN)


def latex(table: Table) -> str:
    """A LaTeX table environment. It needs only the package booktabs."""

    def cell(of: Cell) -> str:
        text = _escaped(text_of(of), _LATEX)
        return rf"\textbf{{{text}}}" if isinstance(of, NumberCell) and of.best else text

    body = [" & ".join(cell(each) for each in row) + r" \\" for row in table.rows]
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{_escaped(table.caption, _LATEX)}}}",
            rf"\label{{tab:{table.name}}}",
            r"\small",
            rf"\begin{{tabular}}{{{''.join(alignment(table))}}}",
            r"\toprule",
            " & ".join(_escaped(column, _LATEX) for column in table.columns) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *(rf"\par\smallskip {{\footnotesize {_escaped(note, _LATEX)}}}" for note in table.notes),
            r"\end{table}",
            "",
        ]
    )


def comma_separated(table: Table) -> str:
    """A CSV table of unrounded numbers. Half-widths, intervals and remarks have columns of their own.

    Text that a spreadsheet would read as a formula begins with an apostrophe.
    """
    columns: list[str] = []
    rows: list[list[str]] = [[] for _ in table.rows]
    for index, name in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        numbers = [cell for cell in cells if isinstance(cell, NumberCell)]
        parts = [(name, [_csv_text(cell) for cell in cells])]
        if any(number.error is not None for number in numbers):
            errors = [_float(cell.error) if isinstance(cell, NumberCell) else "" for cell in cells]
            parts.append((f"{name} half-width", errors))
        if any(number.interval is not None for number in numbers):
            ends = [cell.interval if isinstance(cell, NumberCell) else None for cell in cells]
            for side, end in enumerate(("low", "high")):
                parts.append((f"{name} {end}", [_float(each[side]) if each else "" for each in ends]))
        if any(number.remark for number in numbers):
            parts.append((f"{name} remark", [cell.remark if isinstance(cell, NumberCell) else "" for cell in cells]))
        for head, values in parts:
            columns.append(_no_formula(head))
            for row, value in zip(rows, values, strict=True):
                row.append(value)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()


def text_of(cell: Cell) -> str:
    """The text of a cell; a dash for a missing number."""
    return _DASH if cell is None else str(cell)


def _csv_text(cell: Cell) -> str:
    return _float(cell.value) if isinstance(cell, NumberCell) else _no_formula(cell or "")


def _no_formula(text: str) -> str:
    text = _one_line(text)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _float(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def alignment(table: Table) -> list[str]:
    """The alignment of each column: `l` (left) for text, `r` (right) for numbers."""
    texts = [any(isinstance(row[k], str) for row in table.rows) for k in range(len(table.columns))]
    return ["l" if text or k == 0 else "r" for k, text in enumerate(texts)]


def _escaped(text: str, signs: Mapping[str, str]) -> str:
    return "".join(signs.get(letter, letter) for letter in _one_line(text))


def _one_line(text: str) -> str:
    """The text on one line, without the control characters on which a terminal, an editor or TeX would act."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
