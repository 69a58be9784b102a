"""The cells of a CSV file: its encoding, header and separator; texts as times and as numbers; units, bad rows."""

import io
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.io.common import get_handle

from rfa.checks import require

from .dates import WrongTimes, first_row, read_times

SEPARATORS = {"tab": "\t", "\\t": "\t", "space": r"\s+"}
_HEADER_SEPARATORS = (",", ";", "\t", "|", r"\s+")  # separators that the header tells
_ROW_SEPARATORS = (";", "\t", "|", ",", r"\s+")  # the first one in the first row: a comma may be a decimal one
_BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_SEPARATOR_HINT = "; --separator tells where it ends"
_SEARCHED_LINES = 200  # lines, for the header's
_MAX_EXTRA_CELLS = 1000  # cells that a row may have beyond the header's
SKIP = "--skip-bad-rows leaves such rows out"
UNNAMED = "Unnamed: "  # and its number, a column without a name
SIGNS = ".,'_ \u00a0\u202f\u2019"  # of thousands, spaces and a quote among them
_LARGEST = 1e30  # larger ones are marks of missing readings, such as 9.97e36
_MAX_BAD_ROWS = 0.5  # of the readings of a column that may be bad rows: where it is more, the column is none
_PARTS = "year", "month", "day", "hour", "minute", "second"
_MIDNIGHT = r"[T ]0?0:00(:00)?(\.0+)?$"  # of a date that a spreadsheet has written
_CENTURY = 69  # two digits of a year from which on they are of the 20th century, as in POSIX


def read_text(path: Path, encoding: str | None) -> tuple[str, list[str]]:
    """The text of a file, and what is said of its encoding."""
    try:
        with get_handle(str(path), "rb", compression="infer", is_text=False) as opened:
            content = opened.handle.read()
    except FileNotFoundError:
        raise ValueError(f"file: {path} does not exist, expected a CSV file") from None
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"file: {path} cannot be read as CSV: {str(error).strip().splitlines()[0]}") from None
    known = encoding or next((name for mark, name in _BYTE_ORDER_MARKS.items() if content.startswith(mark)), "utf-8")
    tried = [known] if encoding or known != "utf-8" else ["utf-8", "cp1252"]
    for name in tried:
        try:
            text = content.decode(name).removeprefix("\ufeff")
        except LookupError:
            raise ValueError(f"encoding: got {encoding!r}, expected one that Python knows, such as cp1252") from None
        except UnicodeError:
            continue
        if "\0" in text:
            break
        return text, [] if encoding or name == "utf-8" else [f"encoding: {name} (--encoding chooses another)"]
    raise ValueError(f"file: {path} cannot be read as CSV: its text is not in {' or '.join(tried)} (--encoding)")


class Header(NamedTuple):
    """What is known of a file before its rows are read.

    Fields:
        names: of the columns, as they stand there.
        separator: of cells.
        lines: of the file, without a line's end; empty where one is left out.
        own: whether the names are the first of these lines, not a comment or numbers.
    """

    names: list[str]
    separator: str
    lines: list[str]
    own: bool


