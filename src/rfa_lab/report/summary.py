"""A summary of the runs: models, data, sizes, versions and machines, from result files."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from statistics import fmean
from typing import Any

import numpy as np

from rfa_lab.evaluation import PROTOCOLS

from .layout import Cell, NumberCell, Table
from .measurements import repeat_distance, retrieval_scores, trigram_of
from .runs import Run, by_label

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
    """Facts about all runs, as names and values. If runs differ, each value has its number of runs."""
    if not runs:
        return []
    seeds = sorted({run["seed"] for run in runs})
    tokens = sum(run["training"].get("tokens") or 0 for run in runs)
    timed = [seconds for run in runs if (seconds := _seconds(run))]
    time = f", {_duration(sum(timed))} for {len(timed)} of {len(runs)} runs" if timed else ""
    lengths = sorted({length for run in runs for length in run["evaluation"].get("lengths") or ()})
    found = [
        ("recipe", distinct_values(run["recipe"] for run in runs)),
        ("runs", f"{len(runs)} of {len({run['label'] for run in runs})} models"),
        ("seeds", ", ".join(map(str, seeds))),
        ("trained on", f"{tokens:,} tokens in all{time}"),
        ("training length", distinct_values(run["train_length"] for run in runs)),
        ("context lengths", ", ".join(map(str, lengths))),
        ("protocols", ", ".join(protocols(runs))),
        ("context used", context_used(runs)),
        *((name, distinct_values(run["spec"].get(key) for run in runs)) for key, name in _SPEC.items()),
        ("sizes", distinct_values(_sizes(run["config"]) for run in runs)),
        *((name, distinct_values(_values_over_stages(run, key) for run in runs)) for key, name in _ENVIRONMENT.items()),
    ]
    return [(name, value) for name, value in found if value]


def context_used(runs: Sequence[Run]) -> str:
    """How far the best model is below the trigram, and the most that a model gains from a passage that is repeated."""
    parts = []
    trigram, distance = trigram_of(runs), repeat_distance(runs)
    losses = {label: [run["training"]["valid_perplexity"] for run in of] for label, of in by_label(runs).items()}
    known = {label: float(np.log(of).mean()) for label, of in losses.items() if None not in of}
    if trigram is not None and known:
        best = min(known, key=known.__getitem__)
        below = math.log(trigram["valid_perplexity"]) - known[best]
        parts.append(f"on validation {best}, the best, is {below:.3f} nats a token below a trigram of the same tokens")
    shares = {}
    for label, of in by_label(runs).items():
        scores = retrieval_scores(of, "repeat")
        for place, trials, possible in zip(scores.distances, scores.trials, scores.possible, strict=True):
            if place == distance and possible:
                shares[label] = fmean(trials) / possible
    if shares:
        most = max(shares, key=shares.__getitem__)
        share = f"{shares[most]:.1%} of what perfect copying would ({most})"
        parts.append(f"a passage {distance} tokens before gains at most {share}")
    return "; ".join(parts)


def _seconds(run: Run) -> float | None:
    """Seconds of training; None for a resumed run, because not all of its time was measured."""
    return None if run.get("resumed") else run["training"].get("seconds")


def setting(runs: Sequence[Run]) -> str:
    """A sentence with the text, tokenizer, sizes and training tokens of the runs.

    If runs differ, each value has its number of runs.
    """
    found = {
        "text": distinct_values(PurePath(run["spec"]["data"]).name for run in runs),
        "tokenizer": distinct_values(run["spec"]["tokenizer"] for run in runs),
        "sizes": distinct_values(_sizes(run["config"]) for run in runs),
        "training tokens a run": distinct_values(f"{run['training']['tokens']:,}" for run in runs),
    }
    return f"Here: {', '.join(f'{name} {value}' for name, value in found.items())}."


def protocols(runs: Sequence[Run]) -> list[str]:
    """The protocols by which any run was evaluated; without runs the paper's protocol.

    Unknown protocols are left out, because a protocol becomes part of file names.
    """
    found = {name for run in runs for name in run["evaluations"] or {}} if runs else {"blocks"}
    return [name for name in PROTOCOLS if name in found]


def runs_table(runs: Sequence[Run]) -> Table:
    """A table of all runs: number of parameters, training tokens, speed, time, and validation perplexity at the end."""
    columns = ("run", "seed", "parameters", "tokens", "tokens/s", "minutes", "validation perplexity")
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        training, seconds = run["training"], _seconds(run)
        counts = [
            _number(training.get(name), digits=0, grouped=True)
            for name in ("parameters", "tokens", "tokens_per_second")
        ]
        minutes = _number(None if seconds is None else seconds / 60, digits=1)
        rows.append((run["label"], str(run["seed"]), *counts, minutes, _number(training.get("valid_perplexity"))))
    notes = [
        "Speeds and times are of the machine under whatever else it did, not of the models, which rfa bench compares "
        "in turns; no time where a run was stopped and gone on with."
    ]
    if one_group := dict.fromkeys(run["label"] for run in runs if run["spec"].get("one_group")):
        notes.append(f"The SDE's parameters trained like all others (one parameter group): {', '.join(one_group)}.")
    return Table("runs", "The runs.", columns, tuple(rows), tuple(notes))


def _number(value: float | None, **form: Any) -> NumberCell | None:
    return None if value is None else NumberCell(value, **form)


def distinct_values(values: Iterable[Any]) -> str:
    """The value that all runs share. If they differ, each value with its number of runs."""
    counts = Counter(str(value) for value in values if value is not None)
    if len(counts) < 2:
        return "".join(counts)
    return "; ".join(f"{value} ({count} run{'s' * (count > 1)})" for value, count in counts.items())


def _values_over_stages(run: Run, key: str) -> str | None:
    """The values at the start of a run, at each resumption and at its evaluation, each value once."""
    stages = [run["environment"], *(run.get("resumed") or ()), run.get("evaluation_environment")]
    return (
        ", then ".join(dict.fromkeys(str(each[key]) for each in stages if each and each.get(key) is not None)) or None
    )


def _sizes(config: Mapping[str, Any]) -> str:
    return f"{config['num_hidden_layers']} layers of {config['hidden_size']}, {config['num_attention_heads']} heads"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
