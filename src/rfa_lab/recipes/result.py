"""What a run's result holds: its settings, and all that was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rfa_lab.record import run_rows, write_rows

from .recipe import PlannedRun

_POINTS = 16  # maximum number of stored steps of each head's parameters
_UNTOLD = {
    "transformers_version",
    "rfa_version",
    "architectures",
    "dtype",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
}


def run_settings(
    recipe: str, run: PlannedRun, record: Mapping[str, Any], asked: Mapping[str, Any], evaluated: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a finished run, from its run.json and its evaluation."""
    made = record["result"]
    names = ("valid_perplexity", "tokens", "tokens_per_second", "parameters", "best_step")
    return {
        "recipe": recipe,
        "train_length": run.spec.length,
        "learning_rate": run.spec.learning_rate,
        "spec": run.spec.to_dict(),
        "evaluation": dict(asked),
        "training": {name: made[name] for name in names if name in made} | {"steps": record["steps"]},
        "config": {name: value for name, value in record["config"].items() if name not in _UNTOLD},
        "environment": record["environment"],
        "resumed": record.get("resumed", []),
        "data": {**record["data"], "corpus": Path(record["data"]["corpus"]).name},
        "fingerprint": evaluated["fingerprint"],
    }


def measurements(
    evaluated: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> dict[str, dict[Any, float | None]]:
    """All that `full_evaluation` and `metrics.jsonl` say of a run, by measure and x, as `rfa_lab.record` names them."""
    found: dict[str, dict[Any, float | None]] = {}
    for protocol, of in evaluated["evaluations"].items():
        for name in ("loss", "stderr", "targets"):
            found[f"{name} {protocol}"] = {row["length"]: row[name] for row in of["rows"]}
        for book, sums in of["books"].items():
            found[f"loss {protocol} of {book}"] = {int(length): loss for length, (loss, _) in sums.items()}
            found[f"targets {protocol} of {book}"] = {int(length): count for length, (_, count) in sums.items()}
    if by_position := evaluated["by_position"]:
        found["position"] = dict(enumerate(by_position["loss"], 1))
        found["position stderr"] = dict(enumerate(by_position["stderr"], 1))
    found["validation"] = {line["tokens"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    logged = [line for line in lines if line.get("dynamics")]
    for index in sorted({round(k * (len(logged) - 1) / (_POINTS - 1)) for k in range(_POINTS)} if logged else ()):
        line = logged[index]
        for layer, parameters in line["dynamics"].items():
            for name, heads in parameters.items():
                for head, value in enumerate(heads):
                    found.setdefault(f"{name} layer {layer} head {head}", {})[line["step"]] = value
    for name in ("kept", "mean_lag", "beyond_training") if evaluated["attention_summary"] else ():
        found[f"maps {name}"] = {k: head[name] for k, head in enumerate(evaluated["attention_summary"]["heads"])}
    return found


def write_result(
    path: Path, run: PlannedRun, settings: dict[str, Any], measured: Mapping[str, Mapping[Any, float | None]]
) -> None:
    """Write the rows of a run, which has the file's name."""
    write_rows(path, run_rows(path.stem, run.label, run.spec.preset, run.spec.seed, settings, measured))


def versions_of(*made: Mapping[str, Any]) -> list[str]:
    """The versions and commits of rfa in words, each once, that made results or what run.json tells of."""
    environments = [one for each in made for one in (each.get("environment", {}), *each.get("resumed", []))]
    named = [f"{one.get('rfa')}{f' {commit}' if (commit := one.get('commit')) else ''}" for one in environments if one]
    return list(dict.fromkeys(named))
