"""The command around result files: report."""

from pathlib import Path
from typing import Annotated

import typer

from rfa.report.console import progress_bars

from .app import app, console, errors, one_line


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(help="What `rfa experiment` made, or a folder of result files.", metavar="DIR")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; DIR/report by default.", metavar="DIR2")
    ] = None,
) -> None:
    """Tables (Markdown, LaTeX, CSV), figures (PNG, PDF) and one HTML page from result files alone.

    What is missing is named, here and on the page. Exit status 1 where a file could not be read; the rest is drawn.
    """
    from rfa.report.folder import read_results
    from rfa.report.write import write_report

    with progress_bars() as bar:
        found = read_results(folder, bar)
        written = write_report(found.runs, out or folder / "report", found.missing, bar)
    for name, reason in written.missing.items():
        (errors if name in found.refused else console).print(
            one_line(f"rfa: missing: {name}: {reason}"), highlight=False, soft_wrap=True
        )
    tables, figures = len(written.tables), len(written.figures)
    console.print(f"runs: {len(found.runs)}, tables: {tables}, figures: {figures}", highlight=False)
    console.print(f"page: {written.page}", highlight=False, soft_wrap=True)
    if found.refused:
        raise typer.Exit(1)
