"""Write a report: every table in three formats, every figure in two, and one self-contained HTML page."""

from rfa.checks import needs

needs("jinja2", "PIL")

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from rfa.files import OUTPUT, write_text_whole
from rfa.forecasting.style import save
from rfa.progress import Progress

from .contents import APPENDIX, ListedFigure, listed_figures, listed_tables
from .layout import NumberCell, Table, alignment, comma_separated, latex, markdown, text_of
from .runs import MissingData, Run
from .summary import facts
from .tables import published_results

_COARSE = 150  # dots per inch of the many panels of the appendix
_FORMS = {"md": markdown, "tex": latex, "csv": comma_separated}


class Report(NamedTuple):
    """The written files: `index.html`, and tables and figures by name; and why another one is missing, by name."""

    page: Path
    tables: list[str]
    figures: list[str]
    missing: dict[str, str]


class DrawnFigure(NamedTuple):
    """A drawn figure: name, caption, a sentence on runs without data, the bytes of the PNG, and the width in inches."""

    name: str
    caption: str
    without: str
    png: bytes
    width: float


def write_report(
    runs: Sequence[Run],
    out: Path,
    missing: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write `tables/*.{md,tex,csv}`, `figures/*.{png,pdf}` and, last, `index.html`, each of them whole.

    The same runs give the same files, byte for byte. Other files in the folder stay. An empty file `.rfa-output` marks
    the folder, so that `rfa train` does not take the tables for text.

    Without runs the report shows the paper's published numbers. The page lists what is `missing` by name and reason.
    `progress` is called with the number of tables and figures made so far, and their total number.
    """
    left_out = dict(missing or {})
    planned, drawn = listed_tables(runs), listed_figures(runs)

    def say(done: int) -> None:
        if progress is not None:
            progress(done, len(planned) + len(drawn))

    tables: list[Table] = []
    for done, listed_table in enumerate(planned):
        say(done)
        try:
            tables.append(listed_table.make())
        except MissingData as error:
            left_out[f"table {listed_table.name}"] = str(error)
            continue
        for suffix, form in _FORMS.items():
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
    say(len(planned) + len(drawn))
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


_DISTANT = ("position", "retrieval")
_CSS_INCH = 120  # pixels on the page for an inch of a figure; a figure's smallest letters have seven points


def render_page(
    runs: Sequence[Run], tables: Sequence[Table], figures: Sequence[DrawnFigure], missing: Mapping[str, str]
) -> str:
    """The HTML page. Script, style and images are inside the page, so it loads nothing from a network.

    The section on distant tokens has the table `attention`, the tables of probes, and the figures `position` and
    `retrieval`.
    """
    environment = Environment(
        loader=PackageLoader("rfa_lab.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = map(_read, ("explorer.js", "style.css"))
    sections: dict[str, list[dict[str, object]]] = {"runs": [], "probes": [], "tables": []}
    for table in tables:
        of_distance = table.name.startswith("probe-") or table.name == "attention"
        sections["runs" if table.name == "runs" else "probes" if of_distance else "tables"].append(_view(table))
    drawn: dict[str, list[dict[str, object]]] = {"appendix": [], "distant": [], "figures": []}
    for figure in figures:
        section = "distant" if figure.name in _DISTANT else "figures"
        drawn["appendix" if figure.name.endswith(APPENDIX) else section].append(_image(figure))
    return environment.get_template("page.html.jinja").render(
        title=f"{', '.join(sorted({run['recipe'] for run in runs})) or 'No results'}: Robust Filter Attention",
        facts=facts(runs),
        missing=missing,
        source=published_results()["source"],
        script=Markup(script),
        style=Markup(style),
        script_hash=_hash(script),
        style_hash=_hash(style),
        **sections,
        **drawn,
    )


def _read(name: str) -> str:
    return files("rfa_lab.report").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The sha256 of the page's own script or style. The page's content security policy allows no others."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _view(table: Table) -> dict[str, object]:
    """A table for the template: each cell as its text, its alignment, and whether it is the best."""
    sides = alignment(table)
    rows = [
        [
            (text_of(cell), side, isinstance(cell, NumberCell) and cell.best)
            for cell, side in zip(row, sides, strict=True)
        ]
        for row in table.rows
    ]
    heads = list(zip(table.columns, sides, strict=True))
    return {"name": table.name, "caption": table.caption, "heads": heads, "rows": rows, "notes": table.notes}


def _image(figure: DrawnFigure) -> dict[str, object]:
    """A figure for the template, its image as lossless WebP, which has half the bytes of the PNG."""
    packed = io.BytesIO()
    with Image.open(io.BytesIO(figure.png)) as image:
        image.convert("RGB").save(packed, "webp", lossless=True)
    data, width = base64.b64encode(packed.getvalue()).decode(), round(figure.width * _CSS_INCH)
    return {"name": figure.name, "caption": figure.caption, "without": figure.without, "data": data, "width": width}
