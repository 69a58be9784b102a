"""The paper's tables, with this library's numbers beside the published ones, and paired differences to baselines."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from .layout import Cell, NumberCell, Table
from .runs import MissingData, Run, by_label, damping_by_label, other_differences, perplexity_by_length, train_lengths
from .statistics import RunPairs, compare, mean_and_error, pairs_of


def published_results() -> dict[str, Any]:
    """Test perplexities of the paper's tables 1 to 3, each a list over `lengths`.

    Returns:
        `source`, `note`, `lengths`, and by preset `wikitext-103` and `babylm-2025-strict`, by damping
        `wikitext-103-damping`.
    """
    return json.loads(files("rfa.report").joinpath("published.json").read_text(encoding="utf-8"))


BASELINES = ("b1-rope", "b2-alibi")


def table1(runs: Sequence[Run], published: Mapping[str, Any], protocol: str = "blocks") -> Table:
    """Perplexity over context length of all models, beside the paper's on WikiText-103.

    Args:
        runs: result files, with any number of seeds for a label. Labels that the paper does not have come last.
        published: the paper's numbers, from `published_results`.
        protocol: which evaluation.

    Returns:
        The table. Its notes name missing runs.

    Raises:
        MissingData: for runs of several training lengths, or two runs of the same label and seed.
    """
    caption = "Test perplexity over context length, beside the paper's on WikiText-103 (its table 1)."
    return perplexity_table("table1", caption, runs, published["wikitext-103"], published["lengths"], protocol=protocol)


def table2(
    runs: Sequence[Run],
    published: Mapping[str, Any],
    damping: Mapping[str, float] | None = None,
    protocol: str = "blocks",
) -> Table:
    """Perplexity by damping coefficient, beside the paper's on WikiText-103.

    Args, returns and raises as `table1`, and
        damping: the coefficient b of each label of the sweep, by default from `damping_by_label`. Of the other labels
            only the two baselines are shown.
    """
    damping = damping_by_label(runs) if damping is None else damping
    paper = {label: published["wikitext-103"][label] for label in BASELINES}
    sweep = {float(b): row for b, row in published["wikitext-103-damping"].items()}
    names = {b: label for label, b in damping.items()}
    display = {label: f"b = {b:g}" for label, b in damping.items()}
    for b in sorted(sweep.keys() | names.keys()):
        label = names.get(b, f"b = {b:g}")
        paper[label] = sweep.get(b, ())
    caption = "Test perplexity by damping coefficient b of SC-RFA, beside the paper's on WikiText-103 (its table 2)."
    shown = [run for run in runs if run["label"] in paper]
    table = perplexity_table("table2", caption, shown, paper, published["lengths"], protocol=protocol, display=display)
    return replace(table, notes=(*table.notes, *filter(None, [other_differences(runs)])))


def table3(runs: Sequence[Run], published: Mapping[str, Any], protocol: str = "blocks") -> Table:
    """Perplexity over context length, beside the paper's on BabyLM-2025. Args, returns and raises as `table1`."""
    caption = "Test perplexity over context length, beside the paper's on BabyLM-2025 strict (its table 3)."
    paper = published["babylm-2025-strict"]
    return perplexity_table("table3", caption, runs, paper, published["lengths"], protocol=protocol)


def perplexity_table(
    name: str,
    caption: str,
    runs: Sequence[Run],
    published: Mapping[str, Sequence[float]],
    published_lengths: Sequence[int],
    *,
    protocol: str = "blocks",
    display: Mapping[str, str] | None = None,
) -> Table:
    """Mean and standard error over seeds, beside published numbers at the same multiple of the training length.

    Args:
        name, caption: of the table.
        runs: result files.
        published: perplexities by label, in the order of the rows.
        published_lengths: context lengths of the published numbers, the training length first.
        protocol: which evaluation.
        display: names of rows that differ from their labels.
    """
    groups = by_label(runs)
    trained = _train_length(runs) or published_lengths[0]
    ours = {label: {run["seed"]: perplexity_by_length(run, protocol) for run in of} for label, of in groups.items()}
    lengths = {length for seeds in ours.values() for row in seeds.values() for length in row}
    theirs = {length / published_lengths[0]: index for index, length in enumerate(published_lengths)}
    multiples = sorted({length / trained for length in lengths} | theirs.keys())

    columns: list[str] = ["model", "seeds"]
    for multiple in multiples:
        columns.append(f"L = {multiple * trained:g}")
        if multiple in theirs:
            columns.append(f"paper, L = {published_lengths[theirs[multiple]]}")
    labels = list(dict.fromkeys([*published, *groups]))
    rows = []
    for label in labels:
        seeds = ours.get(label, {})
        row: list[Cell] = [(display or {}).get(label, label), str(sum(map(bool, seeds.values())))]
        for multiple in multiples:
            values = [each[length] for each in seeds.values() if (length := round(multiple * trained)) in each]
            row.append(_mean(values))
            if multiple in theirs:
                paper = published.get(label, ())
                index = theirs[multiple]
                row.append(NumberCell(paper[index]) if index < len(paper) else None)
        rows.append(row)
    notes = [f"Protocol {protocol}; mean ± standard error over seeds; bold: the lowest of its column."]
    if trained != published_lengths[0]:
        notes.append(
            f"The runs were trained on {trained} tokens, the paper's on {published_lengths[0]}: columns stand side by "
            "side at equal multiples of the training length."
        )
    notes += _missing_notes(labels, ours, lengths, protocol)
    return Table(name, caption, tuple(columns), tuple(map(tuple, with_best(rows))), tuple(notes))


