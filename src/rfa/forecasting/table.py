"""A CSV file as a table of series: cells are read once, then times and numbers. What is unclear is refused."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.io.common import get_handle

from rfa.checks import require

from .frames import Names
from .times import EPOCH_UNITS, SKIP_HINT, Column, TimeReader, parsed_dates, plain_numbers

_SEPARATORS = {"tab": "\t", "\\t": "\t", "space": r"\s+"}
_TRIED_SEPARATORS = (",", ";", "\t", "|", r"\s+")
_BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_MISSING = ("", "na", "nan", "null", "none", "n/a", "#n/a", "-")
_LARGEST = 1e30  # larger readings are marks of missing ones, such as 9.97e36
_SIGNS = ".,'_ \u00a0\u202f\u2019"  # of thousands, spaces and a quote among them


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How a CSV file is written. What is None is told from the file, and said where it is unusual.

    Args:
        date_format: of dates, as `strptime` has it: `%d.%m.%Y`.
        time_unit: "s", "ms", "us" or "ns" of epoch stamps; "number": times are plain numbers.
        zone: whose clocks dates without an offset show, such as `Europe/Berlin`, and in which forecasts are written.
        epoch: the date of stamp 0, such as `1980-01-06` of GPS; 1970-01-01 by default.
        separator: of cells: a character, "tab", or "space" for any white space.
        decimal, thousands: signs in numbers.
        encoding: such as `cp1252`.
        missing: marks of missing readings, such as `-999`, beside empty cells, `NA` and `nan`.
        duplicates: what becomes of readings of one series and time: their "mean", the "first" or the "last". None:
            rows that do not contradict each other are merged, others refused.
        skip_rows: lines at the beginning that are left out.
        comment: the sign after which a line is left out, such as `#`.
        skip_bad_rows: leave out, and count, rows without a time, with too many cells, or with text for a number.
        no_header: the first row is one of readings; the columns are 1, 2, ...

    Raises:
        ValueError: for a value that is none of these.
    """

    date_format: str | None = None
    time_unit: str | None = None
    zone: str | None = None
    epoch: str | None = None
    separator: str | None = None
    decimal: str | None = None
    thousands: str | None = None
    encoding: str | None = None
    missing: Sequence[str] | None = ()
    duplicates: str | None = None
    skip_rows: int = 0
    comment: str | None = None
    skip_bad_rows: bool = False
    no_header: bool = False

    def __post_init__(self) -> None:
        def reads(given: str | None, read: Callable[[str], object]) -> bool:
            try:
                return given is None or read(given) is not None
            except (ValueError, KeyError, OSError, re.error):
                return False

        def single(given: str | None, signs: str | None = None) -> bool:
            return given is None or (len(given) == 1 and (signs is None or given in signs))

        dated = reads(self.date_format, lambda x: parsed_dates(pd.Series(["0"]), x) if "%" in x else None)
        stamped = self.date_format is None or (self.time_unit is None and self.epoch is None)
        separates = single(self.separator) or self.separator in _SEPARATORS
        for name, fits, expected in (
            ("date_format", dated, "a format of dates such as %d.%m.%Y"),
            ("date_format", stamped, "it, or --time-unit and --epoch"),
            ("time_unit", self.time_unit in (None, *EPOCH_UNITS, "number"), f"one of {', '.join(EPOCH_UNITS)}, number"),
            ("zone", reads(self.zone, lambda x: pd.Timestamp(0, tz=x)), "a name such as Europe/Berlin or UTC"),
            ("epoch", reads(self.epoch, pd.Timestamp), "a date such as 1980-01-06 or 2000-01-01T12:00"),
            ("separator", separates, "a single character, tab or space"),
            ("decimal", single(self.decimal, ".,"), "a point or a comma"),
            ("thousands", single(self.thousands, _SIGNS), "a point, a comma, a quote, _ or a space"),
            ("thousands", self.thousands != (self.decimal or "."), "another sign than that of --decimal, a point"),
            ("skip_rows", self.skip_rows >= 0, "a number of lines, 0 or more"),
            ("comment", single(self.comment), "a single sign, such as #"),
            ("duplicates", self.duplicates in (None, "mean", "first", "last"), "one of mean, first, last"),
        ):
            require(fits, name.replace("_", "-"), getattr(self, name), expected)


class SeriesFile(NamedTuple):
    """What a file has.

    Fields:
        table: a row for each reading, for `Forecaster` with these names.
        names: of its columns.
        notes: what was told from the file, and what was changed, a line each.
        problems: series of which a cell or all were left out, and why.
    """

    table: pd.DataFrame
    names: Names
    notes: list[str]
    problems: dict[str, str]


