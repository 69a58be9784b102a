"""The tables and figures of series-record.md, from the records in results/: `python docs/record/series_record.py`."""

from collections.abc import Sequence
from pathlib import Path

from rfa.files import write_text_whole
from rfa.forecasting.style import save
from rfa_lab.report.layout import NumberCell, Table, first_number, markdown, replace_between
from rfa_lab.report.records import Results, ratio_figure, series_ratio, series_table, settings_of
from rfa_lab.results import read_record

PAGE = Path(__file__).with_name("series-record.md")
RECORDS = Path(__file__).parents[2] / "results"
FIGURES = Path(__file__).parents[1] / "figures"
_MOST_COLUMNS = 9
SIMULATED = ("oscillator", "two-oscillators", "tracker", "contamination")
DRAWN = {
    "oscillator": ("robust", "x2", "c9", "c10", "RoPE", "ALiBi", "RoPE and ALiBi", "GRU-D"),
    "contamination": ("robust", "student-t", "exponential", "dot product", "gate", "student-t clean", "gate clean"),
}


def ratios(results: Results, part: str, reference: str, name: str) -> Table:
    """Squared errors over those of a reference, with half the relative width of the interval."""

    def cell(label: str, column: str) -> NumberCell | None:
        found = series_ratio(results, label, reference, column, part)
        if found is None:
            return None
        mean, half = found
        return NumberCell(mean, None if half is None else mean * half)

    columns, labels = settings_of(results, part), dict.fromkeys(one["label"] for one in results)
    rows = [(label, *(cell(label, column) for column in columns)) for label in labels]
    rows.sort(key=lambda row: first_number(row, 1, missing=0.0))
    return Table(name, "", ("model", *columns), tuple(rows))


def tables(name: str) -> dict[str, Table]:
    """The tables of one record, by the names of their marks."""
    results = read_record(RECORDS / f"series-{name}", "series")
    if name in SIMULATED:
        parts = ("filter", "forecast")
        return {f"{name} {part}": ratios(results, part, "wolf", f"{name} {part}") for part in parts}
    return {f"{name} {score}": series_table(results, "forecast", score) for score in ("mse", "nll", "coverage")}


def written(page: str) -> str:
    """The page with the records' tables, each between its marks."""
    for name in (*SIMULATED, "etth1"):
        for mark, table in tables(name).items():
            text = "\n".join(markdown(part) for part in _parts(table))
            begin, end = f"<!-- {mark}: docs/record/series_record.py -->", f"<!-- end of {mark} -->"
            page = replace_between(page, begin, end, f"\n{text}\n")
    return page


def _parts(table: Table) -> list[Table]:
    """The table without notes, in two where its lines would be too long to read."""
    half = (len(table.columns) + 1) // 2 if len(table.columns) > _MOST_COLUMNS else len(table.columns)
    kept = [range(1, half)] + ([range(half, len(table.columns))] if half < len(table.columns) else [])
    found = []
    for part in kept:
        columns = (0, *part)
        rows = tuple(tuple(row[k] for k in columns) for row in table.rows)
        found.append(Table(table.name, "", tuple(table.columns[k] for k in columns), rows))
    return found


def draw(name: str, labels: Sequence[str]) -> None:
    """The figure of a record: ratios to WoLF."""
    save(
        ratio_figure(read_record(RECORDS / f"series-{name}", "series"), "wolf", labels), FIGURES / f"series-{name}.png"
    )


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
    for record, labels in DRAWN.items():
        draw(record, labels)
