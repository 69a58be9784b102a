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


class RecipeTrigram:
    """The trigram of a recipe, whose runs have one text and training length, in the recipe's folder.

    It is trained on the blocks that the first of the runs with the most steps reads. Each block counts once, however
    often the run reads it. The other seeds read other blocks of the same text.
    """

    def __init__(self, recipe: Recipe, out: Path):
        self.recipe, self.path = recipe, out / "results" / TRIGRAM
        self.spec = recipe.resolved(max(recipe.runs, key=lambda run: run.spec.max_steps or math.inf))

    def is_missing(self) -> bool:
        """Whether there is no file of it yet. Blocks of two tokens have none."""
        return self.spec.length >= ORDER and not self.path.exists()

    def is_of_another_text(self, text: PreparedData) -> bool:
        """Whether its file is damaged, or of other tokens, text or evaluation than the recipe's."""
        if not self.path.exists():
            return False
        try:
            found = json.loads(self.path.read_text("utf-8"))
            lengths = {name: [row["length"] for row in one["rows"]] for name, one in found["evaluations"].items()}
            older = {"tokenizer", "evaluation"} - found.keys()  # entries that files of older versions lack
            about = self._about(text, self._blocks_read(text))
            same = all(found[name] == value for name, value in about.items() if name not in older)
        except (ValueError, KeyError, TypeError, AttributeError):
            return True
        plan = self.recipe.evaluation
        return not same or lengths != {name: list(plan.lengths) for name in plan.protocols}

    def write(self, text: PreparedData) -> None:
        """Train and score it, and write its file."""
        spec, plan, read = self.spec, self.recipe.evaluation, self._blocks_read(text)
        stream, length = text.streams["train"], spec.length
        blocks = np.stack([stream[place * length : (place + 1) * length] for place in np.sort(read)])
        trigram = Trigram(blocks, len(text.tokenizer))
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
            "recipe": self.recipe.name,
            "model": "modified Kneser-Ney trigram",
            **self._about(text, read),
            "fingerprint": text.fingerprints["test"],
            "environment": environment(),
            "valid_perplexity": _valid_perplexity(trigram, np.asarray(text.streams["valid"]), spec),
            **evaluated,
        }
        write_result(self.path, result)

    def _blocks_read(self, text: PreparedData) -> Int[np.ndarray, " seen"]:
        return seen_blocks(self.spec, len(text.streams["train"]) // self.spec.length)

    def _about(self, text: PreparedData, read: Int[np.ndarray, " seen"]) -> dict[str, Any]:
        """What it is trained on, and how it is scored."""
        spec, plan = self.spec, self.recipe.evaluation
        return {
            "train_length": spec.length,
            "tokens": len(read) * spec.length,
            "vocabulary": len(text.tokenizer),
            "tokenizer": spec.tokenizer,
            "seed": spec.seed,
            "data": {"fingerprint": text.fingerprint_of(*TRAINED_ON), "test_fingerprint": text.fingerprints["test"]},
            "evaluation": {**plan.model_dump(exclude={"attention"}), "valid_tokens": spec.valid_tokens},
        }


def _valid_perplexity(trigram: Trigram, stream: np.ndarray, spec: TrainingSpec) -> float:
    """On the validation blocks of the runs."""
    total = len(stream) // spec.length
    blocks = evenly_spaced(total, total if spec.valid_tokens is None else spec.valid_tokens // spec.length)
    chosen = [Window(block * spec.length, (block + 1) * spec.length, spec.length - 1) for block in blocks]
    losses = np.concatenate(list(trigram_losses(trigram, stream, chosen)))
    return float(np.exp(losses.mean()))
