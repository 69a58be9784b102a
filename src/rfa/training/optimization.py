"""The protocol's optimiser: two parameter groups, one-cycle schedule, the second clip (the paper's appendix F)."""

import math

import torch
from torch import nn
from transformers import TrainerCallback

from rfa.models.modeling import RFAPreTrainedModel

DYNAMICS_CLIP = 1e-4


def make_optimizer(model: RFAPreTrainedModel, learning_rate: float, one_group: bool = False) -> torch.optim.Adam:
    """Adam without weight decay; the SDE's parameters at half the rate, without momentum, with `eps = 1e-7`.

    Args:
        model: its `head_dynamics` make the second group, where it has any to learn.
        learning_rate: the peak of the first group.
        one_group: no second group, as in the paper's released code.

    Returns:
        The optimiser, its groups named "features" and "dynamics".
    """
    sde_modules = () if one_group else model.head_dynamics().values()
    dynamics = {id(p) for module in sde_modules for p in module.parameters()}
    features = [p for p in model.parameters() if p.requires_grad and id(p) not in dynamics]
    groups: list[dict] = [{"params": features, "lr": learning_rate, "name": "features"}]
    if dynamics:
        sde = [p for p in model.parameters() if p.requires_grad and id(p) in dynamics]
        groups.append({"params": sde, "lr": learning_rate / 2, "betas": (0.0, 0.999), "eps": 1e-7, "name": "dynamics"})
    return torch.optim.Adam(groups, betas=(0.9, 0.999))


def one_cycle(step: int, total: int, warmup: float = 0.05, start: float = 1 / 25, end: float = 1 / 1000) -> float:
    """The share of the peak rate at a step: cosine from `start` up to 1, then down to `end` at the last step.

    Args:
        step: from 0 to `total - 1`.
        total: steps of the run.
        warmup: share of the steps before the peak.
        start: share of the peak at the first step.
        end: share of the peak at the last step.

    Returns:
        A factor of the learning rate.
    """
    top = warmup * total - 1
    if step < top:
        return _cosine(start, 1.0, step / top)
    last = max(total - 1, 1)
    return _cosine(1.0, end, min(1.0, (step - max(top, 0.0)) / max(last - max(top, 0.0), 1.0)))


def _cosine(first: float, last: float, share: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


class ClipDynamics(TrainerCallback):
    """The stricter clip of the SDE's gradients, after the Trainer's own clip of all gradients."""

    def on_pre_optimizer_step(self, args, state, control, *, optimizer=None, **kwargs):
        """Clip the gradient norm of the group named "dynamics"."""
        for group in optimizer.param_groups if optimizer is not None else ():
            if group.get("name") == "dynamics":
                nn.utils.clip_grad_norm_(group["params"], DYNAMICS_CLIP)
