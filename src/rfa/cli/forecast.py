"""The commands for series in CSV files: forecast, and forecast train."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .app import ManyValues, app, console
from .console import progress_bars, stage_words

_LISTED = 10  # outliers of a channel that are printed
TimeOption = Annotated[str, typer.Option(help="The column of times: numbers, or dates by ISO 8601.", metavar="COLUMN")]
ValuesOption = Annotated[
    list[str] | None, typer.Option(help="The columns to forecast; all others by default.", metavar="A B ...")
]
HorizonOption = Annotated[
    str, typer.Option(help="How far ahead: 30min, 24h or 7D; a number where times are numbers.", metavar="H")
]
FormatOption = Annotated[
    str | None, typer.Option(help="Of dates that are not ISO 8601, such as %d.%m.%Y.", metavar="FORMAT")
]


@app.command("forecast", cls=ManyValues)
def forecast(
    file: Annotated[Path, typer.Argument(help="A CSV file with a header.", metavar="FILE.csv")],
    time: TimeOption,
    horizon: HorizonOption,
    out: Annotated[Path, typer.Option(help="Folder for forecast.csv, forecast.json and figure.png.", metavar="DIR")],
    values: ValuesOption = None,
    model: Annotated[
        str, typer.Option(help="filter: one for each column; network: one for all.", metavar="filter|network")
    ] = "filter",
    step: Annotated[str | None, typer.Option(help="Between forecasts; the median gap by default.", metavar="S")] = None,
    components: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the filter: level, trend, season:24h, season:24h:3 (harmonics), cycle, ar; chosen by default.",
            metavar="C ...",
        ),
    ] = None,
    not_robust: Annotated[bool, typer.Option("--not-robust", help="The Kalman filter.")] = False,
    sensor: Annotated[
        str | None, typer.Option(help="A column that names the sensor of each row; filter only.", metavar="COLUMN")
    ] = None,
    date_format: FormatOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a forecast that is there.")] = False,
) -> None:
    """Forecast the columns of a CSV file with 50 and 90 % intervals, and list the outliers of the past.

    An empty cell is a missing reading. Times may have any gaps. The filter needs no training. For a network on many
    series see `rfa forecast train --help`.
    """
    from rfa.experiments import forecasting

    forecasting.check_out(out, overwrite)
    request = forecasting.ForecastRequest(
        file=file,
        time=time,
        values=values,
        horizon=horizon,
        step=step,
        sensor=sensor,
        date_format=date_format,
        components=components,
        robust=not not_robust,
    )
    if model not in ("filter", "network"):
        raise ValueError(f"model: got {model!r}, expected filter or network")
    table, query_times = forecasting.read_request(request)
    with progress_bars() as bar:
        forecaster = forecasting.forecast_by_filter(request, lambda stage, *far: bar(stage_words(stage), *far))
        content = forecasting.write_forecast(request, forecaster, model, out, table, query_times)
    _print_forecast(content, out)


def _print_forecast(content: dict[str, Any], out: Path) -> None:
    table = Table(title=Text(f"{content['horizon']} after {content['last']}"))
    for column in ("column", "readings", "outliers", "at the end", "50 %", "90 %"):
        table.add_column(column, justify="left" if column == "column" else "right", overflow="fold")
    for name, one in content["channels"].items():
        ends = [one["intervals"][level] for level in ("50", "90")]
        table.add_row(
            Text(name),
            f"{content['readings'][name]:,}",
            f"{len(one['outliers']):,}",
            f"{one['mean'][-1]:.5g}",
            *(f"{end['lower'][-1]:.5g} to {end['upper'][-1]:.5g}" for end in ends),
        )
    console.print(table)
    for name, one in content["channels"].items():
        if "components" in one:
            by = "chosen by the data" if one["chosen"] else "as given"
            console.print(f"model of {name}: {one['components']} ({by})", highlight=False, soft_wrap=True)
        for outlier in one["outliers"][-_LISTED:]:
            weight = "" if outlier["weight"] is None else f", weight {outlier['weight']:.2g}"
            said = f"outlier: {name} {outlier['value']:.6g} at {outlier['time']}, expected {outlier['expected']:.6g}"
            console.print(said + weight, highlight=False, soft_wrap=True)
        if len(one["outliers"]) > _LISTED:
            more = len(one["outliers"]) - _LISTED
            console.print(f"{more} earlier outliers of {name} are in forecast.json", highlight=False, soft_wrap=True)
    for label, file in (("forecast", "forecast.csv"), ("details", "forecast.json"), ("figure", "figure.png")):
        console.print(f"{label + ':':10}{out / file}", highlight=False, soft_wrap=True)
