"""Result files made up for the tests of figures and tables."""

import math

import pytest

LENGTHS = (16, 32, 64, 128)
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
        "dynamics": {},
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