def difference_table(
    runs: Sequence[Run],
    baselines: Sequence[str] = BASELINES,
    *,
    protocol: str = "blocks",
    level: float = 0.95,
    resamples: int = 10_000,
) -> Table:
    """Differences of log perplexity to each baseline on the same books, with bootstrap intervals over books.

    Args:
        runs: result files with losses by book. Only seeds that both sides have are compared.
        baselines: labels.
        protocol: which evaluation.
        level, resamples: as `paired_difference`.

    Returns:
        The table. Its notes name runs and books that could not be compared.
    """
    groups = by_label(runs)
    lengths = sorted({length for run in runs for length in perplexity_by_length(run, protocol)})
    notes = [
        f"Protocol {protocol}; nats per token, negative: better than the baseline; mean over seeds ± standard error "
        f"over seeds, and the {level:.0%} bootstrap interval over books.",
        "The interval says nothing of other seeds, holds for each cell alone, and is too narrow where books are few or "
        "of few authors (8 independent books: 87 % instead of 95 %).",
    ]
    rows: list[tuple[Cell, ...]] = []
    for baseline in baselines:
        if baseline not in groups:
            notes.append(f"No run of {baseline}: nothing is compared with it.")
            continue
        for label, of in groups.items():
            if label == baseline:
                continue
            pairs = pairs_of(of, groups[baseline])
            row: list[Cell] = [label, baseline, str(len(pairs))]
            if not pairs:
                notes.append(f"{label} and {baseline} have no seed in common.")
            for length in lengths:
                cell, problem = _difference_cell(pairs, length, protocol, level, resamples) if pairs else (None, "")
                row.append(cell)
                if problem:
                    notes.append(f"{label} against {baseline} at L = {length}: {problem}.")
            rows.append(tuple(row))
    columns = ("model", "against", "seeds", *(f"L = {length}" for length in lengths))
    caption = "Paired differences of log perplexity."
    return Table("differences", caption, columns, tuple(rows), tuple(notes))


def _difference_cell(
    pairs: RunPairs, length: int, protocol: str, level: float, resamples: int
) -> tuple[NumberCell | None, str]:
    """The cell, and a remark about it."""
    found, problem = compare(pairs, length, protocol, level, resamples)
    if found is None:
        return None, problem
    interval = None if found.low is None or found.high is None else (found.low, found.high)
    return NumberCell(found.value, error=found.error, interval=interval, digits=3, signed=True), problem


def _mean(values: Sequence[float]) -> NumberCell | None:
    if not values:
        return None
    mean = mean_and_error(values)
    return NumberCell(mean.value, error=mean.error)


def with_best(rows: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """Set the lowest number of each column in bold, if the column has at least two. Numbers are compared as printed."""
    done = [list(row) for row in rows]
    for column in range(len(rows[0]) if rows else 0):
        numbers = {k: row[column] for k, row in enumerate(rows) if isinstance(row[column], NumberCell)}
        values = {
            k: round(number.value, number.digits) for k, number in numbers.items() if isinstance(number, NumberCell)
        }
        for k, value in values.items():
            number = numbers[k]
            if len(values) > 1 and value == min(values.values()) and isinstance(number, NumberCell):
                done[k][column] = NumberCell(number.value, number.error, number.interval, number.digits, best=True)
    return done


def _train_length(runs: Iterable[Run]) -> int | None:
    trained = train_lengths(runs)
    if len(trained) > 1:
        raise MissingData(f"runs: got training lengths {', '.join(map(str, trained))}, expected one a table")
    return trained[0] if trained else None


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
