"""Tables of language models: perplexity over context length, the paper's own numbers, differences, distant tokens."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

import numpy as np

from .layout import Cell, NumberCell, Table, with_best
from .measurements import (
    TRIGRAM_LABEL,
    RunPairs,
    compare,
    copying_gains,
    lengths_of,
    noise_by_length,
    pairs_of,
    repeat_distance,
    retrieval_scores,
    trigram_of,
)
from .runs import (
    BASELINES,
    MissingData,
    Run,
    by_label,
    damping_by_label,
    other_differences,
    perplexity_by_length,
    train_lengths,
)
from .statistics import interval_cell, mean_and_interval, proportion_interval, verdict
from .summary import distinct_values


@cache
def published_results() -> dict[str, Any]:
    """Test perplexities of the paper's tables by text and preset or damping, each a list over `lengths`."""
    return json.loads(files("rfa_lab.report").joinpath("published.json").read_text(encoding="utf-8"))


_PAPERS_TEXT = {"table1": "wikitext-103", "table2": "wikitext-103-damping", "table3": "babylm-2025-strict"}


def models_table(name: str, runs: Sequence[Run], protocol: str = "blocks") -> Table:
    """Perplexity over context length of all models, in the order of the paper's table 1 or 3; its other models last.

    Raises `MissingData` for runs of several training lengths, or two runs of the same label and seed.
    """
    caption = f"Test perplexity over context length (the models of the paper's {name.replace('table', 'table ')})."
    return _perplexity_table(name, caption, runs, list(published_results()[_PAPERS_TEXT[name]]), protocol)


def damping_table(runs: Sequence[Run], protocol: str = "blocks") -> Table:
    """Perplexity by damping coefficient b (the paper's table 2). Of the other models it has the two baselines.

    Raises as `models_table`, and `MissingData` where two labels have one b, or one label two.
    """
    names = {b: label for label, b in damping_by_label(runs).items()}
    swept = {*names, *map(float, published_results()[_PAPERS_TEXT["table2"]])}
    order = [*BASELINES, *(names.get(b, f"b = {b:g}") for b in sorted(swept))]
    caption = "Test perplexity by damping coefficient b of SC-RFA (as the paper's table 2)."
    shown = [run for run in runs if run["label"] in order]
    display = {label: f"b = {b:g}" for b, label in names.items()}
    table = _perplexity_table("table2", caption, shown, order, protocol, display)
    return replace(table, notes=(*table.notes, *filter(None, [other_differences(runs)])))


def published_table(name: str) -> Table:
    """The paper's own table 1, 2 or 3, at its own context lengths. Its models were trained on 512 tokens."""
    published = published_results()
    found = published[_PAPERS_TEXT[name]]
    what = f"over context length on {'BabyLM-2025 strict' if name == 'table3' else 'WikiText-103'}"
    if name == "table2":
        what = "by damping coefficient b on WikiText-103"
        swept = {f"b = {b:g}": row for b, row in sorted((float(b), row) for b, row in found.items())}
        found = {label: published[_PAPERS_TEXT["table1"]][label] for label in BASELINES} | swept
    rows = [[label, *map(NumberCell, row)] for label, row in found.items()]
    caption = f"The paper's {name.replace('table', 'table ')}: test perplexity {what}, trained on 512 tokens."
    columns = ("model", *(f"L = {length}" for length in published["lengths"]))
    note = "Protocol blocks; one run each; bold: the lowest of its column."
    return Table(f"paper-{name}", caption, columns, tuple(map(tuple, with_best(rows))), (note,))


