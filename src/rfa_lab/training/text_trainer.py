"""The validation loss of text, the same for any number of processes.

It is apart from `trainer.py`, whose Trainer serves models of series too.
"""

import numpy as np
import torch
from torch.nn import functional
from transformers import EvalPrediction

from rfa.models.decoder import NOT_SCORED

from .trainer import ProtocolTrainer


class TextTrainer(ProtocolTrainer):
    """The protocol's Trainer for language models. The validation loss is the mean over all tokens that are scored.

    The last batches of several processes are filled up with blocks of the first. The Trainer leaves out what it gathers
    of these, but could not take them out of the mean of a batch. So each block has a value of its own.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compute_metrics = _token_mean

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """No loss of the batch, but for each block the sum of its tokens' losses, and how many they are."""
        inputs = self._prepare_inputs(inputs)
        targets = functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=NOT_SCORED)
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs).logits.float().flatten(0, 1)
            losses = functional.cross_entropy(logits, targets.flatten(), ignore_index=NOT_SCORED, reduction="none")
        return None, losses.view_as(targets).sum(1), (targets != NOT_SCORED).sum(1)


def _token_mean(of_blocks: EvalPrediction) -> dict[str, float]:
    """The loss over all scored tokens, of each block's summed loss and its number of them."""
    sums, counts = of_blocks.predictions, of_blocks.label_ids
    return {"loss": float(np.sum(sums, dtype=np.float64) / np.sum(counts))}
