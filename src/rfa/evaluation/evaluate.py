"""Evaluation of a run folder on a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from rfa.data import document_of_token, fingerprint, load_corpus, load_documents, token_stream
from rfa.files import write_whole
from rfa.models import RFAForCausalLM
from rfa.progress import Progress, Stage, StageProgress
from rfa.results import RESULT_FORMAT, write_maps
from rfa.training import RunFolder, TrainingSpec
from rfa.training.environment import environment

from .attention_maps import MAP_LENGTHS, attention_maps, middle_window
from .perplexity import LossByDocument, LossByPosition, loss_by_position, perplexities
from .probes import probe
from .windows import check_protocol, windows


@dataclass(frozen=True)
class EvaluationInput:
    """A run and a text, ready to be evaluated.

    Args:
        folder: the run's.
        record: its run.json.
        spec: what it was asked to do.
        weights: folder of the model, or of a checkpoint where the run is not finished.
        tokenizer: the run's.
        names: of the text's documents.
        fingerprint: of the text.
        stream: its tokens.
    """

    folder: RunFolder
    record: dict[str, Any]
    spec: TrainingSpec
    weights: Path
    tokenizer: Any
    names: tuple[str, ...]
    fingerprint: str
    stream: np.ndarray

    def check(self, protocol: str, lengths: Sequence[int], max_tokens: int | None = None) -> None:
        """Raise `ValueError` for a protocol or a length that does not fit the text, before any work."""
        for length in lengths:
            windows(protocol, len(self.stream[:max_tokens]), length, list(lengths))

    def model(self, device: str | None = None) -> RFAForCausalLM:
        """The run's model in evaluation mode, on a device; on the GPU where there is one."""
        model = self.folder.load_model(self.weights)
        cast(Any, model).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return model

    def by_document(self) -> LossByDocument:
        """An observer of losses on the stream."""
        return LossByDocument(self.names, document_of_token(self.stream, self.tokenizer.eos_token_id))


def load_evaluation_input(
    run: str | Path, data: str | None = None, data_progress: Progress | None = None
) -> EvaluationInput:
    """A run and its test split, or all of another text.

    Args:
        run: a run folder.
        data: a corpus, file or folder; the run's own test split by default.
        data_progress: called with bytes of text read and in all.

    Raises:
        ValueError: for a folder that is no run, bad data, or a test split that has changed since.
    """
    folder = RunFolder(run)
    record = folder.read()
    spec = TrainingSpec.from_dict(record["spec"])
    weights = folder.weights()
    tokenizer = folder.load_tokenizer()
    documents = load_corpus(spec.data, spec.split_by).documents("test") if data is None else load_documents(data)
    content = fingerprint(documents)
    if data is None and content != record["data"]["test_fingerprint"]:
        raise ValueError(f"data: the test split of {spec.data} is no longer what run {folder.path} left out")
    stream = token_stream(documents, tokenizer, None, data_progress)
    names = tuple(document.name for document in documents)
    return EvaluationInput(folder, record, spec, weights, tokenizer, names, content, stream)


FACTORS = (1, 2, 4, 8)  # context lengths, in training lengths


