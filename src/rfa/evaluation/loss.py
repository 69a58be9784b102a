"""The loss of each scored token, in memory that does not grow with the vocabulary times the length."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from rfa.models import RFAForCausalLM

from .windows import Window

LOGITS_HELD = 2**25  # logits held at once: 128 MB in float32


@torch.inference_mode()
def token_losses(
    model: RFAForCausalLM, input_ids: Int64[Tensor, "batch length"], targets: int
) -> Float[Tensor, "batch targets"]:
    """Negative log likelihood, in nats, of the last `targets` tokens given all before them in the window.

    Args:
        model: in evaluation mode.
        input_ids: windows of one length.
        targets: how many of the last tokens to score, at most `length - 1`.

    Returns:
        The losses, in float32.
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
    stream: np.ndarray, windows: Iterable[Window], tokens: int, device: torch.device
) -> Iterator[tuple[Int64[Tensor, "batch length"], int]]:
    """Neighbouring windows of one length and number of targets, as many at a time as hold about `tokens`.

    Args:
        stream: token ids.
        windows: of the stream.
        tokens: of a batch, unless one window alone is longer.
        device: where the ids go.

    Returns:
        `(input_ids, targets)`, one after the other.
    """
    group: list[Window] = []
    for window in windows:
        differs = group and (window.targets != group[0].targets or window.stop - window.start != _length(group[0]))
        if group and (differs or (len(group) + 1) * _length(window) > max(tokens, _length(window))):
            yield _stack(stream, group, device), group[0].targets
            group = []
        group.append(window)
    if group:
        yield _stack(stream, group, device), group[0].targets


def batch_tokens(device: torch.device) -> int:
    """Tokens read at once: as many as keep a device busy."""
    return 4096 if device.type == "cpu" else 32_768


def _length(window: Window) -> int:
    return window.stop - window.start


def _stack(stream: np.ndarray, group: list[Window], device: torch.device) -> Tensor:
    rows = np.stack([stream[window.start : window.stop] for window in group]).astype(np.int64)
    return torch.from_numpy(rows).to(device)
