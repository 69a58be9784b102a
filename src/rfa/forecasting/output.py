"""The forecast of a CSV file as files, each written whole.

Series are done in blocks. Each block is written to the folder `parts` at once: Ctrl-C leaves those, `resume` goes on.
"""

import json
import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd

from rfa import version
from rfa.checks import require
from rfa.files import sha256, whole_name, write_text_whole, write_whole
from rfa.progress import Progress
from rfa.steps import Steps, steps_of_series
from rfa.steps import horizon as ahead

from .forecaster import Forecaster
from .frames import Names, read_stamps
from .table import TableFormat, read_table

TABLES = ("forecast.csv", "cleaned.csv", "members.csv", "failed.csv")
FILES = (*TABLES, "forecast.json", "figure.png")
LEVELS = (50, 90)
PARTS, _REQUEST = "parts", "request.json"  # of what is not whole yet: blocks, and the request that they belong to
_BLOCK, _BLOCK_READINGS = 512, 100_000  # series and readings that are done at once: so much work Ctrl-C loses


class FileForecast(NamedTuple):
    """What was forecast.

    Fields:
        content: of `forecast.json`.
        names: of the columns of ids, times and readings.
        shown: the forecast, the past and the members, of the series that are drawn.
        problems: series that were not done as asked, and why.
    """

    content: dict[str, Any]
    names: Names
    shown: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
    problems: dict[str, str]


def forecast_file(
    file: str | Path,
    out: str | Path,
    *,
    time: str | list[str],
    horizon: int | str,
    values: list[str] | None = None,
    id_col: str | None = None,
    robust: bool = True,
    season_length: float | None = None,
    written: TableFormat | None = None,
    workers: int = 1,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> FileForecast:
    """Forecast each series of a CSV file, and write the tables, `figure.png` and last `forecast.json`.

    Ctrl-C leaves the forecasts of the blocks that are done, and `parts`, from which `resume` goes on.

    Args:
        file, time, values, id_col, written: as for `read_table`.
        out: the folder.
        horizon: a number of steps, or a length such as "24h", "12M".
        robust, season_length, workers: as for `Forecaster`.
        overwrite: replace a forecast that is there.
        resume: go on with one that was stopped.
        progress: called with the number of series that are done, and of all.

    Raises:
        ValueError: naming the argument, for bad data, a folder with other files, or where no series can be done.
        OSError: if a file cannot be written.
        KeyboardInterrupt: on Ctrl-C, after the files are written.
    """
    file, out = Path(file), Path(out)
    ahead(horizon, "horizon")
    check_folder(out, overwrite, resume)
    found = read_table(file, time, values, id_col, written)
    settings: dict[str, Any] = {"robust": robust, "season_length": season_length}
    request: dict[str, Any] = {"file": str(file), "sha256": sha256(file), "time": time, "values": values}
    request |= {"id": id_col, "horizon": horizon, **settings, "rfa": version.__version__}
    request["written"] = {k: v for k, v in vars(written or TableFormat()).items() if v != getattr(TableFormat, k)}
    _prepare(out / PARTS, json.dumps(request, indent=1, default=list), resume)
    names, shown = found.names, list[pd.DataFrame]()
    columns: dict[str, Any] = {"id_col": names.id, "time_col": names.time, "target_col": names.target}
    total, done, stopped, problems = found.table[names.id].nunique(), 0, None, dict(found.problems)
    usual = _usual_step(found.table, names)
    counts = dict.fromkeys(("series", "readings", "refused"), 0)
    try:
        for place, (count, rows) in enumerate(_blocks(found.table, names.id)):
            part = out / PARTS / f"{place:06}"
            if part.exists():
                tables = _read_tables(part, rows.dtypes)
            else:
                forecaster = Forecaster(**settings, workers=workers, **columns)
                forecaster._usual = usual
                tables = _forecast(forecaster, rows, horizon, _from(done, total, progress))
                write_whole(part, partial(_write_tables, tables))
            done += count
            forecast, past, _, failed = tables
            for name, reason in failed.itertuples(index=False):
                problems[name] = "; ".join(filter(None, [found.problems.get(name), reason]))
            counts["series"] += forecast[names.id].nunique()
            counts["readings"] += int(past[names.target].notna().sum())
            counts["refused"] += int(past["outlier"].sum())
            shown = _most_telling(shown, tables[:3], names.id)
    except (KeyboardInterrupt, ValueError) as error:
        stopped = error
    if not counts["series"]:
        shutil.rmtree(out / PARTS)
        with suppress(OSError):  # it has a forecast
            out.rmdir()
        name, reason = next(iter(problems.items()), ("", ""))
        raise stopped or ValueError(f"{names.id} {name!r}: {reason}; none of {len(problems)} series can be done")
    rest = sorted(found.table[names.id].unique())[done:]  # blocks are in this order
    problems |= {name: "the run was stopped before it" for name in rest if name not in problems}
    content = {"format": 2, **request, "notes": found.notes, **counts, "failed": len(problems), "of": total}
    _write_result(out, content, shown, problems, names)
    if stopped is not None:
        raise stopped
    shutil.rmtree(out / PARTS)
    return FileForecast(content, names, (shown[0], shown[1], shown[2]), problems)


def _write_result(
    out: Path, content: dict[str, Any], shown: list[pd.DataFrame], problems: dict[str, str], names: Names
) -> None:
    """Write the files of a folder, each whole, of the blocks that are done."""
    from .figure import forecast_figure, save

    for name in TABLES[:-1]:
        write_whole(out / name, partial(_join, sorted((out / PARTS).glob(f"*/{name}"))))
    failed = pd.DataFrame(sorted(problems.items()), columns=["id", "reason"])
    write_text_whole(out / TABLES[-1], failed.to_csv(index=False))
    save(forecast_figure(shown[0], shown[1], names), out / "figure.png", dots=150)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "pandas": pd.__version__}
    write_text_whole(out / "forecast.json", json.dumps(content | versions, indent=1, default=list) + "\n")


