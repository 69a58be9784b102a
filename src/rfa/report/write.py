"""A report on disk: every table in three forms, every figure in two, and one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rfa.files import write_text_whole
from rfa.progress import Progress

from .contents import tablings
from .drawings import Drawing, drawings
from .figures import save
from .lacking import Lacking
from .layout import Table, comma_separated, latex, markdown
from .page import Shown, render_page
from .runs import Run

FORMS = {"md": markdown, "tex": latex, "csv": comma_separated}


class Report(NamedTuple):
    """What was written.

    Args:
        page: path of `index.html`.
        tables, figures: their names.
        missing: why another table, figure or run is not there, by its name.
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

    The same runs give the same files, to the byte. Files of other names stay.

    Args:
        runs: contents of result files; where there are none, what the paper published and its theory are the report.
        out: a folder, made where it is not there.
        missing: what the page is to name as missing, and why.
        progress: called with how many tables and figures are made, and how many there are.

    Raises:
        OSError: if it cannot be written.
    """
    left_out = dict(missing or {})
    planned, drawn = tablings(runs), drawings(runs)
    steps = len(planned) + len(drawn)

    def say(done: int) -> None:
        if progress is not None:
            progress(done, steps)

    tables: list[Table] = []
    for done, tabling in enumerate(planned):
        say(done)
        try:
            tables.append(tabling.make())
        except Lacking as error:
            left_out[f"table {tabling.name}"] = str(error)
            continue
        for suffix, form in FORMS.items():
            write_text_whole(out / "tables" / f"{tabling.name}.{suffix}", form(tables[-1]))
    shown: list[Shown] = []
    for done, drawing in enumerate(drawn, len(planned)):
        say(done)
        try:
            shown.append(_draw(drawing, runs, out / "figures"))
        except Lacking as error:
            left_out[f"figure {drawing.name}"] = str(error)
    page = out / "index.html"
    write_text_whole(page, render_page(runs, tables, shown, left_out))
    say(steps)
    return Report(page, [table.name for table in tables], [each.name for each in shown], left_out)


def _draw(drawing: Drawing, runs: Sequence[Run], folder: Path) -> Shown:
    """Draw and save a figure; `Lacking` where no run has what it shows."""
    without = [run["run"] for run in runs if not drawing.has(run)]
    if drawing.what and len(without) == len(runs):
        raise Lacking(f"no run has {drawing.what}")
    image = folder / f"{drawing.name}.png"
    figure = drawing.draw(runs)
    save(figure, image, image.with_suffix(".pdf"))
    lacking = f"Without {drawing.what}: {', '.join(without)}." if without and drawing.what else ""
    return Shown(drawing.name, drawing.caption, lacking, image.read_bytes(), figure.get_figwidth())
