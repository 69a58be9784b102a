"""The command for series in CSV files."""

import functools
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .app import ManyValues, app, check_out, console, interruptible, one_line, progress_bars, say

_LISTED = 10  # outliers of a channel that are printed
_COMPARED = 4  # models whose errors are printed


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
    horizon: Annotated[str, _option("How far ahead: 30min, PT1.5H, 7D, 12M or 5B; or a plain number.", "H")],
    out: Annotated[Path, _option("Folder for forecast.csv, cleaned.csv, forecast.json, figure.png.", "DIR")],
    values: Annotated[list[str] | None, _option("The columns to forecast; all others by default.", "A B ...")] = None,
    id_column: Annotated[
        str | None, _option("The column that names the series of each row; one column of --values.", "COLUMN", "--id")
    ] = None,
    step: Annotated[str | None, _option("Time between forecasts: 30min, 1MS, 1QE, B; or as usual.", "S")] = None,
    components: Annotated[
        list[str] | None,
        _option(
            "Parts of the filter: level, trend, damped-trend, ar, cycle, season:24h:3 (waves), season:7D:free; "
            "those that would have forecast best by default.",
            "C ...",
        ),
    ] = None,
    not_robust: Annotated[
        bool, _option("The Kalman filter, which believes each reading.", None, "--not-robust")
    ] = False,
    positive: Annotated[bool, _option("All values are above 0: no forecast is less.", None, "--positive")] = False,
    counts: Annotated[bool, _option("No value is negative: no forecast is, either.", None, "--counts")] = False,
    angle: Annotated[float | None, _option("A whole turn, such as 360, of values that are angles.", "DEGREES")] = None,
    sensor: Annotated[str | None, _option("A column that names the sensor of each row.", "COLUMN")] = None,
    date_format: Annotated[str | None, _of_table("Format of dates, such as %d.%m.%Y.", "FORMAT")] = None,
    time_unit: Annotated[str | None, _of_table("Unit of epoch stamps; or plain numbers.", "s|ms|us|ns|number")] = None,
    zone: Annotated[str | None, _of_table("The place whose clock dates show: Europe/Berlin.", "ZONE")] = None,
    epoch: Annotated[str | None, _of_table("The date of stamp 0, such as 1980-01-06 of GPS.", "DATE")] = None,
    separator: Annotated[str | None, _of_table("What separates cells: a sign, tab or space.", "SIGN")] = None,
    decimal: Annotated[str | None, _of_table("Sign before the decimals of numbers.", "SIGN")] = None,
    thousands: Annotated[str | None, _of_table("Sign between thousands.", "SIGN")] = None,
    encoding: Annotated[str | None, _of_table("Encoding of the text, such as cp1252.", "NAME")] = None,
    missing: Annotated[list[str] | None, _of_table("Marks of missing readings, such as -999 9999.", "MARK ...")] = None,
    duplicates: Annotated[str | None, _of_table("How rows of one time become one.", "mean|first|last|refuse")] = None,
    sort: Annotated[bool, _of_table("Put rows in order of time, or refuse.", None, "--sort/--no-sort")] = True,
    skip_rows: Annotated[int, _of_table("Lines to leave out before the header.", "N")] = 0,
    comment: Annotated[str | None, _of_table("Sign that begins a comment, such as #.", "SIGN")] = None,
    skip_bad_rows: Annotated[bool, _of_table("Leave out, and count, bad rows.", None, "--skip-bad-rows")] = False,
    no_header: Annotated[bool, _of_table("The first row has readings; columns: 1, 2 ...", None, "--no-header")] = False,
    overwrite: Annotated[bool, _option("Replace a forecast that is there.", None, "--overwrite")] = False,
) -> None:
    """Forecast the columns of a CSV file with 50 and 90 % intervals, and list the outliers of the past.

    An empty cell is a missing reading. Times may have any gaps.
    """
    from rfa.forecasting.output import forecast_file
    from rfa.forecasting.request import ForecastRequest

    check_out(out)
    if id_column is not None:
        return _forecast_panel(ctx, id_column)
    request = ForecastRequest(
        file=file,
        time=time[0] if len(time) == 1 else tuple(time),
        values=values,
        horizon=horizon,
        step=step,
        sensor=sensor,
        table_format=_written(ctx),
        components=components,
        robust=not not_robust,
        positive=positive,
        counts=counts,
        angle=angle,
    )
    with interruptible("start again with the same command"), progress_bars() as bar:
        said: Any = lambda stage, *far: bar(one_line(f"{stage.run}: {stage.name}"), *far)  # noqa: E731
        content = forecast_file(request, out, overwrite=overwrite, progress=said)
    _print_forecast(content, out)


