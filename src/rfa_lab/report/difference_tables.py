"""Paired differences of log perplexity to baselines, with intervals over seeds and over books."""

from collections.abc import Sequence

from .layout import Cell, NumberCell, Table
from .runs import Run, by_label, perplexity_by_length
from .statistics import RunPairs, compare, pairs_of, seed_noise, verdict
from .tables import BASELINES, noise_notes


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
        f"Protocol {protocol}; nats per token, negative: better than the baseline; mean over seeds ± half of the "
        f"{level:.0%} t interval over seeds, and the {level:.0%} bootstrap interval over books.",
        "Open: one of the intervals holds 0. Within a seed: of one seed, and no larger than the noise of seeds.",
        "The intervals hold for each cell alone. That over books is too narrow where books are few or "
        "of few authors (8 independent books: 87 % instead of 95 %).",
        *noise_notes(runs, lengths, protocol),
    ]
    noise = {length: seed_noise(runs, length, protocol, level) for length in lengths}
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
                cell, problem = None, ""
                if pairs:
                    cell, problem = difference_cell(pairs, length, protocol, noise[length], level, resamples)
                row.append(cell)
                if problem:
                    notes.append(f"{label} against {baseline} at L = {length}: {problem}.")
            rows.append(tuple(row))
    columns = ("model", "against", "seeds", *(f"L = {length}" for length in lengths))
    caption = "Paired differences of log perplexity."
    return Table("differences", caption, columns, tuple(rows), tuple(notes))


def difference_cell(
    pairs: RunPairs,
    length: int,
    protocol: str,
    noise: float | None,
    level: float = 0.95,
    resamples: int = 10_000,
) -> tuple[NumberCell | None, str]:
    """The cell of a difference with its intervals and its verdict, and a remark on books that could not be compared."""
    found, problem = compare(pairs, length, protocol, level, resamples)
    if found is None:
        return None, problem
    interval = None if found.low is None or found.high is None else (found.low, found.high)
    remark = verdict(found, noise)
    return NumberCell(found.value, found.half, interval, digits=3, signed=True, remark=remark), problem
