"""What was run, with what and where, and what the retrieval probes found, from result files."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rfa.evaluation import PROTOCOLS

from .lacking import Lacking
from .layout import Cell, Number, Table
from .runs import Run

_ENVIRONMENT = {
    "commit": "commit",
    "machine": "machine",
    "device": "device",
    "threads": "threads",
    "rfa": "rfa",
    "torch": "PyTorch",
    "python": "Python",
}
_SPEC = {"data": "text", "split_by": "split by", "tokenizer": "tokenizer"}


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What holds of all runs, as names and values; where runs differ, each value with the number of its runs."""
    seeds = sorted({run["seed"] for run in runs})
    tokens = sum(run["training"].get("tokens") or 0 for run in runs)
    seconds = sum(run["training"].get("seconds") or 0.0 for run in runs)
    lengths = sorted({length for run in runs for length in run["evaluation"].get("lengths") or ()})
    found = [
        ("recipe", _values(run["recipe"] for run in runs)),
        ("runs", f"{len(runs)} of {len({run['label'] for run in runs})} models"),
        ("seeds", ", ".join(map(str, seeds))),
        ("trained on", f"{tokens:,} tokens in all, {_duration(seconds)}"),
        ("training length", _values(run["train_length"] for run in runs)),
        ("context lengths", ", ".join(map(str, lengths))),
        ("protocols", ", ".join(protocols(runs))),
        *((name, _values(run["spec"].get(key) for run in runs)) for key, name in _SPEC.items()),
        ("sizes", _values(_sizes(run["spec"].get("model") or {}) for run in runs)),
        *((name, _values(_over_stages(run, key) for run in runs)) for key, name in _ENVIRONMENT.items()),
    ]
    return [(name, value) for name, value in found if value]


def setting(runs: Sequence[Run]) -> str:
    """Text, tokenizer, sizes and training tokens of a run, in a sentence; where runs differ, with how many each."""
    found = {
        "text": _values(PurePath(run["spec"]["data"]).name for run in runs),
        "tokenizer": _values(run["spec"]["tokenizer"] for run in runs),
        "layers": _values(run["config"].get("num_hidden_layers") for run in runs),
        "heads": _values(run["config"].get("num_attention_heads") for run in runs),
        "hidden size": _values(run["config"].get("hidden_size") for run in runs),
        "training tokens a run": _values(f"{run['training']['tokens']:,}" for run in runs),
    }
    return f"Here: {', '.join(f'{name} {value}' for name, value in found.items() if value)}."


def protocols(runs: Iterable[Run]) -> list[str]:
    """By which any run was evaluated; of the protocols that there are, for they name files."""
    found = {name for run in runs for name in run["evaluations"] or {}}
    return [name for name in PROTOCOLS if name in found]


def runs_table(runs: Sequence[Run]) -> Table:
    """Each run: its size, what it was trained on, how fast, and where it ended."""
    columns = ("run", "seed", "parameters", "tokens", "tokens/s", "minutes", "validation perplexity")
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        training = run["training"]
        seconds = training.get("seconds")
        counts = (_whole(training.get(name)) for name in ("parameters", "tokens", "tokens_per_second"))
        minutes = None if seconds is None else Number(seconds / 60, digits=1)
        perplexity = training.get("valid_perplexity")
        rows.append(
            (run["label"], str(run["seed"]), *counts, minutes, None if perplexity is None else Number(perplexity))
        )
    return Table("runs", "The runs.", columns, tuple(rows))


def probe_table(runs: Sequence[Run], kind: str) -> Table:
    """How much likelier a key is because it stands in the past, by distance, for each run that was probed.

    Args:
        runs: result files.
        kind: "passkey" or "repeat", see `rfa.evaluation.probe`.

    Raises:
        Lacking: where no run was probed.
    """
    rows = _probed(runs, kind, lambda row: Number(row["score"], error=row["stderr"], digits=3))
    sought = {"passkey": "a word named in the past", "repeat": "a passage repeated from the past"}[kind]
    caption = f"Retrieval probe {kind}: gain in nats a token for {sought}, by distance D in tokens."
    notes = ("Mean ± standard error over trials; 0: what stands D tokens back is not used.",)
    return _by_distance(f"probe-{kind}", caption, rows, notes)


def accuracy_table(runs: Sequence[Run]) -> Table:
    """How often the passkey's first word is the likeliest of those to choose among. Raises as `probe_table`."""
    probed = [run for run in runs if (run["passkey"] or {}).get("passkey")]
    rows = _probed(probed, "passkey", lambda row: Number(row["accuracy"], digits=3))
    chances = sorted({run["passkey"]["passkey"]["chance"] for run in probed})
    note = f"By chance: {', '.join(f'{chance:.4f}' for chance in chances)}."
    caption = "Retrieval probe passkey: share of trials with the right first word, by distance D in tokens."
    return _by_distance("probe-accuracy", caption, rows, (note,))


Row = tuple[str, str, dict[int, Number]]


def _probed(runs: Sequence[Run], kind: str, number: Callable[[Mapping[str, Any]], Number]) -> list[Row]:
    probes = ((run, (run["passkey"] or {}).get(kind)) for run in runs)
    rows = [
        (run["label"], str(run["seed"]), {row["distance"]: number(row) for row in probe["rows"]})
        for run, probe in probes
        if probe
    ]
    if not rows:
        raise Lacking(f"runs: got none with the probe {kind}, expected at least one (passkey: true in the recipe)")
    return rows


def _by_distance(name: str, caption: str, rows: Sequence[Row], notes: tuple[str, ...]) -> Table:
    distances = sorted({distance for _, _, found in rows for distance in found})
    columns = ("run", "seed", *(f"D = {distance}" for distance in distances))
    cells = tuple((label, seed, *(found.get(each) for each in distances)) for label, seed, found in rows)
    return Table(name, caption, columns, cells, notes)


def _values(values: Iterable[Any]) -> str:
    counts = Counter(str(value) for value in values if value is not None)
    if len(counts) < 2:
        return "".join(counts)
    return "; ".join(f"{value} ({count} run{'s' * (count > 1)})" for value, count in counts.items())


def _over_stages(run: Run, key: str) -> str | None:
    """What held when a run was begun, gone on with and evaluated, each value once."""
    stages = [run["environment"], *(run.get("resumed") or ()), run.get("evaluation_environment")]
    return (
        ", then ".join(dict.fromkeys(str(each[key]) for each in stages if each and each.get(key) is not None)) or None
    )


def _sizes(model: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sorted(model.items()))


def _whole(value: float | None) -> Number | None:
    return None if value is None else Number(value, digits=0, grouped=True)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