def read_table(
    path: Path,
    time: str | Sequence[str],
    values: Sequence[str] | None = None,
    id_col: str | None = None,
    written: TableFormat | None = None,
) -> SeriesFile:
    """Read the series of a CSV file.

    Args:
        path: of the file, which may be compressed.
        time: the column of times; or several: date and clock time, or year, month, day, hour, minute, second.
        values: the columns of readings: one with `id_col`, by default the only one that has numbers. Without it each is
            a series, by default each other column that has numbers; the table names them in "series", and their
            readings "reading".
        id_col: the column that names the series of each row. None: each column is a series.
        written: how the file is written.

    Raises:
        ValueError: with the row of the file, the column and the cell: for a file that cannot be read, an unknown
            column, times that are missing or unclear, cells with digits that are no numbers. Cells of text are left
            out, and are in `problems`, unless there is one series. With `id_col` so are all cells that are no numbers,
            and rows without a time, where most are good.
    """
    times = [name.strip() for name in ([time] if isinstance(time, str) else time)]
    require(0 < len(times) == len({*times}), "time", times, "one column of times, or several, each once")
    return _Reader(path, written or TableFormat()).series(times, values, id_col)


@dataclass
class _Reader(TimeReader):
    doubled: list[str] = field(default_factory=list)  # columns of which the header has two

    def series(self, times: list[str], values: Sequence[str] | None, id_col: str | None) -> SeriesFile:
        """The series of the file: as `read_table`."""
        cells = self.cells(times)
        others = [name for name in cells if name not in (*times, id_col) and not name.startswith("Unnamed: ")]
        columns = others if values is None else [name.strip() for name in values]
        named = [("time", times), ("id", [id_col] if id_col else []), ("values", columns)]
        for argument, name in ((argument, name) for argument, listed in named for name in listed):
            require(name in cells, argument, name, f"a column of {self.path.name}: {', '.join(cells):.200}")
            once = name not in self.doubled
            require(once, argument, f"{name}, of which there are two", "another column, or --no-header numbers them")
        if id_col is not None and values is None:  # the one with numbers
            numeric = [
                name for name in columns if pd.to_numeric(cells[name].str.replace(",", "."), "coerce").notna().any()
            ]
            columns = numeric or columns
        free = columns and not {*times, id_col} & {*columns} and len({*columns}) == len(columns)
        require(bool(free), "values", columns, "columns other than those of times and ids, each once")
        require(id_col is None or len(columns) == 1, "values", columns, "one column with --id")
        names = Names("series", times[0], "reading") if id_col is None else Names(id_col, times[0], columns[0])
        require(len({*names}) == 3, "time", times[0], "another name than 'series' and 'reading'; or --id")
        names.check("id", "time", "values")
        one, total = id_col is None and len(columns) == 1, len(cells)
        if id_col is not None:
            cells = self.good(cells, cells[id_col] != "", cells[id_col], "id", "a name in each row")
            self.ids = cells[id_col]
        stamps = self.read_times(self.joined_times(cells, times))
        ids = None if id_col is None else cells.loc[stamps.index, id_col]
        stamps = self.on_clock(stamps, ids)
        cells, parts = cells.loc[stamps.index], list[pd.DataFrame]()
        decimal = self.form.decimal or self.decimal_sign(cells[columns])
        for name in columns:
            ids = pd.Series(name, cells.index) if id_col is None else cells[id_col]
            numbers, wrong = self.numbers(cells[name], decimal)
            if values is None and not one and numbers.isna().all():
                self.notes.append(f"values: {name!r} left out, without a number")
                continue
            self.refuse(wrong, numbers, cells[name], one, id_col is not None)
            if not self.form.skip_bad_rows:
                self.leave_out(cells[name][wrong], ids, "is no number; it is left out")
            part = pd.DataFrame({names.id: ids, names.time: stamps, names.target: numbers})
            parts.append(part[~wrong] if self.form.skip_bad_rows else part)
        require(bool(parts), "values", columns, f"columns of {self.path.name} that have numbers")
        table = pd.concat(parts)
        if out := total - table.index.nunique():
            self.notes.append(f"rows: {out} of {total} left out as bad ones")
        table = self.one_row_a_time(table, names, id_col is not None)
        seen = table[names.target].notna()
        require(bool(seen.any()), "values", columns, f"a reading in {self.path.name}")
        late = table[names.time] > table.loc[seen, names.time].max()
        if late.any():
            self.notes.append(f"rows: those after the last reading, from row {table.index[late].min()}, are left out")
        return SeriesFile(table[~late].reset_index(drop=True), names, self.notes, self.problems)

    # Cells

    def text(self) -> str:
        """The text of the file, with one sign at the end of each line."""
        path, form = self.path, self.form
        try:
            with get_handle(str(path), "rb", compression="infer", is_text=False) as opened:
                content: bytes = opened.handle.read()
        except FileNotFoundError:
            raise ValueError(f"file: {path} does not exist, expected a CSV file") from None
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"file: {path} cannot be read: {str(error).strip():.200}") from None
        known = form.encoding or next((x for mark, x in _BYTE_ORDER_MARKS.items() if content.startswith(mark)), None)
        tried = [known] if known else ["utf-8", "cp1252"]
        for name in tried:
            try:
                text = content.decode(name).removeprefix("\ufeff")
            except LookupError:
                raise ValueError(f"encoding: got {form.encoding!r}, expected one such as cp1252") from None
            except UnicodeError:
                continue
            if "\0" not in text:
                self.notes += ["encoding: cp1252 (--encoding chooses another)"] if name == tried[-1] != known else []
                return re.sub(r"\r\n?", "\n", text)
        raise ValueError(f"file: {path} cannot be read: its text is not in {' or '.join(tried)} (--encoding)")

    def cells(self, times: list[str]) -> pd.DataFrame:
        """The cells as text, without spaces around them, by the rows of the file."""
        path, form, text = self.path, self.form, self.text()
        if form.skip_rows or form.comment:
            lines, sign = text.split("\n"), form.comment or "\n"
            lines[: form.skip_rows] = [""] * min(form.skip_rows, len(lines))
            text = "\n".join("" if line.lstrip().startswith(sign) else line for line in lines)
        start = len(re.match(r"(?:[ \t]*\n)*", text)[0])  # type: ignore[index]
        first, text = text.count("\n", 0, start) + 1, text[start:]
        require(bool(text.strip()), "file", str(path), "a CSV file with a header and rows")
        separator, names = self.header(text, times)
        missing = [name for name in times if name not in names]
        ways = "--separator, --skip-rows and --no-header say how it is written"
        known = f"a column of {path.name}: {', '.join(names):.200} ({ways})"
        require(not missing, "time", "".join(missing[:1]), known)
        options: dict[str, Any] = {"sep": separator, "dtype": str, "comment": form.comment, "skipinitialspace": True}
        options |= {"keep_default_na": False, "skip_blank_lines": False, "index_col": False}
        options |= {"header": None if form.no_header else 0, "names": range(len(names))}
        if form.skip_bad_rows:  # a row with too many cells becomes one without a time, so that rows keep their numbers
            options |= {"engine": "python", "on_bad_lines": lambda cells: ["too many cells"]}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # pandas would cut off cells
                table = pd.read_csv(io.StringIO(text), **options)
        except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError) as error:
            at = re.search(r"in line (\d+), saw (\d+)", str(error))
            given = f"{at[2]} cells in row {int(at[1]) + first - 1}" if at else "rows with more cells, or open quotes"
            expected = f"{len(names)} as in its header, {', '.join(names):.80} (--separator, --decimal); {SKIP_HINT}"
            raise ValueError(f"file: got {given} of {path.name}, expected {expected}") from None
        table = table.fillna("").apply(lambda column: column.str.strip())
        breaks = sum(table[k].str.count("\n") for k in table).cumsum().shift(fill_value=0) if '"' in text else 0
        table.index = (table.index + breaks + first + (not form.no_header)).astype(int)
        table = table.set_axis(names, axis=1)[(table != "").any(axis=1)]
        self.doubled = [*table.columns[table.columns.duplicated()]]
        table = table.loc[:, ~table.columns.duplicated()]
        require(len(table) > 0, "file", str(path), "a CSV file with a header and rows")
        return table

    def header(self, text: str, times: list[str]) -> tuple[str, list[str]]:
        """The separator with which the header has the columns of times, and the names of all columns."""
        given, form = self.form.separator, self.form
        tried = _TRIED_SEPARATORS if given is None else (_SEPARATORS.get(given, given),)
        tried = tried if given or not form.no_header else (";", "\t", "|", ",", r"\s+")  # a comma may be a decimal one
        for separator in (*tried, tried[0]):
            options: dict[str, Any] = {"header": None, "nrows": 1, "dtype": str, "skipinitialspace": True}
            row = pd.read_csv(io.StringIO(text), sep=separator, comment=form.comment, **options).iloc[0]
            names = [each.strip() or f"Unnamed: {k}" for k, each in enumerate(row.fillna(""))]
            names = [str(k + 1) for k in range(len(names))] if form.no_header else names
            if {*times} <= {*names} and (len(names) > len(times) or given):
                if separator != "," and not given:
                    said = {"\t": "tab", r"\s+": "space"}.get(separator, repr(separator))
                    self.notes.append(f"separator: {said}, by the header (--separator chooses another)")
                break
        return separator, names

    # Numbers

    def decimal_sign(self, cells: pd.DataFrame) -> str:
        """A comma where no number has a point, and the commas of some cannot be thousands; otherwise a point."""
        commas = pd.concat([column[column.str.contains(",", regex=False)] for _, column in cells.items()])
        points = any(column.str.contains(r"\d\.\d").any() for _, column in cells.items())
        if self.form.thousands or points or not commas.str.fullmatch(r"[+-]?\d*,\d+([eE][+-]?\d+)?").any():
            return "."
        if commas.str.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}").all():
            return "."  # nobody can tell: refused, with both options
        self.notes.append("numbers: with a decimal comma (--decimal chooses another)")
        return ","

    def numbers(self, cells: Column, decimal: str) -> tuple[Column, Column]:
        """Numbers as float64, NaN where none was read, and which cells are neither numbers nor missing."""
        marks = pd.Series([*(self.form.missing or ())], dtype=str)
        numbers = pd.to_numeric(plain_numbers(cells, decimal, self.form.thousands), errors="coerce").astype(np.float64)
        missing = cells.isin(marks) | cells.str.lower().isin(_MISSING)
        missing |= numbers.isin(pd.to_numeric(marks, errors="coerce").dropna())
        wrong = ~missing & ~(numbers.abs() <= _LARGEST)
        return numbers.mask(missing | wrong), wrong

    def refuse(self, wrong: Column, numbers: Column, cells: Column, one: bool, long: bool) -> None:
        """Raise `ValueError` unless the wrong cells may be left out: text among many series, or some bad rows."""
        signs = wrong & cells.str.fullmatch(rf"[+-]?\d*([{_SIGNS}]\d+)+")  # numbers as others write them
        if long:  # 1,5 or 1.500.000,5; others are wrong in their own series only
            signs &= cells.str.fullmatch(rf"[+-]?(\d*,\d+|\d{{1,3}}([{_SIGNS}]\d{{2,3}})*[{_SIGNS}]\d{{3}}([.,]\d*)?)")
        few = (long or self.form.skip_bad_rows) and wrong.sum() <= numbers.notna().sum()
        refused = signs if few else wrong if one or self.form.skip_bad_rows else wrong & cells.str.contains(r"\d")
        if refused.any():
            row = (signs if signs.any() else refused).idxmax()
            ways = (
                "--decimal or --thousands reads such signs"
                if signs.any()
                else f"--missing names other marks; {SKIP_HINT}"
            )
            given = f"{cells[row]!r:.60} in row {row} of {self.path.name}, column {cells.name!r}"
            raise ValueError(f"values: got {given}, expected a number up to {_LARGEST:g}, or an empty cell; {ways}")

    def one_row_a_time(self, table: pd.DataFrame, names: Names, long: bool) -> pd.DataFrame:
        """A row for each series and time. Series whose rows contradict each other are refused."""
        keys, how = [names.id, names.time], self.form.duplicates
        part = table[table.duplicated(keys, keep=False)]
        if not len(part):
            return table
        if how is None:
            apart = part.groupby(keys)[names.target].transform("nunique") > 1  # missing ones contradict nothing
            for name, some in part[apart].groupby(names.id):
                time = some[names.time].iloc[0]
                rows = some.index[some[names.time] == time]
                said = f"{time} twice with different values, in rows {rows[0]} and {rows[1]} of {self.path.name}"
                ways = "--duplicates mean, first or last merges them, --id names the series of each row"
                require(long, "time", said, f"each time once; {ways}")
                self.problems[str(name)] = f"{names.time}: {said}"
            table = table[~table[names.id].isin({*part.loc[apart, names.id]})]
        merged = table.rename_axis("row").reset_index().groupby(keys, sort=False)
        merged = merged.agg({"row": "first", names.target: how or "first"}).reset_index().set_index("row")
        if out := len(table) - len(merged):
            said = f"merged, by their {how or 'first'} reading"
            self.notes.append(f"rows: {out} of a time that another row of the series has were {said}")
        return merged
