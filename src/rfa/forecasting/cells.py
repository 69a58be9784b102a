"""The cells of a CSV file, as texts: its encoding, its separator, and the lines on which its rows begin."""

from rfa.checks import needs

needs("pandas")

import csv
import io
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.io.common import get_handle

SEPARATORS = {"tab": "\t", "\\t": "\t", "space": r"\s+"}
_TOLD = (",", ";", "\t", "|", r"\s+")  # separators that the header tells
_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


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


def separator_of(text: str, time: str, given: str | None, notes: list[str]) -> str:
    """The separator with which the header has the column of times; a comma where none has."""
    if given is not None:
        return SEPARATORS.get(given, given)
    for separator in _TOLD:
        names: list[str] = []
        if separator == r"\s+" and re.search("[,;\t|]", text.partition("\n")[0]):
            continue
        with suppress(csv.Error):
            names, _ = next(iter(_records(text, separator)), ([], 0))
        if time in names and len(names) > 1:
            if separator != ",":
                words = {"\t": "tab", r"\s+": "space"}.get(separator, repr(separator))
                notes.append(f"separator: {words}, by the header (--separator chooses another)")
            return separator
    return ","


def _records(text: str, separator: str) -> Iterable[tuple[list[str], int]]:
    """The cells of records without spaces around them, and the lines on which they begin. Blank lines have none."""
    spaces = separator == r"\s+"
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=" " if spaces else separator, skipinitialspace=True)
    line = 1
    for cells in reader:
        cells = [cell.strip() for cell in cells]
        if any(cells) or len(cells) > 1:
            yield cells, line
        line = reader.line_num + 1


def read_cells(path: Path, text: str, separator: str) -> pd.DataFrame:
    """The cells as texts. The index has their lines."""
    try:
        kept: dict[str, Any] = {"dtype": str, "sep": separator, "skipinitialspace": True}
        names = pd.read_csv(io.StringIO(text), header=None, nrows=1, keep_default_na=False, **kept).iloc[0].tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # pandas would shift or cut off cells
            table = pd.read_csv(io.StringIO(text), index_col=False, **kept)
        lines = [line for _, line in _records(text, separator)][1:]
    except (csv.Error, pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError) as error:
        _check_lengths(path, text, separator)
        raise ValueError(f"file: {path} cannot be read as CSV: {str(error).strip().splitlines()[0]}") from None
    names = [name.strip() for name in names]  # pandas renames the second of two equal names, and one that is empty
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"file: {path} has two columns {twice!r}, expected each name once")
    table.columns = [name or given for name, given in zip(names, table.columns, strict=True)]
    table = table.set_axis(lines if len(lines) == len(table) else range(2, len(table) + 2)).dropna(how="all")
    if not len(table):
        raise ValueError(f"file: {path} has no rows, expected at least one")
    return table


def _check_lengths(path: Path, text: str, separator: str) -> None:
    """Raise `ValueError` for the first row with more cells than the header, and for a quote without an end."""
    line, header = 1, list[str]()
    for cells, line in _records(text, separator):
        header = header or cells
        count = max((place for place, cell in enumerate(cells, 1) if cell), default=0)
        if count > len(header):
            given = f"{count} cells in row {line} of {path}"
            expected = f"{len(header)} as in its header, {', '.join(header):.80}; --separator tells where they end"
            raise ValueError(f"file: got {given}, expected {expected}")
    if text.count('"') % 2:
        raise ValueError(f"file: got a quote in row {line} of {path} without an end, expected quotes in pairs")
