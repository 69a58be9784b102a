"""A record as tables (Markdown, LaTeX, CSV), figures (PNG, PDF) and one HTML page that loads nothing else."""

from rfa.checks import needs

needs("matplotlib", "jinja2")

import base64
import math
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from rfa.files import OUTPUT, write_text_whole
from rfa.forecasting.figure import save
from rfa.progress import Progress
from rfa_lab.record import Record, read_record

from .figures import Drawing, record_figures
from .statistics import differences, over_seeds
from .tables import BASELINES, published_results, record_tables, setting

_CSS_INCH = 110  # pixels on the page for an inch of a figure


class Report(NamedTuple):
    """The page, the names of tables and figures, and why a run is missing, by name."""

    page: Path
    tables: list[str]
    figures: list[str]
    missing: dict[str, str]


def write_report(source: str | Path, out: Path, progress: Progress | None = None) -> Report:
    """Write `tables/*.{md,tex,csv}`, `figures/*.{png,pdf}` and, last, `index.html`, each of them whole.

    An empty file `.rfa-output` marks the folder, so that `rfa train` does not take the tables for text.

    Args:
        source: a recipe's folder, or a record's Parquet file. Maps of attention lie beside it as `RUN.npz`.
        out: the folder of the report.
        progress: called with the number of figures drawn so far, and their total number.

    Raises:
        ValueError: as `read_record`, and for damaged maps.
    """
    record, missing = read_record(source)
    folder = Path(source) if Path(source).is_dir() else Path(source).with_suffix("")
    maps = {
        file.stem: file
        for file in [*folder.glob("*.npz"), *(folder / "results").glob("*.npz")]
        if file.stem in record.settings
    }
    tables, drawings = record_tables(record), record_figures(record, maps)
    for table in tables:
        texts = {"md": table.markdown(), "tex": table.latex(), "csv": table.numbers.to_csv(index=False)}
        for suffix, text in texts.items():
            write_text_whole(out / "tables" / f"{table.name}.{suffix}", text)
    figures = []
    for done, drawing in enumerate(drawings):
        if progress is not None:
            progress(done, len(drawings))
        figures.append(_drawn(drawing, out / "figures"))
    write_text_whole(out / OUTPUT, "")
    environment = Environment(
        loader=PackageLoader("rfa_lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.jinja").render(
        title=f"{next(iter(record.settings.values()))['recipe']}: Robust Filter Attention",
        findings=findings(record),
        missing=missing,
        figures=figures,
        tables=tables,
        source=published_results()["source"],
    )
    write_text_whole(out / "index.html", page)
    if progress is not None:
        progress(len(drawings), len(drawings))
    return Report(out / "index.html", [table.name for table in tables], [each["name"] for each in figures], missing)


def _drawn(drawing: Drawing, folder: Path) -> dict[str, Any]:
    """A figure that is drawn and saved, for the template."""
    figure, image = drawing.draw(), folder / f"{drawing.name}.png"
    width = round(figure.get_figwidth() * _CSS_INCH)
    save(figure, image, image.with_suffix(".pdf"))
    data = base64.b64encode(image.read_bytes()).decode()
    return {"name": drawing.name, "caption": drawing.caption, "data": data, "width": width}


def findings(record: Record) -> list[str]:
    """What a record says first: its runs, and at the trained and the longest length the best model and its lead."""
    lines = [f"{len(record.settings)} runs of {len(record.labels())} models. {setting(record)}"]
    for protocol in record.protocols():
        means, _ = over_seeds(record.values(f"loss {protocol}"))
        compared = differences(record, BASELINES[0], protocol)
        trained = {each["train_length"] for each in record.settings.values()}
        for length in sorted({float(min(trained)), max(means)} & set(means)):
            best = str(means[length].idxmin())
            line = (
                f"{protocol}, {length:g} tokens: {best} has the lowest perplexity, {math.exp(means[length].min()):.2f}"
            )
            if (of := compared.get(best, {}).get(length)) is not None:
                half = "" if math.isnan(of.half) else f" ± {of.half:.3f}"
                line += f"; {of.value:+.3f}{half} nats against {BASELINES[0]}" + (
                    f" ({of.verdict})" if of.verdict else ""
                )
            lines.append(f"{line}.".replace("-0.", "\N{MINUS SIGN}0."))
    return lines


__all__ = ["Report", "findings", "write_report"]
