"""Evaluation of a run folder on a text, and text samples from it."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from rfa.checks import check_range, require
from rfa.environment import environment
from rfa.files import write_whole
from rfa.models import RFAForCausalLM
from rfa.progress import Progress, Stage, StageProgress
from rfa_lab.data import document_of_token, fingerprint, load_corpus, load_documents, token_stream
from rfa_lab.training import RunFolder, TrainingSpec

from .attention_maps import MAP_LENGTHS, attention_maps, middle_window
from .perplexity import LossByDocument, check_protocol, check_scored, check_windows, perplexities


class EvaluationInput(NamedTuple):
    """A run and a text, ready for evaluation: the names, the fingerprint and the token ids of its documents."""

    folder: RunFolder
    record: dict[str, Any]
    spec: TrainingSpec
    weights: Path
    tokenizer: Any
    names: tuple[str, ...]
    fingerprint: str
    stream: np.ndarray

    def model(self) -> RFAForCausalLM:
        """The run's model in evaluation mode, on the GPU if there is one."""
        model = self.folder.load_model(self.weights)
        cast(Any, model).to("cuda" if torch.cuda.is_available() else "cpu")
        return model

    def by_document(self) -> LossByDocument:
        """A new observer that sums losses by document of the stream."""
        return LossByDocument(self.names, document_of_token(self.stream, self.tokenizer.eos_token_id))


def load_evaluation_input(
    run: str | Path, data: str | None = None, data_progress: Progress | None = None
) -> EvaluationInput:
    """Load a run and its test split, or another text. Raises `ValueError` for a bad run or text or a changed split."""
    folder = RunFolder(run)
    record = folder.read()
    spec = TrainingSpec.from_dict(record["spec"])
    weights = folder.weights()
    tokenizer = folder.load_tokenizer()
    documents = load_corpus(spec.data, spec.split_by).documents("test") if data is None else load_documents(data)
    content = fingerprint(documents)
    if data is None and content != record["data"]["test_fingerprint"]:
        changed = f"the test split of {spec.data} has changed since run {folder.path} was started"
        raise ValueError(f"data: {changed}, expected the same text")
    stream = token_stream(documents, tokenizer, None, data_progress)
    names = tuple(document.name for document in documents)
    return EvaluationInput(folder, record, spec, weights, tokenizer, names, content, stream)


