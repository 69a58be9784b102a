"""The report's self-contained HTML page: facts about the runs, tables, figures, and an explorer of one head."""

from rfa.checks import needs

needs("jinja2", "PIL")

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from rfa_lab.report.layout import NumberCell, Table, alignment, text_of
from rfa_lab.report.runs import Run
from rfa_lab.report.summary import facts
from rfa_lab.report.tables import published_results

__all__ = ["APPENDIX", "DrawnFigure", "render_page"]

_DISTANT = ("position", "retrieval")
APPENDIX = "-all"  # at the end of the name of a figure of the appendix
_CSS_INCH = 120  # pixels on the page for an inch of a figure; a figure's smallest letters have seven points


class DrawnFigure(NamedTuple):
    """A drawn figure: name, caption, a sentence on runs without data, the bytes of the PNG, and the width in inches."""

    name: str
    caption: str
    without: str
    png: bytes
    width: float


def render_page(
    runs: Sequence[Run], tables: Sequence[Table], figures: Sequence[DrawnFigure], missing: Mapping[str, str]
) -> str:
    """The HTML page. Script, style and images are inside the page, so it loads nothing from a network.

    Args:
        runs: contents of result files.
        tables, figures: in their order on the page. The section on distant tokens has the table `attention`, the tables
            whose names begin with `probe-`, and the figures `position` and `retrieval`. Figures whose names end with
            `APPENDIX` are in the appendix.
        missing: the reason why a table, figure or run is missing, by name.
    """
    environment = Environment(
        loader=PackageLoader("rfa_lab.report.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = _read("explorer.js"), _read("style.css")
    of_distance = [table for table in tables if table.name.startswith("probe-") or table.name == "attention"]
    appendix = {figure.name for figure in figures if figure.name.endswith(APPENDIX)}
    of_runs = [table for table in tables if table.name == "runs"]
    return environment.get_template("page.html.jinja").render(
        title=f"{', '.join(sorted({run['recipe'] for run in runs})) or 'No results'}: Robust Filter Attention",
        facts=facts(runs),
        runs=[_view(table) for table in of_runs],
        tables=[_view(table) for table in tables if table not in (*of_distance, *of_runs)],
        probes=[_view(table) for table in of_distance],
        figures=[_image(figure) for figure in figures if figure.name not in (*_DISTANT, *appendix)],
        distant=[_image(figure) for figure in figures if figure.name in _DISTANT],
        appendix=[_image(figure) for figure in figures if figure.name in appendix],
        missing=missing,
        source=published_results()["source"],
        script=Markup(script),
        style=Markup(style),
        script_hash=_hash(script),
        style_hash=_hash(style),
    )


def _read(name: str) -> str:
    return files("rfa_lab.report.page").joinpath(name).read_text(encoding="utf-8")


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
    width = round(figure.width * _CSS_INCH)
    data = base64.b64encode(_webp(figure.png)).decode()
    return {"name": figure.name, "caption": figure.caption, "without": figure.without, "data": data, "width": width}


def _webp(png: bytes) -> bytes:
    """The same pixels as lossless WebP, which has half the bytes."""
    packed = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").save(packed, "webp", lossless=True)
    return packed.getvalue()
