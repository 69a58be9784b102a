"""What a recipe needs before its runs begin: text, tokenizer and disk, looked at in a moment."""

import shutil
from pathlib import Path
from typing import NamedTuple

from rfa_lab.data.corpora import find_text, find_tokenizer

from .plan import RunState
from .recipe import PlannedRun, Recipe

_GPT2 = 50257  # entries of GPT-2's vocabulary
_BYTES = 257  # entries of the tokenizer of bytes
_WEIGHTS = 4  # bytes of a parameter
_CHECKPOINT = 3 * _WEIGHTS  # with the two moments of the optimiser
_KEPT = 2 * _CHECKPOINT + _WEIGHTS  # bytes of a parameter that a finished run keeps
_AT_WORK = 4 * _CHECKPOINT + _WEIGHTS  # a third checkpoint while it is written, and that of the best model
_TOKEN = 2  # bytes of a token in the cache, up to 65,536 entries


class Requirement(NamedTuple):
    """Something that the runs need.

    Args:
        what: "text", "tokenizer" or "disk".
        there: whether they can begin.
        said: what was found, in words.
    """

    what: str
    there: bool
    said: str


def requirements(recipe: Recipe, states: list[RunState], out: Path) -> list[Requirement]:
    """Text, tokenizer and disk of a recipe. Nothing is read, fetched or written.

    Args:
        recipe: the recipe.
        states: of its runs and trials.
        out: the folder of run folders and results.
    """
    spec = recipe.resolved(recipe.runs[0])
    text, tokenizer = find_text(spec.data), find_tokenizer(spec.tokenizer)
    return [
        Requirement("text", text.there, f"{spec.data}: {text.said}"),
        Requirement("tokenizer", tokenizer.there, f"{spec.tokenizer}: {tokenizer.said}"),
        _disk(recipe, states, out),
    ]


def _disk(recipe: Recipe, states: list[RunState], out: Path) -> Requirement:
    """The space for the models that are kept, and for one run at work."""
    left = [state.run for state in states if state.state != "done"]
    sizes = [_parameters(run) for run in left]
    kept = sum(size for run, size in zip(left, sizes, strict=True) if not run.trial) if recipe.keep_models else 0
    needed = _KEPT * kept + _AT_WORK * max(sizes, default=0) + _TOKEN * (recipe.train_tokens or 0)
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    said = f"about {needed / 1e9:,.1f} GB needed with one process, {free / 1e9:,.1f} GB free at {there}"
    return Requirement("disk", free > needed, said)


def _parameters(run: PlannedRun) -> int:
    """About the number of a model's parameters: embeddings, and a layer's projections, twice those of a plain one."""
    kind, _, size = run.spec.tokenizer.partition(":")
    vocabulary = int(size) if kind == "bpe" else _BYTES if kind == "bytes" else _GPT2
    config = run.spec.model_config(vocab_size=vocabulary)
    width = config.hidden_size
    return width * vocabulary + config.num_hidden_layers * width * (
        8 * width + 2 * (config.intermediate_size or 4 * width)
    )
