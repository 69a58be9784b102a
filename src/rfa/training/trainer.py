"""transformers' Trainer with the protocol's optimiser and checkpoints that are whole or absent."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

from rfa.models.modeling import RFAPreTrainedModel

from .optimization import make_optimizer, one_cycle

_KEPT = 2


class ProtocolTrainer(Trainer):
    """Steps, devices, precision and resuming are the Trainer's; the optimiser and saving are the protocol's."""

    def create_optimizer(self, model=None):
        """Adam with the two parameter groups."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(cast(RFAPreTrainedModel, self.model), self.args.learning_rate)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The one-cycle schedule, over all steps of the run."""
        if self.lr_scheduler is None:
            optimizer = cast(torch.optim.Optimizer, optimizer or self.optimizer)
            self.lr_scheduler = LambdaLR(optimizer, lambda step: one_cycle(step, num_training_steps))
        return self.lr_scheduler

    def _save_checkpoint(self, model, trial):
        """Save under a temporary name, rename, and only then drop the checkpoints that are too old."""
        folder = Path(cast(str, self.args.output_dir))
        staging = folder / ".saving"
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.args.output_dir = str(staging)
        try:
            with full_disk_as_os_error(folder):
                super()._save_checkpoint(model, trial)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            self.args.output_dir = str(folder)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            shutil.rmtree(folder / name, ignore_errors=True)
            os.replace(staging / name, folder / name)
            shutil.rmtree(staging, ignore_errors=True)
            found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
            for old in found[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)


@contextmanager
def full_disk_as_os_error(folder: Path) -> Iterator[None]:
    """Let a failed write of torch or safetensors come out as the `OSError` that it is."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        writing = isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error) or "write" in str(error)
        if not writing or isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        number = errno.ENOSPC if shutil.disk_usage(folder).free < 2**20 else errno.EIO
        raise OSError(number, f"{os.strerror(number)} ({error})", str(folder)) from error
