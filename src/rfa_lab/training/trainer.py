"""The training protocol on transformers' Trainer (the paper's appendix F).

It has its own optimiser with two parameter groups and a second gradient clip, a one-cycle schedule, and checkpoints
that are whole or absent.
"""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import EvalPrediction, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from rfa.files import named_errors
from rfa.models.decoder import NOT_SCORED, RFAPreTrainedModel
from rfa.models.saved_files import checkpoints_in, read_state, write_digests

from .callbacks import StopOnSignal
from .run_folder import check_checkpoint, newest_checkpoint

DYNAMICS_CLIP = 1e-4


def make_optimizer(model: RFAPreTrainedModel, learning_rate: float, one_group: bool = False) -> torch.optim.Adam:
    """Adam without weight decay. The SDE's parameters have half the rate, no momentum, and `eps = 1e-7`.

    The groups are named "features" and "dynamics". With `one_group` there is one, as in the paper's released code.
    """
    dynamics = {id(p) for p in ([] if one_group else model.sde_parameters())}
    features = [p for p in model.parameters() if p.requires_grad and id(p) not in dynamics]
    groups: list[dict] = [{"params": features, "lr": learning_rate, "name": "features"}]
    if dynamics:
        sde = [p for p in model.parameters() if p.requires_grad and id(p) in dynamics]
        groups.append({"params": sde, "lr": learning_rate / 2, "betas": (0.0, 0.999), "eps": 1e-7, "name": "dynamics"})
    return torch.optim.Adam(groups, betas=(0.9, 0.999))


def one_cycle(step: int, total: int, warmup: float = 0.05, start: float = 1 / 25, end: float = 1 / 1000) -> float:
    """The learning rate of a step over the peak rate: a cosine from `start` up to 1, then a cosine down to `end`.

    Steps go from 0 to `total - 1`; `warmup` is the share of them before the peak.
    """
    top = warmup * total - 1
    if step < top:
        return _cosine(start, 1.0, step / top)
    last = max(total - 1, 1)
    return _cosine(1.0, end, min(1.0, (step - max(top, 0.0)) / max(last - max(top, 0.0), 1.0)))


def _cosine(first: float, last: float, fraction: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * fraction)) / 2


class ClipDynamics(TrainerCallback):
    """The second, stricter clip of the SDE's gradients, after the Trainer's own clip of all gradients."""

    def on_pre_optimizer_step(self, args, state, control, *, optimizer=None, **kwargs):
        """Clip the gradient norm of the group named "dynamics", as in the paper's training (appendix F)."""
        for group in () if optimizer is None else optimizer.param_groups:
            if group.get("name") == "dynamics":
                nn.utils.clip_grad_norm_(group["params"], DYNAMICS_CLIP)


@contextmanager
def tensor_float_32() -> Iterator[None]:
    """Compute float32 matrix products in TensorFloat-32 (10 bits of mantissa, sums in float32) on GPUs that have it.

    This is several times as fast. The fused filter's own products stay in float32. On other devices nothing changes.
    """
    before = torch.get_float32_matmul_precision()
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


_CHECKPOINTS = 2  # that stay on disk


def _token_mean(of_blocks: EvalPrediction) -> dict[str, float]:
    """The loss over all scored tokens, of each block's summed loss and its number of them."""
    sums, counts = of_blocks.predictions, of_blocks.label_ids
    return {"loss": float(np.sum(sums, dtype=np.float64) / np.sum(counts))}


class ProtocolTrainer(Trainer):
    """The Trainer with the protocol's optimiser, schedule, saving and validation.

    Steps, devices, precision and resuming are transformers' own. The validation loss is the mean over all tokens that
    are scored. The last batches of several processes are filled up with blocks of the first. The Trainer leaves out
    what it gathers of these, but could not take them out of the mean of a batch. So each block has a value of its own.
    """

    def __init__(self, *args, one_group: bool = False, **kwargs):
        self._one_group = one_group
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.compute_metrics = _token_mean

    def create_optimizer(self, model=None):
        """Adam with two parameter groups, or with one."""
        if self.optimizer is None:
            model = cast(RFAPreTrainedModel, self.model)
            self.optimizer = make_optimizer(model, self.args.learning_rate, self._one_group)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The one-cycle schedule, over all steps of the run."""
        if self.lr_scheduler is None:
            optimizer = cast(torch.optim.Optimizer, optimizer or self.optimizer)
            self.lr_scheduler = LambdaLR(optimizer, lambda step: one_cycle(step, num_training_steps))
        return self.lr_scheduler

    def get_eval_dataloader(self, eval_dataset=None):
        """A loader of all validation blocks. Only training drops a batch that is not full."""
        self.args.dataloader_drop_last = False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.dataloader_drop_last = True

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """No loss of the batch, but for each block the sum of its tokens' losses, and how many they are."""
        inputs = self._prepare_inputs(inputs)
        targets = functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=NOT_SCORED)
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs).logits.float().flatten(0, 1)
            losses = functional.cross_entropy(logits, targets.flatten(), ignore_index=NOT_SCORED, reduction="none")
        return None, losses.view_as(targets).sum(1), (targets != NOT_SCORED).sum(1)

    def train_from_newest_checkpoint(self, stop: StopOnSignal) -> None:
        """Train from the newest checkpoint, or from the start if there is none, and validate after the last step.

        Raises:
            ValueError: for a damaged checkpoint.
            Stopped: where `stop` ended the run before its last step.
        """
        checkpoint = newest_checkpoint(Path(cast(str, self.args.output_dir)))
        if checkpoint is None:
            self.train()
        else:
            check_checkpoint(checkpoint, cast(RFAPreTrainedModel, self.model))
            state = read_state(checkpoint)
            if state.global_step < (self.args.max_steps if self.args.max_steps > 0 else state.max_steps):
                self.train(resume_from_checkpoint=str(checkpoint))
            else:  # nothing is left to train; the Trainer itself would make one step more
                self._load_from_checkpoint(str(checkpoint))
                self.state = state
                self.state.is_world_process_zero = self.is_world_process_zero()
                self.state.is_local_process_zero = self.is_local_process_zero()
                self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.state.global_step < self.state.max_steps:
            stop.check(self.state)
        if not any("eval_loss" in line and line["step"] == self.state.max_steps for line in self.state.log_history):
            self.evaluate()

    def _save_checkpoint(self, model, trial):
        """Save under a temporary name, rename, and only then delete the oldest checkpoints."""
        folder = Path(cast(str, self.args.output_dir))
        staging = folder / ".saving"
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(staging)
        try:
            with named_errors(folder / name):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    write_digests(staging / name)
                    shutil.rmtree(folder / name, ignore_errors=True)
                    os.replace(staging / name, folder / name)
        finally:
            self.args.output_dir = str(folder)
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
        if self.args.should_save:
            for old in checkpoints_in(folder)[:-_CHECKPOINTS]:
                shutil.rmtree(old, ignore_errors=True)
