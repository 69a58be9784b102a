"""The record of a recipe: one table of all that was measured, a row for each number.

| column | content |
| --- | --- |
| run, label, preset, seed | name of the run; of its model, which its seeds share; its preset; its seed |
| measure | what was measured, as in the next table |
| x, value | where, and the number |
| settings | the run's settings as JSON, once for each run |

| measure | x | value |
| --- | --- | --- |
| `loss P`, `stderr P`, `targets P` | context length | mean loss in nats by protocol P, its error, scored tokens |
| `loss P of BOOK`, `targets P of BOOK` | context length | the same of one document, the sum of losses |
| `validation` | tokens seen | validation loss in nats |
| `PARAMETER layer L head H` | training step | the value of a parameter of a head |
| `maps kept`, `maps mean_lag`, `maps beyond_training` | head | of the last layer's attention |
"""

from rfa.checks import needs

needs("pandas", "pyarrow")

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rfa.checks import require
from rfa.files import write_whole

COLUMNS = ("run", "label", "preset", "seed", "measure", "x", "value", "settings")
_NAMES = ("run", "label", "preset", "measure", "settings")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+ -]{0,249}")  # it becomes part of file names and of tables
PROTOCOLS = ("blocks", "matched", "strided")
PLANNED = "recipe.json"  # of a recipe's folder: its name, title, and the names of all runs
_MAX_STEPS = 16  # at most so many steps of each head's parameters
# Of a model's configuration:
_NOT_STORED = {"transformers_version", "rfa_version", "architectures", "dtype", "chunk_size_feed_forward"}
_NOT_STORED |= {"id2label", "label2id"}


class Record(NamedTuple):
    """The rows of a record without their settings, and the settings of each run by its name."""

    rows: pd.DataFrame
    settings: dict[str, dict[str, Any]]

    def values(self, measure: str) -> pd.DataFrame:
        """The values of a measure: a row for each (label, seed), a column for each x, ascending."""
        found = self.rows[self.rows["measure"] == measure].astype({"label": str})
        return found.pivot(index=["label", "seed"], columns="x", values="value").sort_index(axis=1)

    def books(self, protocol: str, of: str = "loss") -> pd.DataFrame:
        """Sums of losses, or numbers of targets, of each document: a row for each (label, seed), columns (x, book)."""
        begins = f"{of} {protocol} of "
        measures = [name for name in self.rows["measure"].unique() if name.startswith(begins)]
        found = self.rows[self.rows["measure"].isin(measures)].astype({"label": str, "measure": str})
        found = found.assign(book=found["measure"].str.removeprefix(begins))
        return found.pivot(index=["label", "seed"], columns=["x", "book"], values="value")

    def runs(self) -> pd.DataFrame:
        """A row for each run in the order of the record: its name, label, preset and seed."""
        names = self.rows[["run", "label", "preset", "seed"]].drop_duplicates("run")
        return names.astype({"run": str, "label": str, "preset": str}).reset_index(drop=True)

    def labels(self) -> list[str]:
        """The labels in the order of the record."""
        return [str(label) for label in self.rows["label"].unique()]

    def of(self, label: str) -> list[dict[str, Any]]:
        """The settings of a label's runs, by seed."""
        runs = self.runs()
        return [self.settings[run] for run in runs[runs["label"] == label].sort_values("seed")["run"]]

    def only(self, labels: Iterable[str]) -> "Record":
        """The part of the record with these labels."""
        rows = self.rows[self.rows["label"].isin(list(labels))]
        return Record(rows, {run: self.settings[run] for run in rows["run"].unique()})

    def protocols(self) -> list[str]:
        """The protocols by which any run was evaluated."""
        measures = set(self.rows["measure"].unique())
        return [name for name in PROTOCOLS if f"loss {name}" in measures]