def read_header(path: Path, text: str, times: list[str], table_format: Any, notes: list[str]) -> Header:
    """The header, by the first separator with which it has the columns of times, which the notes say.

    With `--comment` the names may stand in a comment. With `--no-header` they are 1, 2, ...

    Raises:
        ValueError: unless the file has a header with those columns.
    """
    sign, given, lines = table_format.comment, table_format.separator, re.split(r"\r\n|\r|\n", text)
    lines[: table_format.skip_rows] = [""] * min(table_format.skip_rows, len(lines))
    comments = [line.lstrip() for line in lines if sign and line.lstrip().startswith(sign)]
    lines = ["" if sign and line.lstrip().startswith(sign) else line for line in lines]
    heads = [head for comment in comments for head in (comment, comment.lstrip(str(sign)))]
    numbered, rows = table_format.no_header, "\n".join(lines)
    told = (SEPARATORS.get(given, given),) if given is not None else _ROW_SEPARATORS if numbered else _HEADER_SEPARATORS
    for separator in told:
        first = _names(rows, separator, sign)
        if separator == r"\s+" and first and re.fullmatch(r"\W+", first[0]):
            first = []  # the sign of a comment is no column
        if separator == r"\s+" and given is None and any(re.search("[,;\t|]", name) for name in first):
            continue
        found = [(first, True), *((_names(head, separator), False) for head in heads)]
        for names, own in [([str(k + 1) for k in range(len(first))], False)] if numbered else found:
            if {*times} <= {*names} and (len(names) > len(times) or given is not None):
                if separator != "," and given is None:
                    words = {"\t": "tab", r"\s+": "space"}.get(separator, repr(separator))
                    by = "first row" if numbered else "header"
                    notes.append(f"separator: {words}, by the {by} (--separator chooses another)")
                return Header(names, separator, lines, own)
    separator = told[0] if given is not None else ","
    names = _names(rows, separator, sign)
    if not names:
        raise ValueError(f"file: {path} cannot be read as CSV: it has no rows, expected a header")
    names = [str(k + 1) for k in range(len(names))] if numbered else names
    if absent := [name for name in times if name not in names]:
        hint = "" if numbered else _header_hint(re.split(r"\r\n|\r|\n", text), table_format.skip_rows, names, times)
        raise ValueError(f"time: got {absent[0]!r}, expected a column of {path}: {', '.join(names)}{hint}")
    return Header(names, separator, lines, not numbered)


def _names(text: str, separator: str, comment: str | None = None) -> list[str]:
    """The cells of the first row of a text, without spaces around them; columns without one are called as by pandas."""
    options: dict[str, Any] = {"dtype": str, "sep": separator, "skipinitialspace": True, "keep_default_na": False}
    with suppress(pd.errors.ParserError, pd.errors.EmptyDataError):
        row = pd.read_csv(io.StringIO(text), header=None, nrows=1, comment=comment, **options).iloc[0]
        return [name.strip() or f"{UNNAMED}{place}" for place, name in enumerate(row.fillna("").astype(str))]
    return []


def _header_hint(lines: list[str], skipped: int, names: list[str], times: list[str]) -> str:
    """A hint at the option that finds the header."""
    for place, line in enumerate(lines[:_SEARCHED_LINES]):
        if not all(name in line for name in times):
            continue
        bare, row = line.lstrip(line[0]), f"; row {place + 1} has it"
        if not line[0].isalnum() and any({*times} <= {*_names(bare, sign)} for sign in _HEADER_SEPARATORS):
            return f"{row} behind a sign, --comment {line[0]!r} reads it"
        if any({*times} <= {*_names(line, sign)} for sign in _HEADER_SEPARATORS):
            after = place != skipped and any(lines[:place])
            return f"{row}, --skip-rows {place} leaves out what stands before" if after else _SEPARATOR_HINT
    if pd.to_numeric(pd.Series(names, dtype=str), errors="coerce").notna().any():
        return "; in a file without a header --no-header names them 1, 2, ..."
    return _SEPARATOR_HINT if len(names) == 1 else ""


