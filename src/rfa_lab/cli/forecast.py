"""The commands for series in CSV files: forecast, and forecast train."""

import math
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .app import ManyValues, app, check_out, check_resume, console, one_line, say, stoppable
from .console import metrics_words, progress_bars, stage_words

_LISTED = 10  # outliers of a channel that are printed
_COMPARED = 4  # models whose errors are printed
TimeOption = Annotated[
    list[str],
    typer.Option(help="The column of times; or those of date and time, or year, month, day, hour.", metavar="A B ..."),
]
ValuesOption = Annotated[
    list[str] | None, typer.Option(help="The columns to forecast; all others by default.", metavar="A B ...")
]
HorizonOption = Annotated[
    str,
    typer.Option(
        help="How far ahead to forecast: 30min, PT1.5H, 7D, 12M or 5B; a number where times are numbers.", metavar="H"
    ),
]
PresetOption = Annotated[
    str | None, typer.Option(help="Attention of the network that is trained; rfa by default.", metavar="P")
]
StepsOption = Annotated[int | None, typer.Option(help="Steps of a network's training; 500 by default.")]
RateOption = Annotated[float | None, typer.Option(help="Peak learning rate of a network; 0.003 by default.")]
SeedOption = Annotated[int | None, typer.Option(help="Random seed of a network's training; 0 by default.")]


def _of_table(*names: str, says: str, metavar: str | None = None) -> Any:
    """An option that says how the file is written."""
    panel = "How the file is written (told from it, and said, by default)"
    return typer.Option(*names, help=says, metavar=metavar, rich_help_panel=panel)


_UNITS = _of_table(says="Unit of epoch stamps; number for plain numbers.", metavar="s|ms|us|ns|number")
_MARKS = _of_table(says="Marks of missing readings, such as -999 9999.", metavar="MARK ...")
_EQUAL_TIMES = _of_table(says="What becomes of rows of one time that differ.", metavar="mean|first|last|refuse")
_NO_HEADER = _of_table("--no-header", says="The first row has readings; the columns are named 1, 2, ...")
_BAD_ROWS = _of_table("--skip-bad-rows", says="Leave out, and count, rows without a time or with text for numbers.")
FormatOption = Annotated[str | None, _of_table(says="Format of dates, such as %d.%m.%Y.", metavar="FORMAT")]
TimeUnitOption = Annotated[str | None, _UNITS]
ZoneOption = Annotated[
    str | None, _of_table(says="The place whose clock dates show, such as Europe/Berlin.", metavar="ZONE")
]
EpochOption = Annotated[
    str | None, _of_table(says="The date of stamp 0: 1980-01-06 of GPS, 1904-01-01, 1989-12-31 of FIT.", metavar="DATE")
]
SeparatorOption = Annotated[str | None, _of_table(says="What separates cells: a sign, tab or space.", metavar="SIGN")]
DecimalOption = Annotated[str | None, _of_table(says="Sign before the decimals of numbers.", metavar="SIGN")]
ThousandsOption = Annotated[str | None, _of_table(says="Sign between thousands.", metavar="SIGN")]
EncodingOption = Annotated[str | None, _of_table(says="Encoding of the text, such as cp1252.", metavar="NAME")]
MissingOption = Annotated[list[str] | None, _MARKS]
DuplicatesOption = Annotated[str | None, _EQUAL_TIMES]
SortOption = Annotated[
    bool, _of_table("--sort/--no-sort", says="Put rows in order of time, or refuse those that are not.")
]
SkipRowsOption = Annotated[int, _of_table(says="Lines to leave out before the header.", metavar="N")]
CommentOption = Annotated[str | None, _of_table(says="Sign that begins a comment, such as #.", metavar="SIGN")]
SkipBadRowsOption = Annotated[bool, _BAD_ROWS]
NoHeaderOption = Annotated[bool, _NO_HEADER]


