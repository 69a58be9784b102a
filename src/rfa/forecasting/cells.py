"""The cells of a CSV file, as texts: its encoding, its header, its separator, and the lines on which its rows begin."""

import io
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.io.common import get_handle

SEPARATORS = {"tab": "\t", "\\t": "\t", "space": r"\s+"}
_TOLD = (",", ";", "\t", "|", r"\s+")  # separators that the header tells
_WITHOUT_HEADER = (";", "\t", "|", ",", r"\s+")  # the first one in the first row: a comma may be a decimal one
_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_TOLD_BY = "; --separator tells where it ends"
_SEARCHED = 200  # lines, for the header's
_LONGER = 1000  # cells that a row may have beyond the header's
SKIP = "--skip-bad-rows leaves such rows out"
UNNAMED = "Unnamed: "  # and its number, a column without a name


def read_text(path: Path, encoding: str | None) -> tuple[str, list[str]]:
    """The text of a file, and what is said of its encoding."""
    try:
        with get_handle(str(path), "rb", compression="infer", is_text=False) as opened:
            content = opened.handle.read()
    except FileNotFoundError:
        raise ValueError(f"file: {path} does not exist, expected a CSV file") from None
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"file: {path} cannot be read as CSV: {str(error).strip().splitlines()[0]}") from None
    known = encoding or next((name for mark, name in _MARKS.items() if content.startswith(mark)), "utf-8")
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
    told = (SEPARATORS.get(given, given),) if given is not None else _WITHOUT_HEADER if numbered else _TOLD
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
        hint = "" if numbered else _way(re.split(r"\r\n|\r|\n", text), table_format.skip_rows, names, times)
        raise ValueError(f"time: got {absent[0]!r}, expected a column of {path}: {', '.join(names)}{hint}")
    return Header(names, separator, lines, not numbered)


def _names(text: str, separator: str, comment: str | None = None) -> list[str]:
    """The cells of the first row of a text, without spaces around them; columns without one are called as by pandas."""
    options: dict[str, Any] = {"dtype": str, "sep": separator, "skipinitialspace": True, "keep_default_na": False}
    with suppress(pd.errors.ParserError, pd.errors.EmptyDataError):
        row = pd.read_csv(io.StringIO(text), header=None, nrows=1, comment=comment, **options).iloc[0]
        return [name.strip() or f"{UNNAMED}{place}" for place, name in enumerate(row.fillna("").astype(str))]
    return []


def _way(lines: list[str], skipped: int, names: list[str], times: list[str]) -> str:
    """A hint at the option that finds the header."""
    for place, line in enumerate(lines[:_SEARCHED]):
        if not all(name in line for name in times):
            continue
        if not line[0].isalnum() and any({*times} <= {*_names(line.lstrip(line[0]), sign)} for sign in _TOLD):
            return f"; row {place + 1} has it behind a sign, --comment {line[0]!r} reads it"
        if any({*times} <= {*_names(line, sign)} for sign in _TOLD):
            after = place != skipped and any(lines[:place])
            return f"; row {place + 1} has it, --skip-rows {place} leaves out what stands before" if after else _TOLD_BY
    if pd.to_numeric(pd.Series(names, dtype=str), errors="coerce").notna().any():
        return "; in a file without a header --no-header names them 1, 2, ..."
    return _TOLD_BY if len(names) == 1 else ""


def read_cells(path: Path, header: Header, table_format: Any) -> tuple[pd.DataFrame, "pd.Series[Any]"]:
    """The cells as texts, and which rows have more of them than the header. The index has their lines.

    Raises:
        ValueError: for no rows, a quote without an end, and such rows unless bad ones are left out.
    """
    text, names, sign = "\n".join(header.lines), header.names, header.separator
    widest = max(len(line.split()) if sign == r"\s+" else line.count(sign) + 1 for line in header.lines)
    options: dict[str, Any] = {"dtype": str, "sep": sign, "comment": table_format.comment, "skipinitialspace": True}
    options["names"] = range(max(len(names), min(widest, len(names) + _LONGER)))
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
