"""The step that tells whether a machine can train a model."""

from dataclasses import replace

import pytest
import torch

from rfa.nn import filter_attention
from rfa.training import TrainingSpec, trial_step
from training.runs import MODEL


def test_a_step_that_is_no_number_is_found(monkeypatch):
    spec = TrainingSpec(preset="m2-sc-rfa", model=MODEL, length=8, tokenizer="bytes")
    trial_step(spec)
    trial_step(replace(spec, bf16=True), torch.device("cpu"))
    monkeypatch.setattr(
        filter_attention, "located_filter_attention", lambda positions, query, *_, **__: query * torch.nan
    )
    with pytest.raises(RuntimeError, match="trial step: got a loss or a gradient that is not finite"):
        trial_step(spec)
