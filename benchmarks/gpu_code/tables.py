"""What `machine_code.py` counted, as tables."""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rfa_lab.bench.results import Line

_GROUPS = {
    "tensor": ("tensor",),
    "func.": ("function", "slow convert"),
    "FMA": ("float", "integer multiply"),
    "ALU": ("integer", "logic", "compare", "select", "move", "convert"),
    "mem.": ("global", "shared", "tensor memory", "local", "shuffle"),
    "copy": ("copy",),
}
COUNT_COLUMNS = ("a pair", *_GROUPS, "rest", "cond.")  # the last one is not part of the first
KERNEL_COLUMNS = ("registers", "spills", "shared KiB", "programs", "busiest unit", "to issue")


def headings(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines grouped under headings that say what a table's rows have in common."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(f"{line['arch']}, {line['dtype']}, {line['channels']} channels", []).append(line)
    return found


def count_rows(line: Line) -> list[list[str]]:
    """A kernel's name and `COUNT_COLUMNS`, and a row for each further loop."""
    rows = []
    for name, loop in _loops(line):
        kinds = dict(loop["by_kind"])
        groups = [sum(kinds.pop(kind, 0.0) for kind in names) for names in _GROUPS.values()]
        figures = (loop["instructions_per_pair"], *groups, sum(kinds.values()), loop["conditional_per_pair"])
        rows.append([name, *(f"{figure:.1f}" for figure in figures)])
    return rows


def kernel_rows(line: Line) -> list[list[str]]:
    """A kernel's name and `KERNEL_COLUMNS`, and a row for each further loop, which has cycles only."""
    of_kernel = [str(line[name]) for name in ("registers", "spills", "programs_per_multiprocessor")]
    of_kernel.insert(2, f"{line['shared_bytes'] / 1024:.0f}")
    rows = []
    for name, loop in _loops(line):
        cycles, busiest = loop["cycles_per_pair"], loop["busiest_unit"]
        figures = [f"{cycles[busiest]:.3f} {busiest}", f"{cycles['issue']:.3f}"]
        rows.append([name, *(of_kernel if loop is line["loops"][0] else [""] * len(of_kernel)), *figures])
    return rows


def _loops(line: Line) -> Iterator[tuple[str, Line]]:
    for number, loop in enumerate(line["loops"], 1):
        yield (line["name"] if number == 1 else f"loop {number}"), loop


def counts_by_size(lines: Sequence[Line], times: str) -> str:
    """A Markdown table of instructions for each pair, bfloat16 / float16: a row for a kernel, a column for a size.

    Plain attention, which has no times, is in the table of uniform ones.
    """
    lines = [line for line in lines if line["times"] == times and line["score"] in ("student_t", "softmax")]
    sizes = list(dict.fromkeys((line["arch"], line["channels"]) for line in lines))
    found: dict[str, dict[tuple[str, int], dict[str, float]]] = {}
    for line in lines:
        cell = found.setdefault(line["name"], {}).setdefault((line["arch"], line["channels"]), {})
        cell[line["dtype"]] = line["instructions_per_pair"]
    rows = [["kernel", *(f"{arch}, {channels}" for arch, channels in sizes)], ["---"] * (len(sizes) + 1)]
    for name, by_size in found.items():
        rows.append([name, *(" / ".join(f"{x:.1f}" for x in by_size.get(size, {}).values()) for size in sizes)])
    return _markdown(rows)


def counts_of_size(lines: Sequence[Line], arch: str, dtype: str, channels: int) -> str:
    """A Markdown table with everything that was counted for one size."""
    head = ["kernel", *COUNT_COLUMNS, *KERNEL_COLUMNS]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        if (line["arch"], line["dtype"], line["channels"]) == (arch, dtype, channels):
            rows += [counts + of[1:] for counts, of in zip(count_rows(line), kernel_rows(line), strict=True)]
    return _markdown(rows)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def instruction_tables(lines: Sequence[Line]) -> Group:
    """Two tables for each architecture, dtype and number of channels."""
    tables = []
    for heading, under in headings(lines).items():
        for what, columns, rows in (
            ("instructions of a thread for each pair", COUNT_COLUMNS, count_rows),
            ("and cycles for each pair (estimates)", KERNEL_COLUMNS, kernel_rows),
        ):
            table = Table(title=Text(f"{heading}: {what}"), box=SIMPLE_HEAD, padding=0, collapse_padding=True)
            table.add_column("kernel", overflow="fold")
            for column in columns:
                table.add_column(column, justify="right", no_wrap=True)
            for row in (row for line in under for row in rows(line)):
                table.add_row(*row)
            tables.append(table)
    return Group(*tables)
