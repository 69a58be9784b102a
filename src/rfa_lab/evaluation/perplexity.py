"""Perplexity of a model over context lengths by a named protocol, and its losses by document.

A protocol says which tokens are scored, and with how much context, as a list of windows. `blocks` is the paper's
(appendix F). `matched` and `strided` are additions of this library.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from rfa.checks import require
from rfa.models import RFAForCausalLM
from rfa.progress import Progress
from rfa_lab.data import evenly_spaced
from rfa_lab.record import PROTOCOLS

LOGITS_HELD = 2**25  # maximum number of logits in memory: 128 MB in float32


class Window(NamedTuple):
    """The tokens `start .. stop - 1`, of which the last `targets` are scored."""

    start: int
    stop: int
    targets: int


def check_protocol(protocol: str) -> None:
    """Raise `ValueError` for an unknown protocol."""
    require(protocol in PROTOCOLS, "protocol", protocol, f"one of {', '.join(PROTOCOLS)}")


def check_scored(protocol: str, lengths: Sequence[int], scored: int | None) -> None:
    """Raise `ValueError` for an unknown protocol, no lengths, or fewer scored tokens than the longest length."""
    check_protocol(protocol)
    require(bool(lengths), "lengths", list(lengths), "at least one")
    longest = f"at least {max(lengths)}, the longest context length"
    require(scored is None or scored >= max(lengths), f"scored ({protocol})", scored, longest)


def check_windows(protocols: Iterable[str], tokens: int, lengths: Sequence[int]) -> None:
    """Raise `ValueError` if a protocol or a length does not fit a stream of so many tokens."""
    for protocol in protocols:
        for length in lengths:
            windows(protocol, tokens, length, list(lengths))


def windows(protocol: str, tokens: int, length: int, lengths: list[int]) -> Iterator[Window]:
    """The windows of a protocol at one context length.

    - `blocks`: non-overlapping windows of `length`. All tokens but the first are scored (the paper's protocol).
    - `matched`: for every length in `lengths` the windows end at the same tokens and score the same targets: the last
      half of the shortest length. Only the context differs.
    - `strided`: a window starts every `length / 2` tokens, and scores the tokens that the window before it did not.

    Args:
        protocol: one of these.
        tokens: length of the stream.
        length: tokens of a window.
        lengths: all lengths that are compared with each other.

    Raises:
        ValueError: for an unknown protocol, a length below 2 or a stream that is too short.
    """
    check_protocol(protocol)
    for given in {length, *lengths}:
        require(given >= 2, "lengths", given, "at least 2")
    longest = max(lengths) if protocol == "matched" else length
    if tokens < longest:
        raise ValueError(f"lengths: got {longest} for a text of {tokens} tokens, expected at most {tokens}")
    return {"blocks": _block_windows, "matched": _matched_windows, "strided": _strided_windows}[protocol](
        tokens, length, lengths
    )


def spread(every: list[Window], tokens: int, segment: int, scored: int) -> list[Window]:
    """The windows that end in evenly spaced segments of the text, so that every part is represented.

    About `scored` tokens are scored, in whole segments, at least one. A segment has the longest length of all.
    Under `blocks`, all lengths that divide the segment score the same tokens. Under `matched`, all lengths do.
    """
    segments = tokens // segment
    if scored // segment >= segments:
        return every
    chosen = set(evenly_spaced(segments, scored // segment))
    return [window for window in every if (window.stop - 1) // segment in chosen]


def _block_windows(tokens: int, length: int, _: list[int]) -> Iterator[Window]:
    for start in range(0, tokens - length + 1, length):
        yield Window(start, start + length, length - 1)


def _matched_windows(tokens: int, length: int, lengths: list[int]) -> Iterator[Window]:
    targets = max(1, min(lengths) // 2)
    for stop in range(max(lengths), tokens + 1, targets):
        yield Window(stop - length, stop, targets)


def _strided_windows(tokens: int, length: int, _: list[int]) -> Iterator[Window]:
    yield Window(0, length, length - 1)
    stride, scored = max(1, length // 2), length
    while scored < tokens:
        stop = min(scored + stride, tokens)
        yield Window(stop - length, stop, stop - scored)
        scored = stop


@torch.inference_mode()
def token_losses(
    model: RFAForCausalLM, input_ids: Int64[Tensor, "batch length"], targets: int
) -> Float[Tensor, "batch targets"]:
    """Negative log likelihood, in nats, of the last `targets` tokens given all tokens before them in the window.

    Logits are computed in parts: memory does not grow with the vocabulary times the length.
    """
    hidden_states = model.model(input_ids, use_cache=False).last_hidden_state[:, -targets - 1 : -1]
    labels = input_ids[:, -targets:]
    flat, wanted = hidden_states.reshape(-1, hidden_states.shape[-1]), labels.reshape(-1)
    rows = max(1, LOGITS_HELD // model.config.vocab_size)
    parts = [
        F.cross_entropy(model.lm_head(some).float(), ids, reduction="none")
        for some, ids in zip(flat.split(rows), wanted.split(rows), strict=True)
    ]
    return torch.cat(parts).view_as(labels)


def batches(
    stream: np.ndarray, chosen: Iterable[Window], tokens: int, device: torch.device
) -> Iterator[tuple[Int64[Tensor, "batch length"], int]]:
    """Batches of about `tokens` tokens: consecutive windows of one length and number of targets, and that number."""
    for (targets, length), group in groupby(chosen, lambda window: (window.targets, window.stop - window.start)):
        same, size = list(group), max(1, tokens // length)
        for first in range(0, len(same), size):
            rows = [stream[window.start : window.stop] for window in same[first : first + size]]
            yield torch.from_numpy(np.stack(rows).astype(np.int64)).to(device), targets


def batch_tokens(device: torch.device) -> int:
    """Number of tokens in a batch that keeps a device busy."""
    return 4096 if device.type == "cpu" else 32_768


class LossByDocument:
    """Sums of losses by document and context length: an `observe` of `perplexities` under one protocol.

    A window may cross from one document into the next. A loss belongs to the document of its target.

    Args:
        names: of the documents.
        document_of_token: index of the document of each token of the stream.
    """

    def __init__(self, names: Sequence[str], document_of_token: np.ndarray):
        self.names, self.document_of_token = names, document_of_token
        self._totals: dict[int, np.ndarray] = {}

    def __call__(self, length: int, tokens: np.ndarray, losses: np.ndarray) -> None:
        """Add the losses of the tokens at these positions of the stream."""
        where = self.document_of_token[tokens.ravel()]
        totals = self._totals.setdefault(length, np.zeros((2, len(self.names))))
        totals[0] += np.bincount(where, losses.ravel(), len(self.names))
        totals[1] += np.bincount(where, minlength=len(self.names))

    def totals(self) -> dict[str, dict[str, list[float]]]:
        """`{document: {length: [summed loss in nats, scored targets]}}` of all documents with scored targets."""
        return {
            name: {
                str(length): [float(losses[index]), int(targets[index])]
                for length, (losses, targets) in self._totals.items()
                if targets[index]
            }
            for index, name in enumerate(self.names)
            if any(targets[index] for _, targets in self._totals.values())
        }


Observe = Callable[[int, np.ndarray, np.ndarray], None]


def perplexities(
    model: RFAForCausalLM,
    stream: np.ndarray,
    lengths: Sequence[int],
    protocol: str = "blocks",
    *,
    scored: int | None = None,
    observe: Observe | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """One row for each context length: the mean loss over all scored tokens, and its exponential.

    Args:
        model: on its device, in evaluation mode.
        stream: token ids.
        lengths: context lengths, in tokens of a window.
        protocol: "blocks", "matched" or "strided", see `windows`.
        scored: score about this many tokens, in segments of the longest length that are spread evenly over the stream.
            At least the longest length; None for all tokens.
        observe: called with the length, the positions of scored tokens in the stream and their losses, both
            `(windows, targets)`. It gets every loss that a row sums up.
        progress: called with the tokens read so far and their total.

    Returns:
        Rows with `protocol`, `length`, `targets` (number of scored tokens), `loss` in nats, `stderr` (standard error of
        the loss over windows) and `perplexity`.

    Raises:
        ValueError: for an unknown protocol or a length that does not fit.
    """
    tokens = len(stream)
    lengths = sorted(set(lengths))
    check_scored(protocol, lengths, scored)
    chosen = {length: list(windows(protocol, tokens, length, lengths)) for length in lengths}
    if scored is not None:
        chosen = {length: spread(chosen[length], tokens, lengths[-1], scored) for length in lengths}
    total = sum(length * len(chosen[length]) for length in lengths)
    rows, done = [], 0
    for length in lengths:
        sums: list[float] = []
        counts: list[int] = []
        for input_ids, wanted in batches(stream, chosen[length], batch_tokens(model.device), model.device):
            losses = token_losses(model, input_ids, wanted).double().cpu().numpy()
            targets = losses.shape[1]
            if observe is not None:
                stops = [window.stop for window in chosen[length][len(sums) : len(sums) + len(losses)]]
                observe(length, np.array(stops)[:, None] + np.arange(-targets, 0), losses)
            sums += losses.sum(-1).tolist()
            counts += [targets] * len(losses)
            done += length * len(losses)
            if progress is not None:
                progress(done, total)
        if not math.isfinite(sum(sums)):
            raise ValueError(f"model: got losses that are not finite at a context of {length} tokens")
        rows.append({"protocol": protocol, "length": length, **_summary(np.array(sums), np.array(counts))})
    return rows


def _summary(sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Targets, mean loss, its standard error over windows, and perplexity, from the sums and counts of windows."""
    loss = sums.sum() / counts.sum()
    windows_count = len(sums)
    error = np.sqrt(np.square(sums - loss * counts).sum() / max(windows_count - 1, 1) * windows_count) / counts.sum()
    return {
        "targets": int(counts.sum()),
        "loss": float(loss),
        "stderr": float(error) if windows_count > 1 else None,
        "perplexity": math.exp(min(loss, 700.0)),
    }
