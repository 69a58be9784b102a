"""Lines of `rfa bench` as the tables and the figure of docs/record/performance.md."""

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from rfa.forecasting.style import MUTED, PAGE, draw_lines, lengths_axis, looks, styled
from rfa.version import short_commit
from rfa_lab.bench.results import COLUMNS, PASSES, WHOLE, Line, fraction_of_bound, size_cell, speed_cells
from rfa_lab.report.layout import pipe_table


def latest(lines: Iterable[Line]) -> list[Line]:
    """The newest line of each configuration, in the order of each configuration's first line."""
    found: dict[tuple, Line] = {}
    for line in sorted(lines, key=lambda line: line["time"]):
        found[_configuration(line)] = line
    return list(found.values())


def machine_of(line: Line) -> str:
    """The machine on which a line was measured, for the heading of a table."""
    threads = "" if line["device"] == "cuda" else f", {line['threads']} thread" + "s" * (line["threads"] > 1)
    return f"{line['processor']}{threads}"


def markdown_tables(lines: Sequence[Line]) -> str:
    """One Markdown table for each machine, under a heading of the third level, with versions and commits."""
    parts = []
    for machine in dict.fromkeys(map(machine_of, lines)):
        here = [line for line in lines if machine_of(line) == machine]
        commits = sorted({short_commit(line["environment"]["commit"]) for line in here})
        versions = sorted({f"PyTorch {line['environment']['torch']}" for line in here})
        cells = [speed_cells(line) for line in here]
        models: dict[str, str] = {}
        for row, line in zip(cells, here, strict=True):
            if line["benchmark"] in WHOLE:  # the model's size stands once above the table: rows stay short
                row[1], _, model = row[1].partition(", ")
                row[1] += f" ({models.setdefault(model, chr(ord('a') + len(models)))})"
        rows = [COLUMNS, ["---"] * len(COLUMNS), *cells]
        parts += [f"### {machine}", "", f"{', '.join(versions)}; commit {', '.join(commits)}.", ""]
        parts += [f"Model ({letter}): {model}.\n" for model, letter in models.items()]
        parts += [pipe_table(rows), ""]
    return "\n".join(parts)


def instruction_table(lines: Sequence[Line]) -> str:
    """Instruction counts of benchmarks/instructions.py as a Markdown table.

    The column "share" is the fraction of instructions that products, exponentials and logarithms need.
    """
    head = ("what", "size", "compiled for", "instructions", "a pair", "products", "exp, log", "share", "commit")
    rows: list[Sequence[str]] = [head, ["---"] * len(head)]
    for line in lines:
        what = f"{line['contestant']}, {PASSES.get(line['pass'], line['pass'])}"
        counts = [f"{line[name]:.1f}" for name in ("per_pair", "products_per_pair", "functions_per_pair")]
        counts = [f"{line['instructions']:,}", *counts, f"{line['share']:.0%}"]
        rows.append((what, size_cell(line), line["march"], *counts, short_commit(line["environment"]["commit"])))
    return pipe_table(rows)


def operator_curves(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of the operator, grouped into curves over the length, by the curve's name.

    It names the pass and the peer; preset, machine and dtype where curves differ in them.
    """
    measured = [line for line in lines if line["benchmark"] == "operator" and "ratio" in line]
    kinds = [(line["preset"], machine_of(line), line["dtype"]) for line in measured]
    differing = [len(set(each)) > 1 for each in zip(*kinds, strict=True)]
    curves: dict[str, dict[int, Line]] = {}
    for line, kind in zip(measured, kinds, strict=True):
        name = f"{PASSES.get(line['pass'], line['pass'])} / {line['peer']}"
        if told := [each for each, differs in zip(kind, differing, strict=True) if differs]:
            name += f" ({', '.join(told)})"
        curves.setdefault(name, {})[line["length"]] = line
    return {name: [of[length] for length in sorted(of)] for name, of in curves.items()}


def _configuration(line: Line) -> tuple:
    """The configuration of a line: its fields without the measurements and the time."""
    names = ("benchmark", "pass", "preset", "batch", "heads", "length", "channels", "dtype", "backend", "peer")
    more = ("contestant", "march", "model", "device", "threads", "processor")
    return tuple(str(line.get(name)) for name in names + more)


@styled
def speed_over_length(lines: Sequence[Line]) -> Figure:
    """The operator's time over its peer's time, and the percentages of their bounds that both reach, by length."""
    figure, (ratios, percents) = plt.subplots(1, 2, figsize=(PAGE, 3.3))
    curves = operator_curves(lines)
    lengths = {name: [line["length"] for line in curve] for name, curve in curves.items()}
    draw_lines(ratios, {name: (lengths[name], [line["ratio"]["median"] for line in of]) for name, of in curves.items()})
    look = looks(list(curves))
    for name, curve in curves.items():
        ends = ([line["ratio"][end] for line in curve] for end in ("q1", "q3"))
        ratios.fill_between(lengths[name], *ends, color=look[name]["color"], alpha=0.2, linewidth=0)
        for contestant, style in (("rfa", "-"), ("peer", ":")):
            fractions = [fraction_of_bound(line, contestant) for line in curve]
            values = [float("nan") if fraction is None else 100 * fraction for fraction in fractions]
            percents.plot(lengths[name], values, **{**look[name], "linestyle": style})
    ratios.axhline(1, color=MUTED, linestyle=":", linewidth=1)
    ratios.set(ylabel="time / peer's time (band: quartiles)", ylim=(0, None))
    percents.axhline(100, color=MUTED, linestyle=":", linewidth=1)  # a point above: a peak was measured too low
    percents.set(ylabel="percent of the bound (dotted: peer)", ylim=(0, None))
    ticks = sorted({length for each in lengths.values() for length in each})
    for axes in (ratios, percents):
        lengths_axis(axes, ticks)
        axes.set_xlabel("length (tokens)")
    named = ratios.get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=2, columnspacing=1.0, fontsize="small")
    return figure
