"""Records by hand, whose tables can be computed on paper."""

from typing import Any

import pandas as pd

from rfa_lab.record import Record, read_rows, run_rows, write_rows

LENGTHS = (16, 64)


def run(
    label: str, seed: int = 0, losses: tuple[float, float] = (2.0, 3.0), preset: str = "", **changes: Any
) -> pd.DataFrame:
    """The rows of a run with two books, of 10 and 30 targets, whose losses differ by a tenth."""
    preset = preset or label
    spec = {"preset": preset, "model": {}, "data": "text", "tokenizer": "bytes", "seed": seed, "learning_rate": 1e-3}
    settings = {
        "recipe": "tiny",
        "train_length": 16,
        "spec": spec,
        "training": {"parameters": 1000, "tokens": 64, "tokens_per_second": 5.0, "valid_perplexity": 9.0 + seed},
        "config": {"num_hidden_layers": 2, "hidden_size": 8, "attention": {"decay": {"damping": 0.05}}},
        "fingerprint": "f",
    }
    measured: dict[str, dict[Any, float | None]] = {"loss blocks": dict(zip(LENGTHS, losses, strict=True))}
    for book, targets, above in (("A.txt", 10, 0.3), ("B.txt", 30, -0.1)):
        measured[f"loss blocks of {book}"] = {
            x: targets * (loss + above) for x, loss in zip(LENGTHS, losses, strict=True)
        }
        measured[f"targets blocks of {book}"] = dict.fromkeys(LENGTHS, targets)
    measured["validation"] = {32: 2.5, 64: 2.2}
    measured["position"] = {place: 3.0 for place in range(1, 65)}
    return run_rows(f"{label.replace(' ', '-')}-seed{seed}", label, preset, seed, {**settings, **changes}, measured)


def record(folder: Any, *frames: pd.DataFrame) -> Record:
    """The record of some runs, written and read."""
    write_rows(folder / "record.parquet", pd.concat(frames, ignore_index=True))
    return read_rows(folder / "record.parquet")
