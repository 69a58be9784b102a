"""The command for series in CSV files."""

import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import ManyValues, app, check_out, interruptible, one_line, progress_bars, say

_LISTED = 10  # series, refused readings and failures that are printed
_MEMBERS = 4  # of a series that are printed


def _option(says: str, metavar: str | None = None, *names: str, panel: str | None = None) -> Any:
    return typer.Option(*names, help=says, metavar=metavar, rich_help_panel=panel)


def _of_table(says: str, metavar: str | None = None, *names: str) -> Any:
    """An option that says how the file is written."""
    return _option(says, metavar, *names, panel="How the file is written (told from it, and said, by default)")


@app.command("forecast", cls=ManyValues)
def forecast(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="CSV file to forecast.", metavar="FILE.csv")],
    time: Annotated[list[str], _option("The column of times; or those of date and time, or year, month", "A B ...")],
    horizon: Annotated[str, _option("A number of steps, or how far ahead: 30min, 24h, 7D, 26w, 12M, 4Q, 1Y.", "H")],
    out: Annotated[Path, _option("Folder for forecast.csv, cleaned.csv, members.csv, figure.png ...", "DIR")],
    values: Annotated[list[str] | None, _option("The columns to forecast; all others by default.", "A B ...")] = None,
    id_column: Annotated[
        str | None, _option("The column that names the series of each row; one column of --values.", "COLUMN", "--id")
    ] = None,
    season: Annotated[
        float | None, _option("The length of the season in steps, 0 for none; or the calendar's.")
    ] = None,
    not_robust: Annotated[bool, _option("All readings count alike.", None, "--not-robust")] = False,
    date_format: Annotated[str | None, _of_table("Format of dates, such as %d.%m.%Y.", "FORMAT")] = None,
    time_unit: Annotated[str | None, _of_table("Unit of epoch stamps; or plain numbers.", "s|ms|us|ns|number")] = None,
    zone: Annotated[str | None, _of_table("The place whose clock dates show: Europe/Berlin.", "ZONE")] = None,
    epoch: Annotated[str | None, _of_table("The date of stamp 0, such as 1980-01-06 of GPS.", "DATE")] = None,
    separator: Annotated[str | None, _of_table("What separates cells: a sign, tab or space.", "SIGN")] = None,
    decimal: Annotated[str | None, _of_table("Sign before the decimals of numbers.", "SIGN")] = None,
    thousands: Annotated[str | None, _of_table("Sign between thousands.", "SIGN")] = None,
    encoding: Annotated[str | None, _of_table("Encoding of the text, such as cp1252.", "NAME")] = None,
    missing: Annotated[list[str] | None, _of_table("Marks of missing readings, such as -999 9999.", "MARK ...")] = None,
    duplicates: Annotated[str | None, _of_table("How rows of one time become one.", "mean|first|last")] = None,
    skip_rows: Annotated[int, _of_table("Lines to leave out before the header.", "N")] = 0,
    comment: Annotated[str | None, _of_table("Sign that begins a comment, such as #.", "SIGN")] = None,
    skip_bad_rows: Annotated[bool, _of_table("Leave out, and count, bad rows.", None, "--skip-bad-rows")] = False,
    no_header: Annotated[bool, _of_table("The first row has readings; columns: 1, 2 ...", None, "--no-header")] = False,
    overwrite: Annotated[bool, _option("Replace a forecast that is there.", None, "--overwrite")] = False,
    resume: Annotated[bool, _option("Go on with one that Ctrl-C has stopped.", None, "--resume")] = False,
) -> None:
    """Forecast the series of a CSV file with 50 and 90 % bands, and list the refused readings of the past.

    Each column is a series, or each name of the column --id. An empty cell is a missing reading. Times may have gaps.
    """
    from rfa.forecasting.output import TABLES, forecast_file
    from rfa.forecasting.table import TableFormat

    check_out(out)
    with interruptible("the same command with --resume goes on"), progress_bars() as bar:
        found = forecast_file(
            file,
            out,
            time=time[0] if len(time) == 1 else time,
            horizon=int(horizon) if horizon.isdecimal() else horizon,
            values=values,
            id_col=id_column,
            robust=not not_robust,
            season_length=season,
            written=TableFormat(**{each.name: ctx.params[each.name] for each in fields(TableFormat)}),
            workers=os.cpu_count() or 1,
            overwrite=overwrite,
            resume=resume,
            progress=lambda done, total: bar("series", done, total) if total > 1 else None,
        )
    _print_forecast(found)
    for name in (*TABLES, "forecast.json", "figure.png"):
        say(f"{name:14}{out / name}")


def _say(text: str) -> None:
    """Print a line. Names of columns and series come from files, so control characters are taken out."""
    say(one_line(text))


def _digits(mean: float, width: float) -> int:
    """Significant digits that show an interval of this width on its level, such as a meter's total."""
    return 5 if not width > 0 or mean == 0 else min(15, max(5, 2 + math.floor(math.log10(abs(mean) / width)) + 1))


def _print_forecast(found: Any) -> None:
    """Print what was assumed, the forecasts of some series, their refused readings, and what could not be done."""
    content, (id_col, time_col, target_col), (ahead, past, members) = found.content, found.names, found.shown
    for note in content["notes"]:
        _say(f"note: {note}")
    if content["id"] is None and content["of"] > 1:
        _say(f"note: each of {content['of']} columns is a series of its own; {id_col!r} names it in the files")
    _say(f"{content['series']:,} series forecast, {content['readings']:,} readings, {content['refused']:,} refused")
    names = list(dict.fromkeys(ahead[id_col]))[:_LISTED]
    for name in names:
        rows, own, end = (table[table[id_col] == name] for table in (members, past, ahead))
        last, first = end.iloc[-1], rows.iloc[0]
        digits = _digits(last["rfa"], last["rfa-hi-90"] - last["rfa-lo-90"])
        ends = [f"{last[f'rfa-{side}-{level}']:.{digits}g}" for level in (50, 90) for side in ("lo", "hi")]
        bands = f"50 %: {ends[0]} to {ends[1]}, 90 %: {ends[2]} to {ends[3]}"
        _say(f"{name}: {last['rfa']:.{digits}g} at {last[time_col]} ({bands}); {len(end)} steps of {first['step']}")
        best = rows.sort_values("weight", ascending=False)
        said = ", ".join(f"{m} {w:.0%}" for m, w in zip(best["member"][:_MEMBERS], best["weight"], strict=False))
        more = f" and {len(best) - _MEMBERS} more" if len(best) > _MEMBERS else ""
        note = f"; {first['note']}" if first["note"] == first["note"] and first["note"] else ""
        season = f"; a season of {first['season']:.6g} steps" if first["season"] else "; no season"
        _say(f"  members: {said}{more}{'' if 'no season' in note else season}{note}")
        wrong = own[own["outlier"].astype(bool)]
        for _, row in wrong.tail(_LISTED).iterrows():
            at = f"{row[target_col]:.6g} at {row[time_col]}, expected {row['rfa']:.6g}, weight {row['weight']:.2g}"
            _say(f"  refused: {at}")
        if len(wrong) > _LISTED:
            _say(f"  refused: {len(wrong) - _LISTED} earlier ones, in cleaned.csv")
    if content["series"] > len(names):
        _say(f"{content['series'] - len(names)} more series are in forecast.csv")
    for name, reason in [*found.problems.items()][:_LISTED]:
        _say(f"not as asked: {name}: {reason}")
    if len(found.problems) > _LISTED:
        _say(f"{len(found.problems) - _LISTED} more are in failed.csv")
