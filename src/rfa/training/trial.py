"""Whether a machine can train a model, before hours are spent on it or an old run is deleted for it."""

import torch
from torch import nn

from rfa.models import RFAForCausalLM

from .precision import tensor_float_32
from .spec import TrainingSpec

_WORDS = 64


def trial_step(spec: TrainingSpec, device: torch.device | None = None) -> None:
    """Forward and backward of one block through one layer of a run's model, in its precision.

    Its kernels are compiled and loaded on the way, so that one that cannot be is found here.

    Args:
        spec: of the run.
        device: the run's; the accelerator by default, the CPU where there is none.

    Raises:
        RuntimeError: for a loss or a gradient that is no number, and, from what runs below, for a kernel that cannot be
            compiled or a device that has no memory left. Triton has exceptions of its own.
    """
    device = device or torch.accelerator.current_accelerator() or torch.device("cpu")
    with torch.random.fork_rng(devices=[]), tensor_float_32():
        torch.manual_seed(0)
        model: nn.Module = RFAForCausalLM(spec.model_config(_WORDS, num_hidden_layers=1))
        model = model.to(device)
        ids = torch.randint(_WORDS, (1, spec.length)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=spec.bf16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not all(bool(value.isfinite().all()) for value in (loss, *grads)):
            raise RuntimeError("trial step: got a loss or a gradient that is no number, expected finite ones")