@app.command("forecast", cls=ManyValues)
def forecast(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="CSV file to forecast.", metavar="FILE.csv")],
    time: TimeOption,
    horizon: HorizonOption,
    out: Annotated[
        Path, typer.Option(help="Folder for forecast.csv, cleaned.csv, forecast.json, figure.png.", metavar="DIR")
    ],
    values: ValuesOption = None,
    model: Annotated[
        str, typer.Option(help="Model: a filter for each column, or a network for all.", metavar="filter|network")
    ] = "filter",
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
        str | None, typer.Option(help="A column that names the sensor of each row; filter only.", metavar="COLUMN")
    ] = None,
    date_format: FormatOption = None,
    time_unit: TimeUnitOption = None,
    zone: ZoneOption = None,
    epoch: EpochOption = None,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    thousands: ThousandsOption = None,
    encoding: EncodingOption = None,
    missing: MissingOption = None,
    duplicates: DuplicatesOption = None,
    sort: SortOption = True,
    skip_rows: SkipRowsOption = 0,
    comment: CommentOption = None,
    skip_bad_rows: SkipBadRowsOption = False,
    no_header: NoHeaderOption = False,
    network: Annotated[
        Path | None, typer.Option(help="A folder of `rfa forecast train`; without it one is trained here.", metavar="N")
    ] = None,
    preset: PresetOption = None,
    steps: StepsOption = None,
    rate: RateOption = None,
    seed: SeedOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a training in --out that was stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a forecast that is there.")] = False,
) -> None:
    """Forecast the columns of a CSV file with 50 and 90 % intervals, and list the outliers of the past.

    An empty cell is a missing reading. Times may have any gaps. A filter needs no training and is the default.

    `rfa forecast train` trains a network on many series, `--network` uses it: see `rfa forecast train --help`.
    """
    from rfa.forecasting.request import ForecastRequest
    from rfa_lab.training.forecast_network import forecast_file

    check_out(out)
    request = ForecastRequest(
        file=file,
        time=_time(time),
        values=values,
        horizon=horizon,
        step=step,
        sensor=sensor,
        table_format=_table_format(ctx),
        components=components,
        robust=not not_robust,
        positive=positive,
        counts=counts,
        angle=angle,
    )
    go_on = "go on with the same command and --resume"
    with stoppable(go_on), progress_bars() as bar:
        content = forecast_file(
            request,
            out,
            model=model,
            network=network,
            training={"preset": preset, "steps": steps, "rate": rate, "seed": seed},
            overwrite=overwrite,
            resume=resume,
            progress=lambda stage, *far: bar(one_line(stage_words(stage)), *far),
            training_progress=_training_bar(bar),
        )
    _print_forecast(content, out)


@app.command("forecast train", cls=ManyValues)
def forecast_train(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the network.", metavar="DIR")],
    files: Annotated[
        list[Path] | None, typer.Argument(help="CSV files, or folders of them.", metavar="FILE.csv ...")
    ] = None,
    time: TimeOption = (),  # type: ignore[assignment]
    values: ValuesOption = None,
    series: Annotated[
        str | None, typer.Option(help="A column that names the series of each row.", metavar="COLUMN")
    ] = None,
    horizon: Annotated[
        str | None, typer.Option(help="How far ahead to forecast: 30min, 24h, 7D or 12M; or a number.", metavar="H")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Rows that the network looks back; those of four horizons by default.", metavar="N"),
    ] = None,
    date_format: FormatOption = None,
    time_unit: TimeUnitOption = None,
    zone: ZoneOption = None,
    epoch: EpochOption = None,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    thousands: ThousandsOption = None,
    encoding: EncodingOption = None,
    missing: MissingOption = None,
    duplicates: DuplicatesOption = None,
    sort: SortOption = True,
    skip_rows: SkipRowsOption = 0,
    comment: CommentOption = None,
    skip_bad_rows: SkipBadRowsOption = False,
    no_header: NoHeaderOption = False,
    hold_out: Annotated[
        float,
        typer.Option(help="Share of the series for validation, or of each one's end where there are fewer than five."),
    ] = 0.2,
    preset: PresetOption = None,
    steps: StepsOption = None,
    rate: RateOption = None,
    seed: SeedOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training in --out where it stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a network that is there.")] = False,
) -> None:
    """Train a network on many series, to forecast others of their kind with `rfa forecast --network DIR`.

    Each file is a series, or each name in the column --series. The validation scores stand beside those of a naive
    forecast. Ctrl-C saves; --resume continues.
    """
    from rfa.forecasting.network import NetworkRequest
    from rfa_lab.training.forecast_network import resume_network, train_network

    check_resume(ctx, resume)
    check_out(out)
    go_on = f"go on with: rfa forecast train --resume --out {shlex.quote(str(out))}"
    with stoppable(go_on), progress_bars() as bar:
        if resume:
            record = resume_network(out, progress=_training_bar(bar))
        else:
            needed = {"FILE": files, "--time": time, "--horizon": horizon}
            if missing := [name for name, value in needed.items() if not value]:
                raise ValueError(f"{missing[0]}: got none, expected one (or --resume)")
            chosen = {"preset": preset, "steps": steps, "rate": rate, "seed": seed, "context": context}
            request = NetworkRequest(
                files=tuple(map(str, files or [])),
                time=_time(time),
                values=None if values is None else tuple(values),
                series=series,
                table_format=_table_format(ctx),
                horizon=horizon or "",
                hold_out=hold_out,
                **{name: value for name, value in chosen.items() if value is not None},  # type: ignore[arg-type]
            )
            record = train_network(request, out, overwrite=overwrite, progress=_training_bar(bar))
    _say_notes(record)
    print_scores(record["scores"], record["request"]["horizon"])
    said = f"{record['series']} series, {record['split']}, {record['steps']} steps"
    say(f"network: {out} ({said})")