_OF_PANELS = "file time horizon out values id_column not_robust overwrite"
_OF_LONG_TABLES = "date_format separator decimal thousands encoding missing skip_rows comment"  # how they are written


def _forecast_panel(ctx: typer.Context, id_column: str) -> None:
    """Forecast each series of a long table."""
    from rfa.forecasting import Forecaster
    from rfa.forecasting.panel_file import FILES, forecast_panel_file, read_long_table

    given = {name: value for name, value in ctx.params.items() if _is_given(ctx, name)}
    for name in given.keys() - {*_OF_PANELS.split(), *_OF_LONG_TABLES.split()}:
        raise ValueError(f"{name}: got {given[name]!r}, expected nothing: it is not for many series (--id)")
    values = given.get("values") or []
    for name, columns in (("values", values), ("time", given["time"])):
        if len(columns) != 1:
            raise ValueError(f"{name}: got {columns!r}, expected one column with --id")
    columns = id_column, given["time"][0], values[0]
    table = read_long_table(given["file"], *columns, _written(ctx))
    forecaster = Forecaster(not given.get("not_robust", False), *columns, workers=os.cpu_count() or 1)
    horizon, out = str(given["horizon"]), given["out"]
    ahead: Any = int(horizon) if horizon.isdecimal() else horizon
    with interruptible("what was done until then is in the folder"), progress_bars() as bar:
        said = functools.partial(bar, "series")
        found = forecast_panel_file(table, forecaster, ahead, out, overwrite=ctx.params["overwrite"], progress=said)
    _say(f"{found['series']:,} series forecast, {found['outliers']:,} readings refused")
    for each in found["failed"][:_LISTED]:
        _say(f"not done: {each.id}: {each.reason}")
    if len(found["failed"]) > _LISTED:
        _say(f"{len(found['failed']) - _LISTED} more are in failed.csv")
    for file in FILES:
        say(f"{file:13}{out / file}")


def _written(ctx: typer.Context) -> Any:
    """How the file is written, as the options say."""
    from rfa.forecasting.table import TableFormat

    return TableFormat(**{each.name: ctx.params[each.name] for each in fields(TableFormat)})


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _say(text: str) -> None:
    """Print a line. Names of columns and sensors come from files, so control characters are taken out."""
    say(one_line(text))


def _digits(mean: float, width: float) -> int:
    """Significant digits that show an interval of this width on its level, such as a meter's total."""
    return 5 if width <= 0 or mean == 0 else min(15, max(5, 2 + math.floor(math.log10(abs(mean) / width)) + 1))


def _print_forecast(content: dict[str, Any], out: Path) -> None:
    for note in content["notes"]:
        _say(f"note: {note}")
    table = Table(title=Text(f"{content['horizon']} after {content['last']}"))
    for column in ("column", "readings", "outliers", "at the end", "50 %", "90 %"):
        table.add_column(column, justify="left" if column == "column" else "right", overflow="fold")
    for name, one in content["channels"].items():
        ends = [one["intervals"][level] for level in ("50", "90")]
        digits = _digits(one["mean"][-1], ends[1]["upper"][-1] - ends[1]["lower"][-1])
        table.add_row(
            Text(one_line(name)),
            f"{content['readings'][name]:,}",
            f"{len(one['outliers']):,}",
            f"{one['mean'][-1]:.{digits}g}",
            *(f"{end['lower'][-1]:.{digits}g} to {end['upper'][-1]:.{digits}g}" for end in ends),
        )
    console.print(table)
    for name, one in content["channels"].items():
        by = "chosen by the data" if one["chosen"] else "as given"
        of = f", for readings of sensor {one['sensor']}" if "sensor" in one else ""
        _say(f"model of {name}: {one['components']} ({by}){of}")
        if one["tried"]:
            least = sorted(one["tried"].items(), key=lambda each: each[1])[:_COMPARED]
            said = ", ".join(f"{words} {score:.4g}" for words, score in least)
            by = "mean error at this horizon, 2 % more for each parameter and 11 % more with a season"
            _say(f"the least of {len(one['tried'])} models is chosen ({by}): {said}")
        for outlier in one["outliers"][-_LISTED:]:
            said = f"outlier: {name} {outlier['value']:.6g} at {outlier['time']}, expected {outlier['expected']:.6g}"
            _say(f"{said}, weight {outlier['weight']:.2g}")
        if len(one["outliers"]) > _LISTED:
            more = len(one["outliers"]) - _LISTED
            _say(f"{more} earlier outliers of {name} are in forecast.json")
    names = {"forecast": "forecast.csv", "cleaned": "cleaned.csv", "details": "forecast.json", "figure": "figure.png"}
    for label, file in names.items():
        say(f"{label + ':':10}{out / file}")
