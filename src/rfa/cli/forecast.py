"""The command for series in CSV files."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .app import ManyValues, app, check_out, console, interruptible, one_line, progress_bars, say

_LISTED = 10  # outliers of a channel that are printed
_COMPARED = 4  # models whose errors are printed


def _of_table(*names: str, says: str, metavar: str | None = None) -> Any:
    """An option that says how the file is written."""
    panel = "How the file is written (told from it, and said, by default)"
    return typer.Option(*names, help=says, metavar=metavar, rich_help_panel=panel)


@app.command("forecast", cls=ManyValues)
def forecast(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="CSV file to forecast.", metavar="FILE.csv")],
    time: Annotated[
        list[str],
        typer.Option(
            help="The column of times; or those of date and time, or year, month, day, hour.", metavar="A B ..."
        ),
    ],
    horizon: Annotated[
        str,
        typer.Option(
            help="How far ahead to forecast: 30min, PT1.5H, 7D, 12M or 5B; a number where times are numbers.",
            metavar="H",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for forecast.csv, cleaned.csv, forecast.json, figure.png.", metavar="DIR")
    ],
    values: Annotated[
        list[str] | None, typer.Option(help="The columns to forecast; all others by default.", metavar="A B ...")
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="Time between forecasts: 30min, 1MS, 1QE, B; the usual gap by default.", metavar="S"),
    ] = None,
    components: Annotated[
        list[str] | None,
        typer.Option(
            help="Parts of the filter: level, trend, damped-trend, ar, cycle, season:24h:3 (waves), season:7D:free; "
            "those that would have forecast best by default.",
            metavar="C ...",
        ),
    ] = None,
    not_robust: Annotated[
        bool, typer.Option("--not-robust", help="Use the Kalman filter, which believes each reading.")
    ] = False,
    positive: Annotated[bool, typer.Option("--positive", help="All values are above 0: no forecast is less.")] = False,
    counts: Annotated[bool, typer.Option("--counts", help="No value is negative: no forecast is, either.")] = False,
    angle: Annotated[
        float | None, typer.Option(help="A whole turn, such as 360, where all values are angles.", metavar="DEGREES")
    ] = None,
    sensor: Annotated[
        str | None, typer.Option(help="A column that names the sensor of each row.", metavar="COLUMN")
    ] = None,
    date_format: Annotated[str | None, _of_table(says="Format of dates, such as %d.%m.%Y.", metavar="FORMAT")] = None,
    time_unit: Annotated[
        str | None, _of_table(says="Unit of epoch stamps; number for plain numbers.", metavar="s|ms|us|ns|number")
    ] = None,
    zone: Annotated[
        str | None, _of_table(says="The place whose clock dates show, such as Europe/Berlin.", metavar="ZONE")
    ] = None,
    epoch: Annotated[
        str | None,
        _of_table(says="The date of stamp 0: 1980-01-06 of GPS, 1904-01-01, 1989-12-31 of FIT.", metavar="DATE"),
    ] = None,
    separator: Annotated[
        str | None, _of_table(says="What separates cells: a sign, tab or space.", metavar="SIGN")
    ] = None,
    decimal: Annotated[str | None, _of_table(says="Sign before the decimals of numbers.", metavar="SIGN")] = None,
    thousands: Annotated[str | None, _of_table(says="Sign between thousands.", metavar="SIGN")] = None,
    encoding: Annotated[str | None, _of_table(says="Encoding of the text, such as cp1252.", metavar="NAME")] = None,
    missing: Annotated[
        list[str] | None, _of_table(says="Marks of missing readings, such as -999 9999.", metavar="MARK ...")
    ] = None,
    duplicates: Annotated[
        str | None, _of_table(says="What becomes of rows of one time that differ.", metavar="mean|first|last|refuse")
    ] = None,
    sort: Annotated[
        bool, _of_table("--sort/--no-sort", says="Put rows in order of time, or refuse those that are not.")
    ] = True,
    skip_rows: Annotated[int, _of_table(says="Lines to leave out before the header.", metavar="N")] = 0,
    comment: Annotated[str | None, _of_table(says="Sign that begins a comment, such as #.", metavar="SIGN")] = None,
    skip_bad_rows: Annotated[
        bool, _of_table("--skip-bad-rows", says="Leave out, and count, rows without a time or with text for numbers.")
    ] = False,
    no_header: Annotated[
        bool, _of_table("--no-header", says="The first row has readings; the columns are named 1, 2, ...")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a forecast that is there.")] = False,
) -> None:
    """Forecast the columns of a CSV file with 50 and 90 % intervals, and list the outliers of the past.

    An empty cell is a missing reading. Times may have any gaps.
    """
    from rfa.forecasting.output import forecast_file
    from rfa.forecasting.request import ForecastRequest
    from rfa.forecasting.table import TableFormat

    check_out(out)
    request = ForecastRequest(
        file=file,
        time=time[0] if len(time) == 1 else tuple(time),
        values=values,
        horizon=horizon,
        step=step,
        sensor=sensor,
        table_format=TableFormat(**{each.name: ctx.params[each.name] for each in fields(TableFormat)}),
        components=components,
        robust=not not_robust,
        positive=positive,
        counts=counts,
        angle=angle,
    )
    with interruptible("start again with the same command"), progress_bars() as bar:
        content = forecast_file(
            request,
            out,
            overwrite=overwrite,
            progress=lambda stage, *far: bar(one_line(f"{stage.run}: {stage.name}"), *far),
        )
    _print_forecast(content, out)


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
    for label, file in (
        ("forecast", "forecast.csv"),
        ("cleaned", "cleaned.csv"),
        ("details", "forecast.json"),
        ("figure", "figure.png"),
    ):
        say(f"{label + ':':10}{out / file}")
