"""From a run folder and a text to a result that stands for itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from rfa.data import fingerprint, load_corpus, load_documents, token_stream
from rfa.training import RunFolder, TrainingSpec
from rfa.training.environment import environment

from .perplexity import Progress, loss_by_position, perplexities
from .windows import check_protocol

RESULT_FORMAT = 1


def evaluate(
    run: str | Path,
    *,
    data: str | None = None,
    lengths: Sequence[int] | None = None,
    protocol: str = "blocks",
    max_tokens: int | None = None,
    by_position: bool = False,
    device: str | None = None,
    data_progress: Callable[[int, int], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Perplexities of a run on its test split, or on any text.

    Args:
        run: a run folder.
        data: a corpus, file or folder, all of it; the run's own test split by default.
        lengths: context lengths; 1, 2, 4 and 8 times the training length by default.
        protocol: "blocks", "matched" or "strided".
        max_tokens: at most so many of the text's first tokens.
        by_position: also the loss at each position of the longest length.
        device: "cuda" or "cpu"; the GPU where there is one.
        data_progress: called with bytes of text read and in all.
        progress: called with tokens scored and in all.

    Returns:
        `rows` of `perplexities`, and what they are of: run, its weights (`model`, or a checkpoint where it is not
        finished), preset, seed, data, training length, parameters, environment.

    Raises:
        ValueError: for a folder that is no run, bad data, or a length that does not fit the text.
    """
    folder = RunFolder(run)
    record = folder.read()
    spec = TrainingSpec.from_dict(record["spec"])
    source = folder.weights()
    check_protocol(protocol)
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens: got {max_tokens}, expected at least 2")
    tokenizer = folder.load_tokenizer()
    documents = load_corpus(spec.data, spec.split_by).documents("test") if data is None else load_documents(data)
    content = fingerprint(documents)
    if data is None and content != record["data"]["test_fingerprint"]:
        raise ValueError(f"data: the test split of {spec.data} is no longer what run {folder.path} left out")
    stream = token_stream(documents, tokenizer, None, data_progress)[:max_tokens]
    lengths = sorted(set(lengths)) if lengths else [spec.length * factor for factor in (1, 2, 4, 8)]
    model = folder.load_model(source)
    cast(Any, model).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    result = {
        "format": RESULT_FORMAT,
        "run": str(folder.path),
        "preset": spec.preset,
        "model": spec.model,
        "seed": spec.seed,
        "finished": record["finished"],
        "weights": source.relative_to(folder.path).as_posix(),
        "train_length": spec.length,
        "parameters": model.num_parameters(),
        "data": data if data is not None else f"{spec.data} (test split)",
        "fingerprint": content,
        "tokens": len(stream),
        "environment": environment(),
        "rows": perplexities(model, stream, lengths, protocol, progress=progress),
    }
    if by_position:
        losses = loss_by_position(model, stream, max(lengths), progress=progress)
        result["by_position"] = {"protocol": "blocks", "length": max(lengths), "loss": losses}
    return result