def _time(columns: list[str]) -> Any:
    """The column of times, or the columns."""
    return columns[0] if len(columns) == 1 else tuple(columns)


def _table_format(ctx: typer.Context) -> Any:
    """How the files are written, by the options of a command."""
    from rfa.forecasting.table import TableFormat

    return TableFormat(**{field.name: ctx.params[field.name] for field in fields(TableFormat)})


def _training_bar(bar: Any) -> Any:
    return lambda step, steps, metrics: bar("training" + metrics_words(metrics), step, steps, key="train")


def print_scores(scores: dict[str, Any], horizon: str) -> None:
    """A table of the scores of a network beside the naive forecast."""
    table = Table(title=Text(f"validation, up to {horizon} ahead; errors in spreads of the column"))
    for column in ("", "NLL", "squared error", "CRPS", "in 90 %"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in (("network", scores["network"]), (f"naive: {scores['naive']['method']}", scores["naive"])):
        figures = (f"{one[score]:.4f}" for score in ("nll", "mse", "crps"))
        table.add_row(Text(name), *figures, f"{one['coverage']:.1%}")
    console.print(table)
    _say("the network's best weights were chosen on the same windows: it may do worse on new data")


def _say(text: str) -> None:
    """Print a line. Names of columns and sensors come from files, so control characters are taken out."""
    say(one_line(text))


def _say_notes(record: dict[str, Any]) -> None:
    """What was told from the file, or changed; of many files the first lines."""
    for note in record["notes"][:_LISTED]:
        _say(f"note: {note}")
    if more := len(record["notes"][_LISTED:]):
        _say(f"note: {more} more lines of this kind are in network.json")


def _digits(mean: float, width: float) -> int:
    """Significant digits that show an interval of this width on its level, such as a meter's total."""
    return 5 if width <= 0 or mean == 0 else min(15, max(5, 2 + math.floor(math.log10(abs(mean) / width)) + 1))


def _print_forecast(content: dict[str, Any], out: Path) -> None:
    _say_notes(content)
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
    if content.get("scores"):
        print_scores(content["scores"], content["trained_horizon"])
    if content.get("beyond_training"):
        said = f"the network has learned to look {content['trained_horizon']} ahead, not {content['horizon']}"
        _say(f"beware: {said}")
    for name, one in content["channels"].items():
        if "components" in one:
            by = "chosen by the data" if one["chosen"] else "as given"
            of = f", for readings of sensor {one['sensor']}" if "sensor" in one else ""
            _say(f"model of {name}: {one['components']} ({by}){of}")
            if one["tried"]:
                least = sorted(one["tried"].items(), key=lambda each: each[1])[:_COMPARED]
                said = ", ".join(f"{words} {score:.4g}" for words, score in least)
                by = "mean error at this horizon, 2 % more for each parameter and 11 % more with a season"
                _say(f"the least of {len(one['tried'])} models is chosen ({by}): {said}")
        for outlier in one["outliers"][-_LISTED:]:
            weight = "" if outlier["weight"] is None else f", weight {outlier['weight']:.2g}"
            said = f"outlier: {name} {outlier['value']:.6g} at {outlier['time']}, expected {outlier['expected']:.6g}"
            _say(said + weight)
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