def evaluate(
    run: str | Path,
    *,
    data: str | None = None,
    lengths: Sequence[int] | None = None,
    protocol: str = "blocks",
    max_tokens: int | None = None,
    data_progress: Progress | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Perplexities of a run on its test split, or on any text.

    Args:
        run: a run folder.
        data: a corpus, file or folder, which is read as a whole; by default the run's own test split.
        lengths: context lengths in tokens; by default 1, 2, 4 and 8 times the training length.
        protocol: "blocks", "matched" or "strided", as in `windows`.
        max_tokens: use only this many tokens from the start of the text.
        data_progress: called with the bytes of text read so far and their total.
        progress: called with the tokens scored so far and their total.

    Returns:
        `rows` as from `perplexities`, `books` as from `full_evaluation`, and the description of the run: its folder,
        weights (`model`, or a checkpoint of an unfinished run), preset, seed, data, training length, number of
        parameters and environment.

    Raises:
        ValueError: for a folder that is no run, bad data, or a length that does not fit the text.
    """
    check_protocol(protocol)
    if max_tokens is not None:
        check_range("max_tokens", max_tokens, 2, sys.maxsize)
    inputs = load_evaluation_input(run, data, data_progress)
    spec, stream = inputs.spec, inputs.stream[:max_tokens]
    lengths = sorted(set(lengths or [spec.length * factor for factor in (1, 2, 4, 8)]))
    check_windows([protocol], len(stream), lengths)
    model, books = inputs.model(), inputs.by_document()
    return {
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
        "books": books.totals(),
    }


def full_evaluation(
    folder: str | Path,
    *,
    lengths: Sequence[int],
    protocols: Mapping[str, int | None],
    attention: Path | None = None,
    progress: StageProgress | None = None,
) -> dict[str, Any]:
    """Everything that a result file needs from a run on its test split, with the run loaded once.

    Args:
        folder: a run folder.
        lengths: context lengths in tokens.
        protocols: the number of tokens that each protocol scores, spread evenly over the text; None for all.
        attention: file to which the maps of `attention_maps` are written (`.npz`), for a window of 8 training lengths;
            None for no maps.
        progress: called with the stage ("text" or a protocol), the amount done and the total.

    Returns:
        A dictionary with
        - `evaluations`, by protocol: `rows` as from `perplexities`, and `books`: for each test document and length the
          summed loss and the number of scored targets, which add up to those of the row;
        - `attention`, the name of the file of maps, and `attention_summary`, both None without maps;
        - `fingerprint` of the text, and `environment`.

    Raises:
        ValueError: for a folder that is no run, a changed test split, or a length that does not fit the text.
    """
    lengths = sorted(set(lengths))
    for protocol, scored in protocols.items():
        check_scored(protocol, lengths, scored)

    def progress_of(stage: str) -> Progress | None:
        return partial(progress, Stage(stage)) if progress else None

    inputs = load_evaluation_input(folder, None, progress_of("text"))
    stream, train_length = inputs.stream, inputs.spec.length
    check_windows(protocols, len(stream), lengths)
    window = None if attention is None else middle_window(len(stream), MAP_LENGTHS * train_length)
    model = inputs.model()
    evaluations = {}
    for protocol, scored in protocols.items():
        books = inputs.by_document()
        given: dict[str, Any] = {"scored": scored, "observe": books, "progress": progress_of(protocol)}
        rows = perplexities(model, stream, lengths, protocol, **given)
        evaluations[protocol] = {"rows": rows, "books": books.totals()}
    summary = None
    if attention is not None and window is not None:
        maps, summary = attention_maps(model, stream[window], train_length)
        summary["start"] = window.start
        write_whole(attention, partial(_write_maps, maps))
    return {
        "evaluations": evaluations,
        "attention": None if attention is None else attention.name,
        "attention_summary": summary,
        "fingerprint": inputs.fingerprint,
        "environment": environment(),
    }


def _write_maps(maps: Mapping[str, np.ndarray], path: Path) -> None:
    with path.open("wb") as file:  # NumPy would add a suffix to a name
        np.savez_compressed(file, **dict[str, Any](maps))


COLDEST = 1e-6  # logits divided by a smaller temperature could overflow in float32


def generate(
    run: str | Path,
    prompt: str = "",
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """The prompt and a continuation.

    Args:
        run: a run folder.
        prompt: beginning of the text; an empty prompt counts as the end-of-text token.
        max_new_tokens: number of tokens to add.
        temperature: of the sampling, at least 1e-6; with 0 the most likely token is taken.
        top_k: sample among this many most likely tokens; 0 for all.
        seed: of the sampling, from 0 to 2^64 - 1.

    Raises:
        ValueError: for a folder that is no run, a prompt that is not valid text, or a number out of range.
    """
    check_range("max_new_tokens", max_new_tokens, 1, 2**31 - 1)
    check_range("temperature", temperature, 0, sys.float_info.max)
    check_range("top_k", top_k, 0, 2**31 - 1)
    check_range("seed", seed, 0, 2**64 - 1)
    require(not 0 < temperature < COLDEST, "temperature", temperature, f"0 or at least {COLDEST}")
    surrogates = [letter for letter in prompt if "\ud800" <= letter <= "\udfff"]  # stand for bytes that were not UTF-8
    require(not surrogates, "prompt", prompt[:80], "text that UTF-8 can write")
    folder = RunFolder(run)
    model, tokenizer = folder.load_model(), folder.load_tokenizer()
    ids = tokenizer.encode(prompt) or [tokenizer.eos_token_id]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    output = cast(Any, model).generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
