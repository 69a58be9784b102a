"""The loss of each scored token, in memory that does not grow with the vocabulary times the length."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from rfa.models import RFAForCausalLM

_LOGITS = 2**25  # logits held at once: 128 MB in float32


@torch.inference_mode()
def token_losses(
    model: RFAForCausalLM, input_ids: Int64[Tensor, "batch length"], targets: int
) -> Float[Tensor, "batch targets"]:
    """Negative log likelihood, in nats, of the last `targets` tokens given all before them in the window.

    Args:
        model: in evaluation mode.
        input_ids: windows of one length.
        targets: how many of the last tokens to score, at most `length - 1`.
    """
    hidden_states = model.model(input_ids, use_cache=False).last_hidden_state[:, -targets - 1 : -1]
    labels = input_ids[:, -targets:]
    flat, wanted = hidden_states.reshape(-1, hidden_states.shape[-1]), labels.reshape(-1)
    rows = max(1, _LOGITS // model.config.vocab_size)
    parts = [
        F.cross_entropy(model.lm_head(some).float(), ids, reduction="none")
        for some, ids in zip(flat.split(rows), wanted.split(rows), strict=True)
    ]
    return torch.cat(parts).view_as(labels)


def batches(stream: np.ndarray, windows: list, tokens: int, device: torch.device):
    """The windows of one length and number of targets, some at a time: `(input_ids, targets)`."""
    group: list = []
    for window in windows:
        differs = group and (window.targets != group[0].targets or window.stop - window.start != _length(group[0]))
        if group and (differs or (len(group) + 1) * _length(window) > max(tokens, _length(window))):
            yield _stack(stream, group, device), group[0].targets
            group = []
        group.append(window)
    if group:
        yield _stack(stream, group, device), group[0].targets


def _length(window) -> int:
    return window.stop - window.start


def _stack(stream: np.ndarray, group: list, device: torch.device) -> Tensor:
    rows = np.stack([stream[window.start : window.stop] for window in group]).astype(np.int64)
    return torch.from_numpy(rows).to(device)
