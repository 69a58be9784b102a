"""The tables and the figure of docs/record/recall.md: `python docs/record/recall_record.py`.

They are from results/recall, and those of the robust weight from results/robust-weight.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from provenance import made_by

from rfa.files import write_text_whole
from rfa.forecasting.style import save
from rfa_lab.recipes import load_recipe
from rfa_lab.report.layout import Cell, NumberCell, Table, markdown, replace_between
from rfa_lab.report.records import (
    accuracies_by_task,
    accuracy_figure,
    accuracy_table,
    learning_table,
    overview_table,
    tasks_of,
    tested_lengths,
)
from rfa_lab.report.statistics import Mean, interval_cell, mean_and_interval
from rfa_lab.results import read_record

PAGE = Path(__file__).with_name("recall.md")
FIGURE = Path(__file__).parents[1] / "figures" / "recall.png"
RECORD = Path(__file__).parents[2] / "results" / "recall"
RECIPE = Path(__file__).parents[2] / "recipes" / "recall.yaml"
WEIGHTS, WEIGHTS_RECIPE = RECORD.with_name("robust-weight"), RECIPE.with_name("robust-weight.yaml")
_UNKNOWN = "Not run yet."
_ROPE, _GATE, _X2 = "b1-rope", "c4-fox rope", "x2-riccati-alibi no-innovation"
_X5 = "x5-content-clock no-innovation"
_C7 = "c7-rope-alibi-innovation no-innovation"
PAIRS = {  # what is asked: the two models that differ in it
    "real slow modes added to RoPE": ("b1-rope real", _ROPE),
    "real slow modes added to m2 without innovation": ("m2-no-innovation real", "m2-no-innovation"),
    "real slow modes added to x2": (f"{_X2} real", _X2),
    "real slow modes added to c7": (f"{_C7} real", _C7),
    "content clock added to x2 (x5)": (_X5, _X2),
    "content clock instead of the gate (c8)": ("c8-fox-clock", _GATE),
    "turned values added to the gate (x7)": ("x7-gated-roper", _GATE),
    "content gains (x4) instead of the gate": ("x4-content-riccati no-innovation", _GATE),
    "x6 instead of m2, both without innovation": ("x6-content-dynamics no-innovation", "m2-no-innovation"),
    "innovation step added to x2": ("x2-riccati-alibi", _X2),
    "the gate added to RoPE": (_GATE, _ROPE),
    "ALiBi instead of RoPE": ("b2-alibi", _ROPE),
    "m2 instead of RoPE": ("m2-sc-rfa", _ROPE),
    "m2 as released instead of RoPE": ("m2-sc-rfa as-released", _ROPE),
    "x2 instead of RoPE": (_X2, _ROPE),
    "x2 instead of ALiBi": (_X2, "b2-alibi"),
    "x2 instead of c7": (_X2, _C7),
    "taps added to x2": (f"{_X2} taps", _X2),
    "output gain added to x2": (f"{_X2} output-gain", _X2),
    "normalised states added to x2": (f"{_X2} normalise-states", _X2),
    "taps added to the gate": (f"{_GATE} taps", _GATE),
    "output gain added to the gate": (f"{_GATE} output-gain", _GATE),
    "normalised states added to the gate": (f"{_GATE} normalise-states", _GATE),
    "half of the heads gated, not all": (f"{_GATE} half-gated", _GATE),
    "half of the heads with a clock in x5, not all": (f"{_X5} half-gated", _X5),
    "channel gates instead of the gate, both without RoPE": ("c4-fox channel-gates", "c4-fox"),
}


def tables(record: Path) -> dict[str, Table]:
    """The tables of the record by the names of their marks: two overviews, and two tables of each task."""
    results = read_record(record, "recall")
    lengths = tested_lengths(results)
    found = {"at the trained length": overview_table(results, lengths[0])}
    found["at the longest"] = overview_table(results, lengths[-1])
    found["differences"] = differences(results, lengths[-1])
    for task in tasks_of(results):
        found[f"{task} accuracy"] = accuracy_table(results, task)
        found[f"{task} learning"] = learning_table(results, task)
    return found


def differences(results: Sequence[Mapping[str, Any]], length: int) -> Table:
    """The accuracy of one model less that of another on the same seeds, by task; bold where the interval lacks 0."""
    tasks, rows = tasks_of(results), []
    accuracies = accuracies_by_task(results, length)
    for asked, models in PAIRS.items():
        cells: list[Cell] = [asked]
        for task in tasks:
            own, other = (accuracies.get(label, {}).get(task, {}) for label in models)
            cells.append(_difference([own[seed] - other[seed] for seed in own if seed in other]))
        rows.append(tuple(cells))
    return Table("differences", "", ("what differs", *tasks), tuple(rows))


def weights(results: Sequence[Mapping[str, Any]]) -> Table:
    """The accuracy of each weight by setting and length, and the differences of each two on the same seeds."""
    recipe = load_recipe(WEIGHTS_RECIPE)
    labels = [model.label for model in recipe.models]
    pairs = list(combinations(labels, 2))
    rows: list[tuple[Cell, ...]] = []
    for task in (task.label for task in recipe.tasks):
        for length in tested_lengths(results):
            accuracies = accuracies_by_task(results, length)
            of = {label: accuracies.get(label, {}).get(task, {}) for label in labels}
            shares = [interval_cell([*of[label].values()], 3) for label in labels]
            less = [_difference([of[a][seed] - of[b][seed] for seed in of[a] if seed in of[b]], 3) for a, b in pairs]
            rows.append((task, str(length), *shares, *less))
    columns = ("setting", "tokens", *labels, *(f"{a} less {b}" for a, b in pairs))
    return Table("weights", "", columns, tuple(rows))


def _difference(values: Sequence[float], digits: int | None = None) -> Cell:
    if not values:
        return None
    mean = mean_and_interval(values)
    return NumberCell(mean.value, mean.half, digits=digits or digits_of(values), best=_decided(mean))


def digits_of(differences: Sequence[float]) -> int:
    """Decimal places of shares: two, but four where two would show a decided difference of seeds as 0."""
    if not differences:
        return 2
    mean = mean_and_interval(differences)
    return 4 if _decided(mean) and abs(mean.value) < 0.005 else 2


def _decided(mean: Mean) -> bool:
    return mean.half is not None and abs(mean.value) > mean.half


def state(record: Path, recipe: Path = RECIPE) -> str:
    """How many runs of a recipe are done, of which seeds, and what made them."""
    planned = load_recipe(recipe).runs
    results = read_record(record, "recall") if record.is_dir() else []
    if not results:
        return f"No run of {len(planned)} is done."
    seeds: dict[str, set[int]] = {}
    for result in results:
        seeds.setdefault(result["task"], set()).add(result["seed"])
    tasks: dict[str, list[str]] = {}
    for task, of in seeds.items():
        tasks.setdefault(f"{'seed' if len(of) == 1 else 'seeds'} {_listed(of)}", []).append(task)
    done = "; ".join(f"{which}: {', '.join(names)}" for which, names in tasks.items())
    made = made_by([result["environment"]] for result in results)
    return f"{len(results)} of {len(planned)} runs are done ({done}).\n\n{made}"


def _listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def written(page: str, record: Path = RECORD) -> str:
    """The page with the record's tables, each between its marks. A table without results says so.

    Raises:
        ValueError: for a page that lacks the marks of a table, or a damaged record.
    """
    texts = {mark: _UNKNOWN for mark in re.findall(r"<!-- (.+?): docs/record/recall_record.py -->", page)}
    if record.is_dir():
        tables_of = tables(record).items()
        texts |= {mark: markdown(replace(table, caption="", notes=())) for mark, table in tables_of}
    if WEIGHTS.is_dir():
        texts["robust weight"] = markdown(weights(read_record(WEIGHTS, "recall")))
    texts |= {"state": state(record), "state of the robust weight": state(WEIGHTS, WEIGHTS_RECIPE)}
    for mark, text in texts.items():
        begin, end = f"<!-- {mark}: docs/record/recall_record.py -->", f"<!-- end of {mark} -->"
        page = replace_between(page, begin, end, f"\n{text.strip()}\n")
    return page


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
    if RECORD.is_dir():
        save(accuracy_figure(read_record(RECORD, "recall"), complete=True), FIGURE, dots=150)
