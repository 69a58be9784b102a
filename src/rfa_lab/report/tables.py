"""The paper's tables with this library's numbers, and the published numbers in tables of their own."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np

from .layout import Cell, NumberCell, Table
from .measurements import TRIGRAM_LABEL, copying_gain, repeat_distance, retrieval_scores, trigram_of
from .runs import MissingData, Run, by_label, damping_by_label, other_differences, perplexity_by_length, train_lengths
from .statistics import mean_and_interval, seed_noise


def published_results() -> dict[str, Any]:
    """Test perplexities of the paper's tables 1 to 3, each a list over `lengths`.

    Returns:
        `source`, `note`, `lengths`, and by preset `wikitext-103` and `babylm-2025-strict`, by damping
        `wikitext-103-damping`.
    """
    return json.loads(files("rfa_lab.report").joinpath("published.json").read_text(encoding="utf-8"))


BASELINES = ("b1-rope", "b2-alibi")


def table1(runs: Sequence[Run], published: Mapping[str, Any], protocol: str = "blocks") -> Table:
    """Perplexity over context length of all models, in the order of the paper's table 1.

    Args:
        runs: result files, with any number of seeds for a label. Labels that the paper does not have come last.
        published: the paper's numbers, from `published_results`; of these the order of the rows.
        protocol: which evaluation.

    Returns:
        The table. Its notes name missing runs.

    Raises:
        MissingData: for runs of several training lengths, or two runs of the same label and seed.
    """
    caption = "Test perplexity over context length (the models of the paper's table 1)."
    return perplexity_table("table1", caption, runs, list(published["wikitext-103"]), protocol=protocol)


def table2(
    runs: Sequence[Run],
    published: Mapping[str, Any],
    damping: Mapping[str, float] | None = None,
    protocol: str = "blocks",
) -> Table:
    """Perplexity by damping coefficient (the paper's table 2).

    Args, returns and raises as `table1`, and
        damping: the coefficient b of each label of the sweep, by default from `damping_by_label`. Of the other labels
            only the two baselines are shown.
    """
    damping = damping_by_label(runs) if damping is None else damping
    names = {b: label for label, b in damping.items()}
    display = {label: f"b = {b:g}" for label, b in damping.items()}
    swept = {*names, *map(float, published["wikitext-103-damping"])}
    order = [*BASELINES, *(names.get(b, f"b = {b:g}") for b in sorted(swept))]
    caption = "Test perplexity by damping coefficient b of SC-RFA (as the paper's table 2)."
    shown = [run for run in runs if run["label"] in order]
    table = perplexity_table("table2", caption, shown, order, protocol=protocol, display=display)
    return replace(table, notes=(*table.notes, *filter(None, [other_differences(runs)])))


def table3(runs: Sequence[Run], published: Mapping[str, Any], protocol: str = "blocks") -> Table:
    """Perplexity over context length, for the paper's table 3. Args, returns and raises as `table1`."""
    caption = "Test perplexity over context length (the models of the paper's table 3)."
    return perplexity_table("table3", caption, runs, list(published["babylm-2025-strict"]), protocol=protocol)


def published_table(name: str, published: Mapping[str, Any]) -> Table:
    """The paper's own numbers, at its own context lengths. Its models were trained on 512 tokens.

    Args:
        name: table1, table2 or table3.
        published: from `published_results`.
    """
    text, what = {
        "table1": ("wikitext-103", "over context length on WikiText-103"),
        "table2": ("wikitext-103-damping", "by damping coefficient b on WikiText-103"),
        "table3": ("babylm-2025-strict", "over context length on BabyLM-2025 strict"),
    }[name]
    found = published[text]
    if name == "table2":
        baselines = {label: published["wikitext-103"][label] for label in BASELINES}
        found = {
            **baselines,
            **{f"b = {float(b):g}": row for b, row in sorted(found.items(), key=lambda x: float(x[0]))},
        }
    rows = [[label, *map(NumberCell, row)] for label, row in found.items()]
    caption = f"The paper's {name.replace('table', 'table ')}: test perplexity {what}, trained on 512 tokens."
    columns = ("model", *(f"L = {length}" for length in published["lengths"]))
    note = "Protocol blocks; one run each; bold: the lowest of its column."
    return Table(f"paper-{name}", caption, columns, tuple(map(tuple, with_best(rows))), (note,))


def perplexity_table(
    name: str,
    caption: str,
    runs: Sequence[Run],
    order: Sequence[str] = (),
    *,
    protocol: str = "blocks",
    display: Mapping[str, str] | None = None,
) -> Table:
    """Mean and t interval over seeds, the trigram's numbers, and the gain from a repeated passage.

    Args:
        name, caption: of the table.
        runs: result files.
        order: labels that come first, in this order, also those without a run.
        protocol: which evaluation.
        display: names of rows that differ from their labels.
    """
    _check_train_length(runs)
    groups = by_label(runs)
    ours = {label: {run["seed"]: perplexity_by_length(run, protocol) for run in of} for label, of in groups.items()}
    lengths = sorted({length for seeds in ours.values() for row in seeds.values() for length in row})
    distance = repeat_distance(runs)
    labels = list(dict.fromkeys([*order, *groups]))
    rows: list[list[Cell]] = []
    for label in labels:
        seeds = ours.get(label, {})
        row: list[Cell] = [(display or {}).get(label, label), str(sum(map(bool, seeds.values())))]
        row += [_mean([each[length] for each in seeds.values() if length in each]) for length in lengths]
        if distance is not None:
            row.append(gain_cell(groups.get(label, ()), distance))
        rows.append(row)
    rows = with_best(rows, columns=len(lengths) + 2)
    rows += _reference_rows(runs, lengths, protocol, distance)
    notes = [f"Protocol {protocol}; mean ± half of the 95 % t interval over seeds; bold: the lowest of its column."]
    notes += noise_notes(runs, lengths, protocol)
    if distance is not None:
        notes.append(
            f"Repeat: gain in nats a token from a passage that stood {distance} tokens before, ± half of the 95 % t "
            "interval over trials; perfect copying would gain what its row says."
        )
    columns = (
        "model",
        "seeds",
        *(f"L = {length}" for length in lengths),
        *([f"repeat, D = {distance}"] if distance else []),
    )
    if runs:
        notes.append(_trigram_note(runs))
    notes += _missing_notes(labels, ours, set(lengths), protocol)
    return Table(name, caption, columns, tuple(map(tuple, rows)), tuple(notes))


def gain_cell(runs: Sequence[Run], distance: int) -> NumberCell | None:
    """The gain of one label from a passage repeated at a distance."""
    scores = retrieval_scores(runs, "repeat")
    if distance not in scores.distances:
        return None
    mean = mean_and_interval(scores.trials[scores.distances.index(distance)])
    return NumberCell(mean.value, error=mean.half, digits=3)


def _trigram_note(runs: Sequence[Run]) -> str:
    """What the trigram was trained on, and the labels that were trained on fewer tokens."""
    trigram = trigram_of(runs)
    if trigram is None:
        return "No trigram of the same tokens: rfa experiment makes it."
    most = max(run["training"]["tokens"] for run in runs)
    fewer = dict.fromkeys(run["label"] for run in runs if run["training"]["tokens"] < most)
    read = f"the {trigram['tokens']:,} tokens of the text that the longest runs of seed {trigram['seed']} read"
    shorter = f" Shorter runs: {', '.join(fewer)}." if fewer else ""
    return f"Trigram: modified Kneser-Ney, on {read}.{shorter}"


def _reference_rows(
    runs: Sequence[Run], lengths: Sequence[int], protocol: str, distance: int | None
) -> list[list[Cell]]:
    """The rows of the trigram and of perfect copying."""
    rows: list[list[Cell]] = []
    trigram = trigram_of(runs)
    if trigram is not None:
        found = perplexity_by_length(trigram, protocol)
        cells: list[Cell] = [NumberCell(found[length]) if length in found else None for length in lengths]
        rows.append([TRIGRAM_LABEL, None, *cells, *([NumberCell(0.0, digits=3)] if distance else [])])
    gains = [gain for run in runs if distance and (gain := copying_gain(run, "repeat", distance)) is not None]
    if gains:
        rows.append(["perfect copying", None, *(None for _ in lengths), NumberCell(float(np.mean(gains)), digits=3)])
    return rows


def noise_notes(runs: Sequence[Run], lengths: Sequence[int], protocol: str) -> list[str]:
    """A note on the noise of seeds, which a model of one seed is to be compared with."""
    noise = {length: seed_noise(runs, length, protocol) for length in lengths}
    parts = [f"{value:.3f} at L = {length}" for length, value in noise.items() if value is not None]
    if not parts:
        return []
    return [
        f"One seed: two models that differ by less, in nats, are within a seed: {', '.join(parts)} "
        "(1.96 times the median spread of a difference over seeds, of the models with three seeds)."
    ]


def _mean(values: Sequence[float]) -> NumberCell | None:
    if not values:
        return None
    mean = mean_and_interval(values)
    return NumberCell(mean.value, error=mean.half)


def with_best(rows: Sequence[Sequence[Cell]], columns: int | None = None) -> list[list[Cell]]:
    """Set the lowest number of each column in bold, if the column has at least two. Numbers are compared as printed.

    Args:
        rows: of a table.
        columns: only of so many columns from the left; None for all.
    """
    done = [list(row) for row in rows]
    for column in range(len(rows[0]) if rows else 0)[:columns]:
        numbers = {k: row[column] for k, row in enumerate(rows) if isinstance(row[column], NumberCell)}
        values = {
            k: round(number.value, number.digits) for k, number in numbers.items() if isinstance(number, NumberCell)
        }
        for k, value in values.items():
            number = numbers[k]
            if len(values) > 1 and value == min(values.values()) and isinstance(number, NumberCell):
                done[k][column] = replace(number, best=True)
    return done


def _check_train_length(runs: Iterable[Run]) -> None:
    trained = train_lengths(runs)
    if len(trained) > 1:
        raise MissingData(f"runs: got training lengths {', '.join(map(str, trained))}, expected one a table")


def _missing_notes(
    labels: Sequence[str], ours: Mapping[str, Mapping[int, Mapping[int, float]]], lengths: set[int], protocol: str
) -> list[str]:
    """Notes on labels without a run, missing seeds, and runs without an evaluation or without some lengths of it."""
    notes = []
    absent = [label for label in labels if label not in ours]
    if absent:
        notes.append(f"Not run here: {', '.join(absent)}.")
    every = sorted({seed for seeds in ours.values() for seed in seeds})
    without: dict[str, list[str]] = {}
    for label, seeds in ours.items():
        if gone := [str(seed) for seed in every if seed not in seeds]:
            without.setdefault(", ".join(gone), []).append(label)
    notes += [f"{', '.join(of)}: no run of seed {gone_seeds}." for gone_seeds, of in without.items()]
    for label, seeds in ours.items():
        for seed, row in seeds.items():
            if not row:
                notes.append(f"{label}, seed {seed}: not evaluated by {protocol}.")
            elif left := sorted(lengths - row.keys()):
                notes.append(f"{label}, seed {seed}: not evaluated at L = {', '.join(map(str, left))}.")
    return notes
