"""Perplexity of a model over context lengths, by a named protocol."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rfa.models import RFAForCausalLM
from rfa.progress import Progress

from .loss import batch_tokens, batches, token_losses
from .observers import LossByPosition
from .windows import spread, windows

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
    """One row a context length: the token-weighted mean loss of the scored tokens, and its exponential.

    Args:
        model: moved to its device, in evaluation mode.
        stream: token ids.
        lengths: tokens of a window.
        protocol: "blocks", "matched" or "strided", see `windows`.
        scored: about so many tokens only, in segments of the longest length spread evenly over the stream; at least
            the longest length.
        observe: sees every loss that the rows sum up: called with the length, the places of scored tokens in the
            stream and their losses, both `(windows, targets)`.
        progress: called with tokens read and in all.

    Returns:
        Rows with `protocol`, `length`, `targets` (scored tokens), `loss` in nats, `stderr` of the loss over windows,
        and `perplexity`.

    Raises:
        ValueError: for an unknown protocol or a length that does not fit.
    """
    lengths = sorted(set(lengths))
    if not lengths:
        raise ValueError("lengths: got none, expected at least one")
    if scored is not None and scored < lengths[-1]:
        raise ValueError(f"scored: got {scored}, expected at least {lengths[-1]}, the longest context length")
    plan = {length: list(windows(protocol, len(stream), length, lengths)) for length in lengths}
    if scored is not None:
        plan = {length: spread(plan[length], len(stream), lengths[-1], scored) for length in lengths}
    total = sum(length * len(plan[length]) for length in lengths)
    rows, done = [], 0
    for length in lengths:
        sums: list[float] = []
        counts: list[int] = []
        for input_ids, targets in batches(stream, plan[length], batch_tokens(model.device), model.device):
            losses = token_losses(model, input_ids, targets).double()
            if observe is not None:
                stops = [window.stop for window in plan[length][len(sums) : len(sums) + len(losses)]]
                observe(length, np.array(stops)[:, None] + np.arange(-targets, 0), losses.cpu().numpy())
            sums += losses.sum(-1).tolist()
            counts += [targets] * len(losses)
            done += input_ids.numel()
            if progress is not None:
                progress(done, total)
        if not math.isfinite(sum(sums)):
            raise ValueError(f"model: got losses that are no finite numbers at a context of {length} tokens")
        rows.append({"protocol": protocol, "length": length, **_summary(np.array(sums), np.array(counts))})
    return rows


def loss_by_position(
    model: RFAForCausalLM, stream: np.ndarray, length: int, *, progress: Progress | None = None
) -> list[float]:
    """Mean loss of the token at each position 1 .. length - 1 of non-overlapping windows of `length`.

    Args and raises as `perplexities`.
    """
    positions = LossByPosition(length)
    perplexities(model, stream, [length], observe=positions, progress=progress)
    return positions.means()


def _summary(sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Of windows' summed losses: the ratio estimate and its standard error over windows."""
    loss = sums.sum() / counts.sum()
    windows_count = len(sums)
    spread = np.sqrt(np.square(sums - loss * counts).sum() / max(windows_count - 1, 1) * windows_count) / counts.sum()
    return {
        "targets": int(counts.sum()),
        "loss": float(loss),
        "stderr": float(spread) if windows_count > 1 else None,
        "perplexity": math.exp(min(loss, 700.0)),
    }
