"""The file of results, one line of JSON each, and the cells of a line in tables: ratios first, times beside them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

Line = Mapping[str, Any]

COLUMNS = ("what", "size", "dtype", "against", "ratio", "quartiles", "range", "rfa", "peer", "of bound: rfa, peer")
WHOLE = ("step", "generate")  # of a whole model
PASSES = {"forward_backward": "forward + backward"}
_NAMES = {"step": "training step", "decode": "decoding", "generate": "a token of `generate`"}


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line in one write: no crash or other process leaves a part of it. Raises `OSError` where it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line, allow_nan=False) + "\n"
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # the last line was not finished; it must stay a line of its own
                text = "\n" + text
        data = text.encode()
        if file.write(data) != len(data):
            raise OSError(f"{path}: the disk took only a part of the last line")


def read(path: Path) -> list[dict[str, Any]]:
    """All lines of a file. Raises `OSError`, or `ValueError` with the number of a line that is no JSON object."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text) if text.strip() else {}
        except json.JSONDecodeError:
            line = None
        if not isinstance(line, dict):
            raise ValueError(f"{path}: line {number} is no JSON object")
        if line:
            lines.append(line)
    return lines


def fraction_of_bound(line: Line, contestant: str = "rfa") -> float | None:
    """The shortest possible time of the work over its median time; None for a line without a bound."""
    if "bound" not in line:
        return None
    return line["bound"][contestant]["seconds"] / median(line["seconds"][contestant])


def speed_cells(line: Line) -> list[str]:
    """The cells of a line under `COLUMNS`."""
    what = str(_NAMES.get(line["benchmark"], line["benchmark"]))
    if "pass" in line and line["benchmark"] in ("operator", "memory"):
        what += f", {PASSES.get(line['pass'], line['pass'])}"
    size = size_cell(line)
    layer = f" layer {line['trained']['layer']}" if "trained" in line else ""
    named = f"{line['preset']}{layer} ({line['backend']}{', certified' * ('certified' in line)})"
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


def size_cell(line: Line) -> str:
    """The shape of the states, or the size of the model."""
    if line["benchmark"] not in WHOLE:
        return " x ".join(str(line[name]) for name in ("batch", "heads", "length", "channels"))
    model = dict(line["model"])
    width, layers, vocabulary = (model.pop(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = model.pop("num_attention_heads")
    parts = [f"{line['batch']} x {line['length']}", f"{layers} layers of {width}", f"{heads} heads"]
    return ", ".join([*parts, f"vocabulary {vocabulary}", *(f"{name}={value}" for name, value in model.items())])


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
