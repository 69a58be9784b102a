"""Result files made up for the tests of figures and tables."""

import math

import numpy as np
import pytest

from rfa_lab.results import RESULT_FORMAT, write_result

LENGTHS = (16, 32, 64, 128)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
CONFIGS = {
    "m2-sc-rfa": {"prior": "lyapunov", "damping": 0.05, "zero_heads": 2, "steady_state": 0.1},
    "m3-sc-rfa": {"prior": "lyapunov", "damping": 5.0, "zero_heads": 0, "steady_state": 0.5},
}  # as result files have them; another preset of today's must not change a table of theirs
HEAD = {"kept": 0.75, "mean_lag": 21.0, "beyond_training": 0.5}
BOOKS = {"emma": 40, "persuasion": 10, "ulysses": 25}


def result(label, seed=0, loss=4.0, slope=0.1, lengths=LENGTHS, train_length=16, books=BOOKS):
    """A run whose loss rises by `slope` a doubling; each book's loss lies the same for every run around the mean."""
    losses = {length: loss + slope * place for place, length in enumerate(lengths)}
    targets = sum(books.values())
    return {
        "run": f"{label}-seed{seed}",
        "label": label,
        "preset": label,
        "seed": seed,
        "train_length": train_length,
        "curve": [{"step": step, "tokens": 64 * step, "valid_loss": loss + 1 / step} for step in (1, 2, 3)],
        "dynamics": {"steps": [], "tokens": [], "layers": {}},
        "evaluations": {
            "blocks": {
                "rows": [
                    {"length": n, "loss": x, "perplexity": math.exp(x), "targets": targets, "stderr": 0.01}
                    for n, x in losses.items()
                ],
                "books": {
                    book: {str(n): [x * count, count] for n, x in losses.items()} for book, count in books.items()
                },
            }
        },
    }


def near(*values):
    return pytest.approx(values, rel=1e-12)  # sums of a few float64


def whole_result(label, seed=0, *, preset=None, recipe="tiny", data="../corpus", maps=False, **changes):
    """All that a result file holds, two protocols, losses by position and both probes."""
    made = result(label, seed, **changes)
    rows = made["evaluations"]["blocks"]
    return {
        **made,
        "format": RESULT_FORMAT,
        "recipe": recipe,
        "preset": preset or label,
        "spec": {
            "preset": preset or label,
            "data": data,
            "tokenizer": "bytes",
            "split_by": "file",
            "model": {"hidden_size": 16},
        },
        "config": {**SIZES, **CONFIGS.get(preset or label, {"prior": "flat", "damping": 0.05})},
        "evaluation": {"lengths": list(LENGTHS), "protocols": {"blocks": None, "matched": 64}},
        "training": {
            "valid_perplexity": 50.0 + seed,
            "tokens": 192,
            "tokens_per_second": 1234.5,
            "parameters": 98765,
            "steps": 3,
            "seconds": 90.0,
        },
        "environment": {"commit": "c0ffee", "machine": "x86_64, 2 CPUs", "torch": "2.13.0", "device": "cpu"},
        "data": {"fingerprint": "all", "test_fingerprint": "test"},
        "fingerprint": "test",
        "resumed": [],
        "evaluation_environment": None,
        "evaluations": {"blocks": rows, "matched": rows},
        "by_position": {"protocol": "blocks", "length": 128, "loss": [4 + 1 / place for place in range(1, 128)]},
        "passkey": {"passkey": probe("passkey", 1 / 16), "repeat": probe("repeat", None)},
        "attention": f"{made['run']}.attention.npz" if maps else None,
        "attention_summary": {"length": 128, "heads": 2 * [HEAD]} if maps else None,
    }


def probe(kind, chance):
    rows = [
        {
            "distance": distance,
            "score": 2.0 / distance,
            "stderr": 0.125,  # of these two trials
            "accuracy": chance and 0.5,
            "scores": [2.0 / distance - 0.125, 2.0 / distance + 0.125],
        }
        for distance in (8, 16, 32)
    ]
    return {"kind": kind, "trials": 2, "chance": chance, "rows": rows}


def write_results(out, runs):
    """As `rfa experiment` leaves them."""
    for run in runs:
        write_result(out / "results" / f"{run['run']}.json", run)
        if run["attention"]:
            maps = {"weights": np.ones((2, 3, 3), np.float16), "near": np.ones((2, 2, 4), np.float16)}
            np.savez_compressed(out / "results" / run["attention"], **maps)
    return out
