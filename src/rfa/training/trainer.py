"""transformers' Trainer as the protocol wants it: optimiser, precision, checkpoints that are whole or absent, no noise.

`trial_step` says whether a machine can train a model, before hours are spent on it or an old run is deleted for it.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
from transformers.utils import logging

from rfa.models import RFAForCausalLM
from rfa.models.modeling import RFAPreTrainedModel

from .checkpoints import checkpoints_in, read_state
from .optimization import make_optimizer, one_cycle
from .saved_files import write_digests
from .spec import TrainingSpec


@contextmanager
def tensor_float_32() -> Iterator[None]:
    """Float32 matrix products in TensorFloat-32 (10 bits of mantissa, sums in float32) on GPUs that have it.

    It is several times as fast; the fused filter's own products stay in float32. Elsewhere nothing changes.
    """
    before = torch.get_float32_matmul_precision()
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only and no bars inside; afterwards as the caller had it."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


_KEPT = 2


class ProtocolTrainer(Trainer):
    """The Trainer does steps, devices, precision and resuming; the protocol has its own optimiser and saving."""

    def __init__(self, *args, one_group: bool = False, **kwargs):
        self._one_group = one_group
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model=None):
        """Adam with the two parameter groups, or one."""
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
        """All validation blocks: only training drops a batch that is not full."""
        self.args.dataloader_drop_last = False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.dataloader_drop_last = True

    def is_last(self, checkpoint: Path, max_steps: int | None) -> bool:
        """Whether a run that was stopped at this checkpoint had made all its steps."""
        state = read_state(checkpoint)
        return state.global_step >= (max_steps or state.max_steps)

    def load_last(self, checkpoint: Path) -> None:
        """Stand where `train` would after its last step; the Trainer itself would make one more."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = read_state(checkpoint)
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.callback_handler.on_train_begin(self.args, self.state, self.control)

    def _save_checkpoint(self, model, trial):
        """Save under a temporary name, rename, and only then drop the checkpoints that are too old."""
        folder = Path(cast(str, self.args.output_dir))
        staging = folder / ".saving"
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(staging)
        try:
            with full_disk_as_os_error(folder):
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
            for old in checkpoints_in(folder)[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)


@contextmanager
def full_disk_as_os_error(folder: Path) -> Iterator[None]:
    """Let a failed write of torch, safetensors or tokenizers come out as the `OSError` that it is."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:  # tokenizers raises a bare one
        writing = ("PytorchStreamWriter", "inline_container", "(os error")
        if not (isinstance(error, SafetensorError) or any(sign in str(error) for sign in writing)):
            raise
        number = errno.ENOSPC if shutil.disk_usage(folder).free < 2**20 else errno.EIO
        raise OSError(number, f"{os.strerror(number)} ({error})", str(folder)) from error


_WORDS = 64


def trial_step(spec: TrainingSpec, device: torch.device | None = None) -> None:
    """Forward and backward of one block through one layer of a run's model, in its precision.

    Its kernels are compiled and loaded on the way, so that one that cannot be is found here.

    Args:
        spec: of the run.
        device: the run's; the accelerator by default, the CPU where there is none.

    Raises:
        RuntimeError: for a loss or a gradient that is not finite; from the layers below, for a kernel that cannot be
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