def _perplexity_table(
    name: str,
    caption: str,
    runs: Sequence[Run],
    order: Sequence[str],
    protocol: str,
    display: Mapping[str, str] | None = None,
) -> Table:
    """Mean and t interval over seeds, the trigram's numbers, and the gain from a repeated passage.

    The labels of `order` come first, also those without a run. `display` has names of rows that differ from labels.
    """
    if len(trained := train_lengths(runs)) > 1:
        raise MissingData(f"runs: got training lengths {', '.join(map(str, trained))}, expected one a table")
    groups = by_label(runs)
    ours = {label: {run["seed"]: perplexity_by_length(run, protocol) for run in of} for label, of in groups.items()}
    lengths, distance = lengths_of(runs, protocol), repeat_distance(runs)
    labels = list(dict.fromkeys([*order, *groups]))
    rows: list[list[Cell]] = []
    for label in labels:
        seeds = ours.get(label, {})
        row: list[Cell] = [(display or {}).get(label, label), str(sum(map(bool, seeds.values())))]
        row += [interval_cell([each[length] for each in seeds.values() if length in each]) for length in lengths]
        if distance is not None:
            row.append(gain_cell(groups.get(label, ()), distance))
        rows.append(row)
    rows = with_best(rows, columns=len(lengths) + 2)
    if (trigram := trigram_of(runs)) is not None:
        found = perplexity_by_length(trigram, protocol)
        cells = [NumberCell(found[length]) if length in found else None for length in lengths]
        rows.append([TRIGRAM_LABEL, None, *cells, *([NumberCell(0.0, digits=3)] if distance else [])])
    if distance and (gains := copying_gains(runs, "repeat", distance)):
        rows.append(["perfect copying", None, *(None for _ in lengths), NumberCell(float(np.mean(gains)), digits=3)])
    notes = [f"Protocol {protocol}; mean ± half of the 95 % t interval over seeds; bold: the lowest of its column."]
    notes += _noise_notes(noise_by_length(runs, protocol))
    if distance is not None:
        notes.append(
            f"Repeat: gain in nats a token from a passage that stood {distance} tokens before, ± half of the 95 % t "
            "interval over trials; perfect copying would gain what its row says."
        )
    if runs:
        notes.append(_trigram_note(runs))
    notes += _missing_notes(labels, ours, set(lengths), protocol)
    columns = ["model", "seeds", *(f"L = {length}" for length in lengths)]
    columns += [] if distance is None else [f"repeat, D = {distance}"]
    return Table(name, caption, tuple(columns), tuple(map(tuple, rows)), tuple(notes))


def gain_cell(runs: Sequence[Run], distance: int) -> NumberCell | None:
    """The gain of one label from a passage repeated at a distance."""
    scores = retrieval_scores(runs, "repeat")
    if distance not in scores.distances:
        return None
    return interval_cell(scores.trials[scores.distances.index(distance)], digits=3)


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


def _noise_notes(noise: Mapping[int, float | None]) -> list[str]:
    """A note on the noise of seeds, which a model of one seed is to be compared with."""
    parts = [f"{value:.3f} at L = {length}" for length, value in noise.items() if value is not None]
    if not parts:
        return []
    return [
        f"One seed: two models that differ by less, in nats, are within a seed: {', '.join(parts)} "
        "(1.96 times the median spread of a difference over seeds, of the models with three seeds)."
    ]


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