def check_folder(out: Path, overwrite: bool = False, resume: bool = False) -> None:
    """Raise `ValueError` unless the folder is free, or holds a forecast that may be replaced or goes on."""
    require(not out.exists() or out.is_dir(), "out", str(out), "a folder, or none")
    there = {whole_name(path) for path in out.iterdir()} if out.exists() else set()
    if foreign := sorted(there - {*FILES, PARTS}):
        raise ValueError(f"out: {out} has other files, {', '.join(foreign):.80}, expected an empty folder")
    ways = "--resume goes on, --overwrite replaces it" if PARTS in there else "or --overwrite"
    if there and not (overwrite or resume):
        raise ValueError(f"out: {out} has {', '.join(sorted(there))} already, expected an empty folder; {ways}")
    if resume and there and PARTS not in there:
        raise ValueError(f"resume: got {out}, where nothing was stopped, expected a forecast that was")


def _prepare(parts: Path, request: str, resume: bool) -> None:
    """Make the folder of blocks, or see that its blocks belong to this request."""
    known = parts / _REQUEST
    if resume and known.exists():
        require(known.read_text("utf-8") == request, "resume", str(parts), "the same file and the same options")
        return
    shutil.rmtree(parts, ignore_errors=True)
    write_text_whole(known, request)


def _blocks(table: pd.DataFrame, id_col: str) -> Iterator[tuple[int, pd.DataFrame]]:
    """The rows of some series each, in the order of their ids, and the number of series."""
    sizes = table[id_col].value_counts().sort_index()
    block = ((sizes.cumsum() - 1) // _BLOCK_READINGS).astype(int)
    block = block.to_numpy() + np.arange(len(sizes)) // _BLOCK  # both grow: a new pair is a new block
    of_row = pd.Series(block, sizes.index)[table[id_col]].to_numpy()
    for each in np.unique(block):
        yield int((block == each).sum()), table[of_row == each]


def _usual_step(table: pd.DataFrame, names: Names) -> Steps | None:
    """The step of most series of a whole file."""
    stamps, kind = read_stamps(nw.from_native(table[names.time], series_only=True))
    codes = pd.factorize(table[names.id])[0]
    order = np.lexsort((stamps, codes))
    return steps_of_series(np.split(stamps[order], np.cumsum(np.bincount(codes))[:-1]), kind)[1]


def _forecast(
    forecaster: Forecaster, rows: pd.DataFrame, horizon: Any, progress: Progress | None
) -> list[pd.DataFrame]:
    """The tables of a block. A block of which no series can be done has empty ones."""
    names = forecaster.names
    try:
        tables = [forecaster.forecast(rows, horizon, LEVELS, progress=progress)]
        tables += [forecaster.history(), forecaster.explain()]
    except ValueError:
        if not forecaster.failed:
            raise
        bands = [f"rfa-{side}-{level}" for level in LEVELS for side in ("lo", "hi")]
        past = ["rfa", "rfa-lo-90", "rfa-hi-90", "weight", "outlier", "cleaned"]
        members = ["member", "weight", "error", "step", "season", "note"]
        columns = [names.id, names.time, "rfa", *bands], [*names, *past], [names.id, *members]
        tables = [pd.DataFrame(columns=each) for each in columns]
    return [*tables, pd.DataFrame(forecaster.failed, columns=["id", "reason"])]


def _from(start: int, total: int, progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda done, _: progress(start + done, total)


def _write_tables(tables: list[pd.DataFrame], folder: Path) -> None:
    folder.mkdir()
    for name, table in zip(TABLES, tables, strict=True):
        table.to_csv(folder / name, index=False)


def _read_tables(folder: Path, dtypes: Any) -> list[pd.DataFrame]:
    """The tables of a block that is done, with times as the file has them."""
    id_col, time_col, _ = dtypes.index
    blank: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}  # a series may have the name NA
    tables = [pd.read_csv(folder / name, dtype={id_col: str, "id": str}, **blank) for name in TABLES]
    for table in tables[:2]:
        dates = pd.to_datetime(table[time_col], utc=True, format="ISO8601") if dtypes[time_col].kind == "M" else None
        zone = getattr(dtypes[time_col], "tz", None)
        table[time_col] = table[time_col] if dates is None else dates.dt.tz_convert(zone)
    return tables


def _join(parts: list[Path], path: Path) -> None:
    """One file of the rows of several, below the header of the first."""
    with path.open("wb") as joined:
        for place, each in enumerate(parts):
            with each.open("rb") as rows:
                header = rows.readline()
                joined.write(header if place == 0 else b"")
                shutil.copyfileobj(rows, joined)


def _most_telling(before: list[pd.DataFrame], more: list[pd.DataFrame], id_col: str) -> list[pd.DataFrame]:
    """The tables of those series of which a figure may show some: the first ones by each measure."""
    from .figure import DRAWN_SERIES, chosen_series  # matplotlib only where a figure is drawn

    if not len(more[0]):
        return before
    every = more if not before else [pd.concat(each) for each in zip(before, more, strict=True)]
    chosen = {*chosen_series(every[0], every[1], id_col, DRAWN_SERIES)}
    return [table[table[id_col].isin(chosen)] for table in every]
