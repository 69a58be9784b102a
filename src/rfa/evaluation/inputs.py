"""What every evaluation loads: a run, a text that it was not trained on, and the document of each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from rfa.data import document_of_token, fingerprint, load_corpus, load_documents, token_stream
from rfa.models import RFAForCausalLM
from rfa.progress import Progress
from rfa.training import RunFolder, TrainingSpec

from .perplexity import LossByDocument
from .windows import windows


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
