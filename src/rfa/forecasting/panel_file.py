"""The forecast of a long CSV file of many series: `forecast.csv`, `cleaned.csv`, `failed.csv` and `figure.png`."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rfa.checks import require
from rfa.files import write_text_whole
from rfa.progress import Progress

from .cells import SEPARATORS
from .forecaster import Forecaster
from .output import check_folder
from .table import TableFormat

FILES = ("forecast.csv", "cleaned.csv", "failed.csv", "figure.png")
LEVELS = (50, 90)
_MISSING = ("", "na", "nan", "null", "none", "n/a", "-")


def read_long_table(path: Path, id_col: str, time_col: str, target_col: str, written: TableFormat) -> pd.DataFrame:
    """The rows of a long CSV file: ids as text, times as dates or numbers, readings as numbers.

    Args:
        path: of the file.
        id_col, time_col, target_col: its columns; others are left out.
        written: how it is written. Nothing is told from the file: by default commas separate, a point is the decimal
            sign, and times are of ISO 8601 or numbers.

    Raises:
        ValueError: for a file without these columns, or a cell that is no time or no number, with its row.
    """
    separator = SEPARATORS.get(written.separator, written.separator) if written.separator else ","
    rows = {"skiprows": written.skip_rows, "comment": written.comment, "encoding": written.encoding}
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, sep=separator, **rows)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeError, LookupError) as error:
        raise ValueError(f"file: {path} cannot be read: {error}") from None
    for name, column in (("id", id_col), ("time", time_col), ("values", target_col)):
        require(column in table, name, column, f"one of the columns {', '.join(map(repr, table.columns))}")
    ids, times, values = (table[name].str.strip() for name in (id_col, time_col, target_col))
    _require_all(ids != "", "id", ids, "a name")
    absent = values.isin(list(written.missing)) | values.str.lower().isin(_MISSING)
    plain_cells = values.str.replace(written.thousands, "", regex=False) if written.thousands else values
    plain_cells = plain_cells.str.replace(written.decimal or ".", ".", regex=False).mask(absent)
    numbers = pd.to_numeric(plain_cells, errors="coerce")
    expected = "a number, or an empty cell; --decimal and --missing say how readings are written"
    _require_all(numbers.notna() | absent, "values", values, expected)
    plain = pd.to_numeric(times, errors="coerce")
    if plain.notna().all() and written.date_format is None and not times.str.fullmatch(r"(19|20)\d{6}").all():
        stamps: Any = plain
    else:
        stamps = pd.to_datetime(times, format=written.date_format or "ISO8601", errors="coerce")
        _require_all(stamps.notna(), "time", times, "a date such as 2024-03-31, or --date-format")
    return pd.DataFrame({id_col: ids, time_col: stamps, target_col: numbers})


def _require_all(good: Any, name: str, cells: Any, expected: str) -> None:
    if len(bad := np.flatnonzero(~np.asarray(good))):
        require(False, name, cells.iloc[bad[0]], f"{expected} (row {bad[0] + 1} after the header)")


def forecast_panel_file(
    table: pd.DataFrame,
    forecaster: Forecaster,
    horizon: int | str,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Forecast each series of a table, and write the files, each whole.

    Ctrl-C leaves the forecasts of the series that are done, and the others in `failed.csv`.

    Args:
        table: as `Forecaster.forecast` takes it.
        forecaster: with the names of its columns.
        horizon: number of steps, or a length.
        out: the folder.
        overwrite: replace a forecast that is there.
        progress: called with the number of series that are done, and of all.

    Returns:
        `series`, `failed` (id and reason) and `outliers` (their number).

    Raises:
        ValueError: for a folder with other files, or where no series can be done.
        OSError: if a file cannot be written.
        KeyboardInterrupt: on Ctrl-C, after the files are written.
    """
    check_folder(out, FILES, overwrite)
    stopped = None
    try:
        forecast = forecaster.forecast(table, horizon, level=LEVELS, progress=progress)
    except KeyboardInterrupt as error:
        stopped = error
        forecast = forecaster.result()
    history = forecaster.history()
    failed = pd.DataFrame(forecaster.failed, columns=["id", "reason"])
    from .figure import panel_figure, save  # matplotlib only where a figure is drawn

    names = forecaster.names
    save(panel_figure(forecast, history, *names), out / "figure.png", dots=150)
    for name, each in (("cleaned.csv", history), ("failed.csv", failed), ("forecast.csv", forecast)):
        write_text_whole(out / name, each.to_csv(index=False))
    if stopped is not None:
        raise stopped
    return {
        "series": int(forecast[names.id].nunique()),
        "failed": forecaster.failed,
        "outliers": int(history["outlier"].sum()),
    }