def read_cells(path: Path, header: Header, table_format: Any) -> tuple[pd.DataFrame, "pd.Series[Any]"]:
    """The cells as texts, and which rows have more of them than the header. The index has their lines.

    Raises:
        ValueError: for no rows, a quote without an end, and such rows unless bad ones are left out.
    """
    text, names, sign = "\n".join(header.lines), header.names, header.separator
    widest = max(len(line.split()) if sign == r"\s+" else line.count(sign) + 1 for line in header.lines)
    options: dict[str, Any] = {"dtype": str, "sep": sign, "comment": table_format.comment, "skipinitialspace": True}
    options["names"] = range(max(len(names), min(widest, len(names) + _MAX_EXTRA_CELLS)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # pandas would shift or cut off cells
            table = pd.read_csv(io.StringIO(text), header=None, index_col=False, skip_blank_lines=False, **options)
    except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError) as error:
        odd = [place for place, line in enumerate(header.lines, 1) if line.count('"') % 2]
        quote = f"got a quote in row {odd[-1]} of {path} without an end, expected quotes in pairs" if odd else ""
        said = quote or f"{path} cannot be read as CSV: {str(error).strip().splitlines()[0]}"
        raise ValueError(f"file: {said}") from None
    if '"' in text:  # cells of several lines
        breaks = sum(table[place].str.count("\n").fillna(0) for place in table if table[place].notna().any())
        table.index = (pd.Series(breaks, table.index).cumsum().shift(fill_value=0) + table.index).astype(int)
    table = table.set_axis(table.index + 1).dropna(how="all").iloc[int(header.own) :]
    if not len(table):
        raise ValueError(f"file: {path} has no rows, expected at least one")
    extra = table.iloc[:, len(names) :].apply(lambda cells: cells.str.strip().fillna("") != "")
    long = extra.any(axis=1).astype(bool)
    if long.any() and not table_format.skip_bad_rows:
        count = len(names) + int(np.flatnonzero(extra.loc[long.idxmax()])[-1]) + 1
        expected = f"{len(names)} as in its header, {', '.join(names):.80}"
        ways = f"--separator tells where they end, --skip-rows what stands before the header, {SKIP}"
        raise ValueError(f"file: got {count} cells in row {long.idxmax()} of {path}, expected {expected}; {ways}")
    return table.iloc[:, : len(names)].set_axis(names, axis=1), long


def joined_times(table: pd.DataFrame, times: list[str], date_format: str | None, notes: list[str]) -> "pd.Series[Any]":
    """The times as a column of texts, from several a date and its clock time, or a year, a month, a day ...

    Raises:
        ValueError: where the year is not the first of such columns.
    """
    if len(times) == 1:
        return table[times[0]]
    cells = table[times].apply(lambda column: column.str.strip())
    cells = cells.replace(r"^(\d+)\.0*$", r"\1", regex=True)
    whole = cells.apply(lambda column: column.str.fullmatch(r"\d+").fillna(False).astype(bool))
    if len(times) == len(_PARTS):
        cells[times[-1]] = cells[times[-1]].str.replace(r"^(\d\.)", r"0\1", regex=True)
        whole[times[-1]] |= cells[times[-1]].str.fullmatch(r"\d\d\.\d+").fillna(False).astype(bool)
    numbers = (whole.mean() > 0.5).to_numpy() & (date_format is None)  # in a row of units there are none
    widths = cells.where(whole).map(len, na_action="ignore").max()
    padded, name = cells.apply(lambda column: column.str.zfill(2)), " ".join(times)
    date, clock = cells[times[0]].str.replace(_MIDNIGHT, "", regex=True), padded[times[1:]]
    if numbers.all() and (widths.iloc[0] == 4 or (len(times) > 2 and widths.iloc[0] <= 2)):
        order = widths.iloc[0] == 4 or (widths.iloc[1:3] <= 2).all()
        require(order, "time", name, f"columns in this order: {', '.join(_PARTS)}; --date-format reads others")
        notes.append(f"times: {name!r} were read as {', '.join(_PARTS[: len(times)])} (--date-format reads others)")
        late = pd.to_numeric(date, errors="coerce") >= _CENTURY
        year = date.where(date.str.len() > 2, pd.Series(np.where(late, "19", "20"), date.index) + date.str.zfill(2))
        date, clock = year.str.cat(padded[times[1:3]], sep="-"), padded[times[3:]]
    elif not numbers[1:].all():
        return date.str.cat(cells[times[1:]], sep=" ").rename(name)
    if not clock.shape[1]:
        return date.rename(name)
    hour = clock.iloc[:, 0]
    if clock.shape[1] == 1:  # 5 for 05:00; 530 and 1730, or 53000 and 173000
        width = int(widths[clock.columns[0]])
        hour = hour + ":00" if width <= 2 else hour.str.zfill(width + width % 2)
        hour = hour.str.replace(r"(\d\d)(?=\d)", r"\1:", regex=True)
    else:
        hour = hour.str.cat(clock.iloc[:, 1:], sep=":")
    return date.str.cat(hour, sep=" ").rename(name)


_HOUR_24 = r"^(.*[T ])24(:00(?::00(?:[.,]0+)?)?)((?: ?UTC|Z|[+-]\d\d:?\d\d)?)$"


def day_ends(column: "pd.Series[Any]") -> tuple["pd.Series[Any]", "pd.Series[Any]"]:
    """The times with 24:00 as 00:00, and which ones were: they are the next day's."""
    late = column.str.fullmatch(_HOUR_24).fillna(False).astype(bool)
    if not late.any():
        return column, late
    return column.where(~late, column.str.replace(_HOUR_24, r"\g<1>00\2\3", regex=True)), late


_UNIT = r"[^\W\d_]\S*|[%‰°$€£¥]\S*"
_CURRENCY = r"[A-Z]{0,3}[$€£¥]|[A-Z]{3}(?=\s)"
_WITH_UNIT = rf"((?:{_CURRENCY})?)\s*([+-]?[\d.,' \u00a0\u202f\u2019]*\d[.,]?(?:[eE][+-]?\d+)?)\s*((?:{_UNIT})?)"


def without_unit(column: "pd.Series[Any]", missing: Sequence[str], notes: list[str]) -> "pd.Series[Any]":
    """The cells without the unit that all of their numbers have; as they are where some have another one, or none."""
    cells = column.str.strip()
    cells = cells[cells.notna() & ~cells.isin(missing)]
    first = next((found for cell in cells if (found := re.search(rf"^{_WITH_UNIT}$", cell))), None)
    if first is None or not first[1] + first[3]:
        return column
    parts = cells.str.extract(rf"^{_WITH_UNIT}$")
    parts = parts[parts[1].notna()]
    units = parts[[0, 2]].drop_duplicates()
    if len(units) != 1:
        return column
    unit = "".join(units.iloc[0])
    notes.append(f"values: the unit {unit!r} in the cells of {column.name!r} was left out")
    return column.where(~column.index.isin(parts.index), parts[1].reindex(column.index))


def is_reading(times: list[str], first: "pd.Series[Any]") -> bool:
    """Whether the names of the times are times themselves: numbers, or written as those of the first row."""
    names, cells = (pd.Series(each, dtype=str).fillna("") for each in (times, first[times].to_numpy()))
    alike = (_text_shape(names).to_numpy() == _text_shape(cells).to_numpy()) & names.str.contains(r"\d").to_numpy()
    return bool((alike | pd.to_numeric(names, errors="coerce").notna().to_numpy()).all())


def _text_shape(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Texts with one 9 for digits and one A for letters in a row."""
    return column.str.replace(r"\d+", "9", regex=True).str.replace(r"[^\W\d_]+", "A", regex=True)


def times_of_rows(
    stamps: "pd.Series[Any]", path: Path, decimal: str, form: Any, by: "pd.Series[Any] | None"
) -> tuple["pd.Series[Any]", str]:
    """The times of the rows that have one, and what they were taken for. `by` has the sensor of each.

    Where bad rows are left out, those with the most common shape are read first, then others that can be read beside.
    """
    of_times = decimal if stamps.str.contains(decimal, regex=False).any() else "."

    def read(some: "pd.Series[Any]") -> tuple["pd.Series[Any]", str]:
        plain = _plain_numbers(some, of_times, form.thousands if form.time_unit else None)
        stamped = form.time_unit or form.epoch
        if form.date_format or (not stamped and pd.to_numeric(plain, errors="coerce").isna().any()):
            plain = some  # a date's own signs stay
        plain, late = day_ends(plain.str.strip())
        labels = None if by is None else by[plain.index]
        times, note = read_times(plain, path, form, labels)
        return times + pd.to_timedelta(late.astype(int), "D") if late.any() else times, note

    try:
        return read(stamps)
    except WrongTimes as error:
        fault, known = error, stamps.index[:0]
    if not form.skip_bad_rows and len(fault.rows) <= len(stamps) / 2:
        raise ValueError(f"{fault}; {SKIP}")
    found, shapes = None, _text_shape(stamps.dropna())
    for shape in shapes.value_counts().index:
        more = shapes.index[shapes == shape]
        while len(more):
            try:
                found = read(stamps[known.union(more)])
                known = known.union(more)
                break
            except WrongTimes as error:  # some rows of this shape, such as 0000-00-00, or all of them
                more = more.difference(error.rows if more.isin(error.rows).any() else more)
    if form.skip_bad_rows:
        if found is None:
            raise fault
        return found
    if fault.rows[0] in known:  # it is another row that makes this one none
        row, usual = stamps.index.difference(known)[0], stamps[known[0]]
        raise ValueError(f"time: got {stamps[row]!r} in row {row} of {path}, expected one like {usual!r}; {SKIP}")
    raise ValueError(f"{fault}; {SKIP}")


def decimal_of(cells: dict[str, "pd.Series[Any]"], table_format: Any, notes: list[str]) -> str:
    """A comma where no number has a point, and the commas of some cannot be thousands; otherwise a point."""
    written = pd.concat([*cells.values()]).dropna()
    commas = written[written.str.contains(",", regex=False)]
    known = table_format.thousands is not None or not len(commas) or bool(written.str.contains(r"\d\.\d").any())
    if known or not commas.str.strip().str.fullmatch(r"[+-]?\d*,\d+([eE][+-]?\d+)?").all():
        return "."
    if commas.str.strip().str.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}").all():
        return "."  # nobody can tell: refused, with both options
    notes.append("numbers: with a decimal comma (--decimal chooses another)")
    return ","


def _plain_numbers(column: "pd.Series[Any]", decimal: str, thousands: str | None) -> "pd.Series[Any]":
    """Cells with the signs of Python's numbers. One with its signs elsewhere stays text."""
    column = column.str.strip()
    if thousands is not None:
        sign, point = re.escape(thousands), re.escape(decimal)
        grouped = column.str.fullmatch(rf"[+-]?\d{{1,4}}({sign}\d{{2,4}})*{sign}\d{{3,4}}({point}\d*)?")
        column = column.where(grouped != True, column.str.replace(thousands, "", regex=False))  # noqa: E712 - or NA
    return column.str.translate(str.maketrans(decimal + ".", "." + decimal))


def read_numbers(column: "pd.Series[Any]", path: Path, decimal: str, table_format: Any) -> "pd.Series[Any]":
    """The values of a column, NaN where none was read; without bad rows if those are left out."""
    marks = pd.Series(["", *table_format.missing], dtype=str)
    numbers = pd.to_numeric(_plain_numbers(column, decimal, table_format.thousands), errors="coerce")
    missing = column.isna() | column.str.strip().isin(marks)
    missing |= numbers.isin(pd.to_numeric(marks, errors="coerce").dropna())
    wrong = ~missing & (numbers.isna() | (numbers.abs() > _LARGEST))
    signs = wrong & column.str.fullmatch(rf"\s*[+-]?\d*([{SIGNS}]\d+)+\s*").fillna(False).astype(bool)
    left_out = table_format.skip_bad_rows and wrong.sum() <= _MAX_BAD_ROWS * (~missing).sum() and not signs.any()
    if wrong.any() and not left_out:
        row = first_row(signs if table_format.skip_bad_rows and signs.any() else wrong)
        expected = f"a number up to {_LARGEST:g}, or an empty cell where none was read"
        ways = f"--missing names other marks, --values columns, {SKIP}"
        ways = "--decimal or --thousands reads such signs" if signs[row] else ways
        said = f"values: got {column.loc[row]!r} in row {row} of {path}, expected {expected}"
        raise ValueError(f"{said}; {ways} ({column.name})")
    return numbers.astype(np.float64).mask(missing)[~wrong]