def difference_table(runs: Sequence[Run], baselines: Sequence[str] = BASELINES, protocol: str = "blocks") -> Table:
    """Differences of log perplexity to each baseline on the same books and seeds, with bootstrap intervals over books.

    Its notes name runs and books that could not be compared.
    """
    groups, noise = by_label(runs), noise_by_length(runs, protocol)
    notes = [
        f"Protocol {protocol}; nats per token, negative: better than the baseline; mean over seeds ± half of the "
        "95% t interval over seeds, and the 95% bootstrap interval over books.",
        "Open: one of the intervals holds 0. Within a seed: of one seed, and no larger than the noise of seeds.",
        "The intervals hold for each cell alone. That over books is too narrow where books are few or "
        "of few authors (8 independent books: 87 % instead of 95 %).",
        *_noise_notes(noise),
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
            for length in noise:
                cell, problem = difference_cell(pairs, length, protocol, noise[length]) if pairs else (None, "")
                row.append(cell)
                if problem:
                    notes.append(f"{label} against {baseline} at L = {length}: {problem}.")
            rows.append(tuple(row))
    columns = ("model", "against", "seeds", *(f"L = {length}" for length in noise))
    return Table("differences", "Paired differences of log perplexity.", columns, tuple(rows), tuple(notes))


def difference_cell(pairs: RunPairs, length: int, protocol: str, noise: float | None) -> tuple[NumberCell | None, str]:
    """The cell of a difference with its intervals and its verdict, and a remark on books that could not be compared."""
    found, problem = compare(pairs, length, protocol)
    if found is None:
        return None, problem
    remark = verdict(found, noise)
    return NumberCell(found.value, found.half, found.over_books, digits=3, signed=True, remark=remark), problem


ScoresByDistance = tuple[str, str, dict[int, NumberCell]]  # of a run: its label, its seed, and a cell by distance


def probe_table(runs: Sequence[Run], kind: str) -> Table:
    """The score of the probe "passkey" or "repeat" by distance, for each run; `MissingData` if none has it."""

    def score(row: Mapping[str, Any]) -> NumberCell:
        return NumberCell(row["score"], error=mean_and_interval(row["scores"]).half, digits=3)

    rows = _probed(runs, kind, score)
    sought = {"passkey": "three words named earlier", "repeat": "a passage repeated from earlier"}[kind]
    caption = f"Retrieval probe {kind}: gain in nats a token for {sought}, by distance D in tokens."
    notes: tuple[str, ...] = (
        "Mean ± half of the 95 % t interval over trials. A model that does not use what stands D tokens back "
        "scores exactly 0. Of a passkey's words the first alone needs its naming, the others follow those before them.",
    )
    gains = {each: copying_gains(runs, kind, each) for _, _, found in rows for each in found}
    if any(gains.values()):
        possible = {each: NumberCell(fmean(of), digits=3) for each, of in gains.items() if of}
        rows.append(("perfect copying", "", possible))
        notes += (_copying_note(runs, kind),)
    return _by_distance(f"probe-{kind}", caption, rows, notes)


def _copying_note(runs: Sequence[Run], kind: str) -> str:
    """A sentence on how the gain of perfect copying is known."""
    own = all(
        "loss_by_token" in row for run in runs for row in ((run["passkey"] or {}).get(kind) or {}).get("rows", ())
    )
    whose = "the model's own loss on them without the first copy" if own else "a trigram's loss on them"
    which = "all tokens but the first, which nothing announces" if kind == "repeat" else "all tokens"
    return f"Perfect copying saves the loss of {which}; it is {whose}."


def passkey_table(runs: Sequence[Run]) -> Table:
    """The fraction of trials in which the passkey's first word is the likeliest candidate. Raises as `probe_table`."""

    def accuracy(row: Mapping[str, Any]) -> NumberCell:
        share = row["accuracy"]
        return NumberCell(share, interval=proportion_interval(share, len(row["scores"])), digits=3)

    rows = _probed(runs, "passkey", accuracy)
    probed = [run["passkey"]["passkey"] for run in runs if (run["passkey"] or {}).get("passkey")]
    chances = sorted({probe["chance"] for probe in probed})
    note = (
        f"By chance: {', '.join(f'{chance:.3f}' for chance in chances)}. In brackets Wilson's 95 % interval over "
        f"{distinct_values(probe['trials'] for probe in probed)} trials, which are the same for all models: columns "
        "move together."
    )
    caption = "Retrieval probe passkey: share of trials with the right first word, by distance D in tokens."
    return _by_distance("probe-accuracy", caption, rows, (note,))


def _probed(
    runs: Sequence[Run], kind: str, number: Callable[[Mapping[str, Any]], NumberCell]
) -> list[ScoresByDistance]:
    probes = ((run, (run["passkey"] or {}).get(kind)) for run in runs)
    rows = [
        (run["label"], str(run["seed"]), {row["distance"]: number(row) for row in probe["rows"]})
        for run, probe in probes
        if probe
    ]
    if not rows:
        raise MissingData(f"runs: got none with the probe {kind}, expected at least one (passkey: true in the recipe)")
    return rows


def _by_distance(name: str, caption: str, rows: Sequence[ScoresByDistance], notes: tuple[str, ...]) -> Table:
    distances = sorted({distance for _, _, found in rows for distance in found})
    columns = ("run", "seed", *(f"D = {distance}" for distance in distances))
    cells = tuple((label, seed, *map(found.get, distances)) for label, seed, found in rows)
    return Table(name, caption, columns, cells, notes)


def attention_table(runs: Sequence[Run]) -> Table:
    """The weights of each head of the last layer: the fraction beyond the training length, the mean lag, the total."""
    mapped = [(run, run["attention_summary"]) for run in runs if run.get("attention_summary")]
    measures = {"beyond_training": ("share beyond", 3), "mean_lag": ("mean lag", 0), "kept": ("kept", 3)}
    heads = max(len(summary["heads"]) for _, summary in mapped)
    rows: list[tuple[Cell, ...]] = []
    for name, (words, digits) in measures.items():
        for run, summary in mapped:
            cells = [NumberCell(head[name], digits=digits) for head in summary["heads"]]
            rows.append((run["label"], str(run["seed"]), words, *cells, *(heads - len(cells)) * [None]))
    columns = ("run", "seed", "of the weights", *(f"head {head}" for head in range(heads)))
    windows = distinct_values(summary["length"] for _, summary in mapped)
    note = (
        "Share beyond: what of the weights lies more than one training length before the query. Mean lag in tokens. "
        "Kept: what the decay leaves of weights that sum to one."
    )
    return Table(
        "attention", f"Heads of the last layer on a window of {windows} tokens.", columns, tuple(rows), (note,)
    )
