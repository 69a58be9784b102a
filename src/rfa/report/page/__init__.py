"""One self-contained HTML page: what was run, tables, figures, and an explorer of one head."""

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from ..layout import NumberCell, Table, alignment, text_of
from ..runs import Run
from ..summary import facts
from ..tables import published_results

__all__ = ["DrawnFigure", "render_page"]

_DISTANT = ("position", "retrieval")
_CSS_INCH = 120  # pixels of the page for an inch of a figure, whose smallest letters have seven points


class DrawnFigure(NamedTuple):
    """A figure that was drawn: its name, caption, the runs missing in it, the PNG's bytes and its width in inches."""

    name: str
    caption: str
    without: str
    png: bytes
    width: float


def render_page(
    runs: Sequence[Run], tables: Sequence[Table], figures: Sequence[DrawnFigure], missing: Mapping[str, str]
) -> str:
    """The page, with script, style and images in it; it asks nothing of any network.

    Args:
        runs: contents of result files.
        tables, figures: in their order; the tables `attention` and those whose names begin with `probe-`, and the
            figures `position` and `retrieval`, make the section on the distant past.
        missing: what is not there and why, by name.
    """
    environment = Environment(
        loader=PackageLoader("rfa.report.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = _read("explorer.js"), _read("style.css")
    of_distance = [table for table in tables if table.name.startswith("probe-") or table.name == "attention"]
    of_runs = [table for table in tables if table.name == "runs"]
    return environment.get_template("page.html.jinja").render(
        title=f"{', '.join(sorted({run['recipe'] for run in runs})) or 'No results'}: Robust Filter Attention",
        facts=facts(runs),
        runs=[_view(table) for table in of_runs],
        tables=[_view(table) for table in tables if table not in (*of_distance, *of_runs)],
        probes=[_view(table) for table in of_distance],
        figures=[_image(figure) for figure in figures if figure.name not in _DISTANT],
        past=[_image(figure) for figure in figures if figure.name in _DISTANT],
        missing=missing,
        source=published_results()["source"],
        script=Markup(script),
        style=Markup(style),
        script_hash=_hash(script),
        style_hash=_hash(style),
    )


def _read(name: str) -> str:
    return files("rfa.report.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash by which the page's content policy admits its own script and style, and no others."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _view(table: Table) -> dict[str, object]:
    """A table as the template sets it: cells as text, their alignment, and whether they are the best."""
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
    """The same pixels in half the bytes, which a phone has to fetch."""
    packed = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").save(packed, "webp", lossless=True)
    return packed.getvalue()
