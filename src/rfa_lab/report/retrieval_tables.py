"""Tables on distant tokens: the scores of the retrieval probes, and the weights of the last layer's heads."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from .layout import Cell, NumberCell, Table
from .measurements import copying_gain
from .runs import MissingData, Run
from .statistics import mean_and_interval, proportion_interval
from .summary import distinct_values

ScoresByDistance = tuple[str, str, dict[int, NumberCell]]


def probe_table(runs: Sequence[Run], kind: str) -> Table:
    """The score of a retrieval probe by distance, for each run with probes.

    Args:
        runs: result files.
        kind: "passkey" or "repeat", see `rfa_lab.evaluation.probe`.

    Raises:
        MissingData: if no run has this probe.
    """
    rows = _probed(runs, kind, _score)
    sought = {"passkey": "three words named earlier", "repeat": "a passage repeated from earlier"}[kind]
    caption = f"Retrieval probe {kind}: gain in nats a token for {sought}, by distance D in tokens."
    notes: tuple[str, ...] = (
        "Mean ± half of the 95 % t interval over trials. A model that does not use what stands D tokens back "
        "scores exactly 0. Of a passkey's words the first alone needs its naming, the others follow those before them.",
    )
    distances = {distance for _, _, found in rows for distance in found}
    gains = {each: [gain for run in runs if (gain := copying_gain(run, kind, each)) is not None] for each in distances}
    if any(gains.values()):
        possible = {each: NumberCell(fmean(of), digits=3) for each, of in gains.items() if of}
        rows.append(("perfect copying", "", possible))
        notes += (copying_note(runs, kind),)
    return _by_distance(f"probe-{kind}", caption, rows, notes)


def copying_note(runs: Sequence[Run], kind: str) -> str:
    """A sentence on how the gain of perfect copying is known."""
    own = all(
        "loss_by_token" in row for run in runs for row in ((run["passkey"] or {}).get(kind) or {}).get("rows", ())
    )
    whose = "the model's own loss on them without the first copy" if own else "a trigram's loss on them"
    which = "all tokens but the first, which nothing announces" if kind == "repeat" else "all tokens"
    return f"Perfect copying saves the loss of {which}; it is {whose}."


def accuracy_table(runs: Sequence[Run]) -> Table:
    """The fraction of trials in which the passkey's first word is the likeliest candidate. Raises as `probe_table`."""
    probed = [run for run in runs if (run["passkey"] or {}).get("passkey")]
    rows = _probed(probed, "passkey", _accuracy)
    chances = sorted({run["passkey"]["passkey"]["chance"] for run in probed})
    trials = distinct_values(run["passkey"]["passkey"]["trials"] for run in probed)
    note = (
        f"By chance: {', '.join(f'{chance:.3f}' for chance in chances)}. In brackets Wilson's 95 % interval over "
        f"{trials} trials, which are the same for all models: columns move together."
    )
    caption = "Retrieval probe passkey: share of trials with the right first word, by distance D in tokens."
    return _by_distance("probe-accuracy", caption, rows, (note,))


def attention_table(runs: Sequence[Run]) -> Table:
    """The weights of each head of the last layer: the fraction beyond the training length, the mean lag, the total.

    Raises:
        MissingData: if no run has attention maps.
    """
    mapped = [(run, run["attention_summary"]) for run in runs if run.get("attention_summary")]
    if not mapped:
        raise MissingData("runs: got none with attention maps, expected at least one (attention in the recipe)")
    figures = {"beyond_training": ("share beyond", 3), "mean_lag": ("mean lag", 0), "kept": ("kept", 3)}
    heads = max(len(summary["heads"]) for _, summary in mapped)
    rows: list[tuple[Cell, ...]] = []
    for name, (words, digits) in figures.items():
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


def _score(row: Mapping[str, Any]) -> NumberCell:
    mean = mean_and_interval(row["scores"])
    return NumberCell(row["score"], error=mean.half, digits=3)


def _accuracy(row: Mapping[str, Any]) -> NumberCell:
    share, trials = row["accuracy"], len(row["scores"])
    found = proportion_interval(share, trials)
    return NumberCell(share, interval=found, digits=3)


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
    cells = tuple((label, seed, *(found.get(each) for each in distances)) for label, seed, found in rows)
    return Table(name, caption, columns, cells, notes)