def run_settings(
    recipe: str, spec: Any, record: Mapping[str, Any], asked: Mapping[str, Any], evaluated: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a finished run: from its specification, its run.json, and the evaluation that was asked for."""
    result = record["result"]
    names = ("valid_perplexity", "tokens", "tokens_per_second", "parameters")
    return {
        "recipe": recipe,
        "train_length": spec.length,
        "learning_rate": spec.learning_rate,
        "spec": spec.to_dict(),
        "evaluation": dict(asked),
        "training": {name: result[name] for name in names} | {"steps": record["steps"]},
        "config": {name: value for name, value in record["config"].items() if name not in _NOT_STORED},
        "environment": record["environment"],
        "resumed": record.get("resumed", []),
        "data": {**record["data"], "corpus": Path(record["data"]["corpus"]).name},
        "fingerprint": evaluated["fingerprint"],
    }


def measurements(
    evaluated: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> dict[str, dict[Any, float | None]]:
    """All that `full_evaluation` and `metrics.jsonl` say of a run, by measure and x."""
    found: dict[str, dict[Any, float | None]] = {}
    for protocol, of in evaluated["evaluations"].items():
        for name in ("loss", "stderr", "targets"):
            found[f"{name} {protocol}"] = {row["length"]: row[name] for row in of["rows"]}
        for book, sums in of["books"].items():
            found[f"loss {protocol} of {book}"] = {int(length): loss for length, (loss, _) in sums.items()}
            found[f"targets {protocol} of {book}"] = {int(length): count for length, (_, count) in sums.items()}
    found["validation"] = {line["tokens"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    logged = [line for line in lines if line.get("dynamics")]
    for index in np.unique(np.linspace(0, len(logged) - 1, _MAX_STEPS).round().astype(int)) if logged else ():
        line = logged[index]
        for layer, parameters in line["dynamics"].items():
            for name, heads in parameters.items():
                for head, value in enumerate(heads):
                    found.setdefault(f"{name} layer {layer} head {head}", {})[line["step"]] = value
    for name in ("kept", "mean_lag", "beyond_training") if evaluated["attention_summary"] else ():
        found[f"maps {name}"] = {k: head[name] for k, head in enumerate(evaluated["attention_summary"]["heads"])}
    return found


def run_rows(
    run: str,
    label: str,
    preset: str,
    seed: int,
    settings: Mapping[str, Any],
    measured: Mapping[str, Mapping[Any, float | None]],
) -> pd.DataFrame:
    """The rows of one run. `measured` has the values by measure and x; None is left out."""
    rows = [
        (measure, float(x), float(value))
        for measure, values in measured.items()
        for x, value in values.items()
        if value is not None
    ]
    frame = pd.DataFrame(rows, columns=["measure", "x", "value"])
    frame = frame.assign(run=run, label=label, preset=preset, seed=seed, settings=json.dumps(settings, allow_nan=False))
    return frame[list(COLUMNS)]


def write_rows(path: Path, frame: pd.DataFrame) -> None:
    """Write rows as a Parquet file, whole."""
    packed = frame.astype({**dict.fromkeys(_NAMES, "category"), "seed": "int32", "value": "float32"})
    write_whole(path, partial(packed.to_parquet, compression="zstd", index=False))


def read_rows(path: str | Path) -> Record:
    """The record in one Parquet file.

    Raises:
        ValueError: for a file that is damaged, or is no record.
    """
    try:
        frame = pd.read_parquet(path)
        missing = [name for name in COLUMNS if name not in frame.columns]
        require(not missing, "record", f"{path} without {', '.join(missing)}", f"columns {', '.join(COLUMNS)}")
        frame = frame[list(COLUMNS)].astype({"seed": "int64", "x": float, "value": float})
        first = frame.drop_duplicates("run")
        settings = {str(run): json.loads(text) for run, text in zip(first["run"], first["settings"], strict=True)}
    except OSError:
        raise
    except Exception as error:  # pyarrow has errors of its own
        raise ValueError(
            f"record: {path} is damaged or no record ({error}), expected what `rfa experiment` wrote; "
            "delete it, and its run is made again"
        ) from error
    names = {name for column in ("run", "label", "preset") for name in frame[column].unique()}
    odd = sorted(name for name in names if not _NAME.fullmatch(name))
    require(not odd, "record", f"{odd[:1]} in {path}", "names of letters, digits and _.=+- ")
    require(bool(np.isfinite(frame[["x", "value"]]).all(axis=None)), "record", f"NaN in {path}", "finite numbers")
    return Record(frame.drop(columns="settings"), settings)


def read_record(path: str | Path) -> tuple[Record, dict[str, str]]:
    """A record from its Parquet file, or from a recipe's folder, and why a run is missing, by name.

    Raises:
        ValueError: if there is none, its runs are of several texts, or two are of one label and seed.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted([*path.glob("*.parquet"), *(path / "results").glob("*.parquet")])
    missing: dict[str, str] = {}
    parts: list[Record] = []
    for file in files:
        try:
            parts.append(read_rows(file))
        except ValueError as error:
            missing[file.name] = str(error)
    if (planned := path / PLANNED).is_file():
        there = {run for part in parts for run in part.settings}
        waiting = [run for run in json.loads(planned.read_text(encoding="utf-8"))["runs"] if run not in there]
        missing |= {f"{len(waiting)} runs": f"no result yet: {', '.join(waiting)}"} if waiting else {}
    if not parts:
        said = "; ".join(missing.values()) or "no results"
        raise ValueError(f"record: got {path}: {said}; expected a folder of `rfa experiment --out`, or a record's file")
    rows = pd.concat([part.rows.astype({name: str for name in _NAMES[:-1]}) for part in parts], ignore_index=True)
    rows = rows.astype(dict.fromkeys(_NAMES[:-1], "category"))
    record = Record(rows, {run: settings for part in parts for run, settings in part.settings.items()})
    runs = record.runs()
    twice = runs[runs.duplicated(["label", "seed"])]["run"].tolist()
    require(not twice, "record", f"{twice} of a label and seed that another run has", "one run of each")
    texts = {json.dumps(settings.get("fingerprint")) for settings in record.settings.values()}
    require(len(texts) == 1, "record", f"runs on {len(texts)} texts", "runs on one text")
    return record, missing
