"""Write a report: every table in three formats, every figure in two, and one HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rfa.files import OUTPUT, write_text_whole
from rfa.forecasting.style import save
from rfa.progress import Progress

from .contents import ListedFigure, listed_figures
from .layout import Table, comma_separated, latex, markdown
from .page import APPENDIX, DrawnFigure, render_page
from .runs import MissingData, Run
from .table_contents import listed_tables

_COARSE = 150  # dots per inch of the many panels of the appendix
FORMS = {"md": markdown, "tex": latex, "csv": comma_separated}


class Report(NamedTuple):
    """The written files.

    Args:
        page: path of `index.html`.
        tables, figures: names of all that were written.
        missing: the reason why another table, figure or run is missing, by its name.
    """

    page: Path
    tables: list[str]
    figures: list[str]
    missing: dict[str, str]


def write_report(
    runs: Sequence[Run],
    out: Path,
    missing: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write `tables/*.{md,tex,csv}`, `figures/*.{png,pdf}` and, last, `index.html`, each of them whole.

    The same runs give the same files, byte for byte. Other files in the folder stay. An empty file `.rfa-output` marks
    the folder, so that `rfa train` does not take the tables for text.

    Args:
        runs: contents of result files. Without runs the report shows the paper's published numbers and its theory.
        out: a folder, which is made if it does not exist.
        missing: names and reasons of further missing runs or files, which the page lists.
        progress: called with the number of tables and figures made so far, and their total number.

    Raises:
        OSError: if it cannot be written.
    """
    left_out = dict(missing or {})
    planned, drawn = listed_tables(runs), listed_figures(runs)
    steps = len(planned) + len(drawn)

    def say(done: int) -> None:
        if progress is not None:
            progress(done, steps)

    tables: list[Table] = []
    for done, listed_table in enumerate(planned):
        say(done)
        try:
            tables.append(listed_table.make())
        except MissingData as error:
            left_out[f"table {listed_table.name}"] = str(error)
            continue
        for suffix, form in FORMS.items():
            write_text_whole(out / "tables" / f"{listed_table.name}.{suffix}", form(tables[-1]))
    shown: list[DrawnFigure] = []
    for done, listed_figure in enumerate(drawn, len(planned)):
        say(done)
        try:
            shown.append(_draw(listed_figure, runs, out / "figures"))
        except MissingData as error:
            left_out[f"figure {listed_figure.name}"] = str(error)
    page = out / "index.html"
    write_text_whole(out / OUTPUT, "")
    write_text_whole(page, render_page(runs, tables, shown, left_out))
    say(steps)
    return Report(page, [table.name for table in tables], [each.name for each in shown], left_out)


def _draw(listed: ListedFigure, runs: Sequence[Run], folder: Path) -> DrawnFigure:
    """Draw and save a figure. Raises `MissingData` if no run has its data."""
    without = [run["run"] for run in runs if not listed.has(run)]
    if listed.what and len(without) == len(runs):
        raise MissingData(f"no run has {listed.what}")
    image = folder / f"{listed.name}.png"
    figure = listed.draw(runs)
    save(figure, image, image.with_suffix(".pdf"), **({"dots": _COARSE} if listed.name.endswith(APPENDIX) else {}))
    without_it = f"Without {listed.what}: {', '.join(without)}." if without and listed.what else ""
    return DrawnFigure(listed.name, listed.caption, without_it, image.read_bytes(), figure.get_figwidth())
