"""Lines of `rfa bench` as tables and curves. Ratios come first, times beside them."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rfa.version import short_commit

from .layout import pipe_table

Line = Mapping[str, Any]

COLUMNS = ("what", "size", "dtype", "against", "ratio", "quartiles", "range", "rfa", "peer", "of bound: rfa, peer")
WHOLE = ("step", "generate")  # of a whole model
_NAMES = {"step": "training step", "decode": "decoding", "generate": "a token of `generate`"}
_PASSES = {"forward_backward": "forward + backward"}


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
        what = f"{line['contestant']}, {_PASSES.get(line['pass'], line['pass'])}"
        counts = [f"{line[name]:.1f}" for name in ("per_pair", "products_per_pair", "functions_per_pair")]
        counts = [f"{line['instructions']:,}", *counts, f"{line['share']:.0%}"]
        rows.append((what, _size(line), line["march"], *counts, short_commit(line["environment"]["commit"])))
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
        name = f"{_PASSES.get(line['pass'], line['pass'])} / {line['peer']}"
        if told := [each for each, differs in zip(kind, differing, strict=True) if differs]:
            name += f" ({', '.join(told)})"
        curves.setdefault(name, {})[line["length"]] = line
    return {name: [of[length] for length in sorted(of)] for name, of in curves.items()}


def fraction_of_bound(line: Line, contestant: str = "rfa") -> float | None:
    """The shortest possible time of the work over its median time; None for a line without a bound."""
    if "bound" not in line:
        return None
    return line["bound"][contestant]["seconds"] / median(line["seconds"][contestant])


def speed_cells(line: Line) -> list[str]:
    """The cells of a line under `COLUMNS`."""
    what = str(_NAMES.get(line["benchmark"], line["benchmark"]))
    if "pass" in line and line["benchmark"] in ("operator", "memory"):
        what += f", {_PASSES.get(line['pass'], line['pass'])}"
    size = _size(line)
    named = f"{line['preset']} ({line['backend']})"
    if "ratio" not in line and line["check"]["passed"]:
        return [what, size, line["dtype"], named, "not timed", "no peer ran", *[""] * 4]
    if "ratio" not in line:
        found = {name: float("inf") if error is None else error for name, error in line["check"]["errors"].items()}
        worst = max(found, key=found.__getitem__)
        error = "not finite" if line["check"]["errors"][worst] is None else f"{found[worst]:.1e}"
        return [what, size, line["dtype"], named, "check failed", f"{worst}: {error}", *[""] * 4]
    ratio = line["ratio"]
    spread = [f"{ratio['q1']:.3f} to {ratio['q3']:.3f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}"]
    if len(line["ratios"]) == 1:
        spread = ["", ""]
    if "bytes" in line:
        figures = [f"{line['bytes'][name] / 1e6:,.0f} MB" for name in ("rfa", "peer")]
    else:
        figures = [_time(median(line["seconds"][name])) for name in ("rfa", "peer")]
    fractions = [fraction_of_bound(line, name) for name in ("rfa", "peer")]
    bound = "" if None in fractions else f"{fractions[0]:.0%}, {fractions[1]:.0%}"
    return [what, size, line["dtype"], f"{named} / {line['peer']}", f"{ratio['median']:.3f}", *spread, *figures, bound]


def _size(line: Line) -> str:
    if line["benchmark"] not in WHOLE:
        return " x ".join(str(line[name]) for name in ("batch", "heads", "length", "channels"))
    model = dict(line["model"])
    width, layers, vocabulary = (model.pop(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = model.pop("num_attention_heads")
    parts = [f"{line['batch']} x {line['length']}", f"{layers} layers of {width}", f"{heads} heads"]
    return ", ".join([*parts, f"vocabulary {vocabulary}", *(f"{name}={value}" for name, value in model.items())])


def _configuration(line: Line) -> tuple:
    """The configuration of a line: its fields without the measurements and the time."""
    names = ("benchmark", "pass", "preset", "batch", "heads", "length", "channels", "dtype", "backend", "peer")
    more = ("contestant", "march", "model", "device", "threads", "processor")
    return tuple(str(line.get(name)) for name in names + more)


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
