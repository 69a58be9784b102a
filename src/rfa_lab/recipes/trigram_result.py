"""The trigram of a recipe: trained on the tokens of its runs, scored on their targets, written beside their results."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from rfa.environment import environment
from rfa_lab.data import PreparedData, evenly_spaced, load_corpus
from rfa_lab.evaluation import Trigram, evaluate_trigram, trigram_losses
from rfa_lab.evaluation.perplexity import Window
from rfa_lab.evaluation.trigram import ORDER
from rfa_lab.results import RESULT_FORMAT, TRIGRAM, write_result
from rfa_lab.training import TRAINED_ON, TrainingSpec, seen_blocks

from .recipe import Recipe


def lacks_trigram(recipe: Recipe, out: Path) -> bool:
    """Whether the recipe's folder has no file of a trigram yet. Blocks of two tokens have none."""
    return recipe.runs[0].spec.length >= ORDER and not _path(out).exists()


def is_of_another_text(recipe: Recipe, text: PreparedData, out: Path) -> bool:
    """Whether the file of the trigram is damaged, or of other tokens, text or evaluation than the recipe's."""
    if not _path(out).exists():
        return False
    try:
        found = json.loads(_path(out).read_text("utf-8"))
        lengths = {name: [row["length"] for row in one["rows"]] for name, one in found["evaluations"].items()}
        about = _about(recipe, text, _blocks_read(recipe, text))
        older = {"tokenizer", "evaluation"} - found.keys()  # entries that files of older versions lack
        same = all(found[name] == value for name, value in about.items() if name not in older)
    except (ValueError, KeyError, TypeError, AttributeError):
        return True
    plan = recipe.evaluation
    return not same or lengths != {name: list(plan.lengths) for name in plan.protocols}


def _blocks_read(recipe: Recipe, text: PreparedData) -> Int[np.ndarray, " seen"]:
    """The blocks of the training text that the trigram is trained on."""
    spec = _longest(recipe)
    return seen_blocks(spec, len(text.streams["train"]) // spec.length)


def _about(recipe: Recipe, text: PreparedData, read: Int[np.ndarray, " seen"]) -> dict[str, Any]:
    """What the trigram is trained on, and how it is scored."""
    spec, plan = _longest(recipe), recipe.evaluation
    return {
        "train_length": spec.length,
        "tokens": len(read) * spec.length,
        "vocabulary": len(text.tokenizer),
        "tokenizer": spec.tokenizer,
        "seed": spec.seed,
        "data": {"fingerprint": text.fingerprint_of(*TRAINED_ON), "test_fingerprint": text.fingerprints["test"]},
        "evaluation": {
            **plan.model_dump(exclude={"attention"}),
            "valid_tokens": spec.valid_tokens,
        },
    }


def _longest(recipe: Recipe) -> TrainingSpec:
    """The first of the runs with the most steps."""
    return recipe.resolved(max(recipe.runs, key=lambda run: run.spec.max_steps or math.inf))


def _path(out: Path) -> Path:
    return out / "results" / TRIGRAM


def write_trigram(recipe: Recipe, text: PreparedData, out: Path) -> None:
    """Train the trigram on the blocks that a run of the recipe reads, score it, and write its file, whole.

    It is the first of the runs with the most steps. Each block counts once, however often the run reads it. The other
    seeds read other blocks of the same text.

    Args:
        recipe: all its runs have one text and training length.
        text: its three splits.
        out: the folder of the recipe.
    """
    spec = _longest(recipe)
    stream, length, read = text.streams["train"], spec.length, _blocks_read(recipe, text)
    blocks = np.stack([stream[place * length : (place + 1) * length] for place in np.sort(read)])
    trigram, plan = Trigram(blocks, len(text.tokenizer)), recipe.evaluation
    documents = load_corpus(spec.data, spec.split_by).documents("test")
    evaluated = evaluate_trigram(
        trigram,
        np.asarray(text.streams["test"]),
        [document.name for document in documents],
        text.tokenizer,
        train_length=length,
        lengths=plan.lengths,
        protocols=plan.protocols,
        by_position=plan.by_position,
        passkey=plan.passkey,
    )
    result: dict[str, Any] = {
        "format": RESULT_FORMAT,
        "recipe": recipe.name,
        "model": "modified Kneser-Ney trigram",
        **_about(recipe, text, read),
        "fingerprint": text.fingerprints["test"],
        "environment": environment(),
        "valid_perplexity": _valid_perplexity(trigram, np.asarray(text.streams["valid"]), spec),
        **evaluated,
    }
    write_result(_path(out), result)


def _valid_perplexity(trigram: Trigram, stream: np.ndarray, spec: TrainingSpec) -> float:
    """On the validation blocks of the runs."""
    total = len(stream) // spec.length
    blocks = evenly_spaced(total, total if spec.valid_tokens is None else spec.valid_tokens // spec.length)
    chosen = [Window(block * spec.length, (block + 1) * spec.length, spec.length - 1) for block in blocks]
    losses = np.concatenate(list(trigram_losses(trigram, stream, chosen)))
    return float(np.exp(losses.mean()))