def evaluate(
    run: str | Path,
    *,
    data: str | None = None,
    lengths: Sequence[int] | None = None,
    protocol: str = "blocks",
    max_tokens: int | None = None,
    by_position: bool = False,
    device: str | None = None,
    data_progress: Progress | None = None,
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
        `rows` of `perplexities`, `books` as `full_evaluation` has them, and what they are of: run, its weights
        (`model`, or a checkpoint where it is not finished), preset, seed, data, training length, parameters,
        environment.

    Raises:
        ValueError: for a folder that is no run, bad data, or a length that does not fit the text.
    """
    check_protocol(protocol)
    _check_max_tokens(max_tokens)
    inputs = load_evaluation_input(run, data, data_progress)
    spec, stream = inputs.spec, inputs.stream[:max_tokens]
    lengths = sorted(set(lengths)) if lengths else [spec.length * factor for factor in FACTORS]
    inputs.check(protocol, lengths, max_tokens)
    model, books = inputs.model(device), inputs.by_document()
    result = {
        "format": RESULT_FORMAT,
        "run": str(inputs.folder.path),
        "preset": spec.preset,
        "model": spec.model,
        "seed": spec.seed,
        "finished": inputs.record["finished"],
        "weights": inputs.weights.relative_to(inputs.folder.path).as_posix(),
        "train_length": spec.length,
        "parameters": model.num_parameters(),
        "data": data if data is not None else f"{spec.data} (test split)",
        "fingerprint": inputs.fingerprint,
        "tokens": len(stream),
        "environment": environment(),
        "rows": perplexities(model, stream, lengths, protocol, observe=books, progress=progress),
    }
    result["books"] = books.totals()
    if by_position:
        losses = loss_by_position(model, stream, max(lengths), progress=progress)
        result["by_position"] = {"protocol": "blocks", "length": max(lengths), "loss": losses}
    return result


def full_evaluation(
    folder: str | Path,
    *,
    lengths: Sequence[int],
    protocols: Mapping[str, int | None],
    by_position: bool = False,
    passkey: bool = False,
    attention: Path | None = None,
    device: str | None = None,
    progress: StageProgress | None = None,
) -> dict[str, Any]:
    """All that a record needs of a run on its test split, from one loading.

    Args:
        folder: a run folder.
        lengths: context lengths.
        protocols: each protocol with the number of tokens that it scores, spread evenly over the text; None for all.
        by_position: also the loss at each position of the longest length, under `blocks`.
        passkey: also the probes of `rfa.evaluation.probe`, at distances up to the longest length.
        attention: where to write what `attention_maps` makes of 8 times the training length (`.npz`); None for none.
        device: "cuda" or "cpu"; the GPU where there is one.
        progress: called with the stage ("text", a protocol, "by_position", a probe), how much of it is done, and of how
            much.

    Returns:
        `evaluations`, by protocol: `rows` of `perplexities`, and `books`, for each test document and length the
        summed loss and the number of scored targets, which add up to the row's. `by_position` as `evaluate` has it,
        with the number of windows and the standard errors over them.
        `passkey`: `{"passkey": ..., "repeat": ...}`, what `probe` returns. `attention`: the file's name, with
        `attention_summary`. All of these None where they were not asked for. `fingerprint` of the text, `environment`.

    Raises:
        ValueError: for a folder that is no run, a changed test split, or a length that does not fit the text.
    """
    lengths = sorted(set(lengths))
    if not lengths:
        raise ValueError("lengths: got none, expected at least one")
    for protocol, scored in protocols.items():
        check_protocol(protocol)
        if scored is not None and scored < lengths[-1]:
            raise ValueError(f"{protocol}: got {scored} tokens to score, expected at least {lengths[-1]}, the longest")

    def progress_of(stage: str) -> Progress | None:
        return partial(progress, Stage(stage)) if progress else None

    inputs = load_evaluation_input(folder, None, progress_of("text"))
    spec, stream, longest = inputs.spec, inputs.stream, lengths[-1]
    for protocol in protocols:
        inputs.check(protocol, lengths)
    window = None if attention is None else middle_window(len(stream), MAP_LENGTHS * spec.length)
    model = inputs.model(device)

    positions = LossByPosition(longest)
    evaluations = {}
    for protocol, scored in protocols.items():
        books = inputs.by_document()

        def observe(length: int, tokens: Any, losses: Any, protocol: str = protocol, books: Any = books) -> None:
            books(length, tokens, losses)
            if protocol == "blocks" and by_position:
                positions(length, tokens, losses)

        given: dict[str, Any] = {"scored": scored, "observe": observe, "progress": progress_of(protocol)}
        rows = perplexities(model, stream, lengths, protocol, **given)
        evaluations[protocol] = {"rows": rows, "books": books.totals()}
    if by_position and "blocks" not in protocols:
        perplexities(model, stream, [longest], observe=positions, progress=progress_of("by_position"))

    probes = None
    if passkey:
        about = {"train_length": spec.length, "longest": longest, "tokenizer": inputs.tokenizer}
        probes = {
            kind: probe(kind, model, stream, **about, progress=progress_of(kind)) for kind in ("passkey", "repeat")
        }
    summary = None
    if attention is not None and window is not None:
        maps, summary = attention_maps(model, stream[window], spec.length)
        summary["start"] = window.start
        write_whole(attention, partial(write_maps, maps))
    by = None
    if by_position:
        errors = {"windows": positions.windows, "stderr": positions.errors()}
        by = {"protocol": "blocks", "length": longest, "loss": positions.means(), **errors}
    return {
        "evaluations": evaluations,
        "by_position": by,
        "passkey": probes,
        "attention": None if attention is None else attention.name,
        "attention_summary": summary,
        "fingerprint": inputs.fingerprint,
        "environment": environment(),
    }


def _check_max_tokens(max_tokens: int | None) -> None:
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens: got {max_tokens}, expected at least 2")
