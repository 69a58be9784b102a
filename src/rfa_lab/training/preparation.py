"""What a run fixes before its first step: its blocks, its record, the Trainer's arguments; and its model at the end."""

import os
import shutil
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from transformers import TrainingArguments

from rfa.environment import environment
from rfa.files import write_whole
from rfa.models import RFAConfig
from rfa.models.saved_files import quiet_transformers, write_digests
from rfa_lab.data import PreparedData, TokenBlocks, evenly_spaced

from .processes import check_launch
from .run_folder import RunFolder
from .spec import TrainingSpec
from .trainer import ProtocolTrainer, full_disk_as_os_error


def arguments_of(run: RunFolder, spec: TrainingSpec) -> TrainingArguments:
    """The Trainer's arguments. This sets up the processes of a distributed run."""
    arguments = TrainingArguments(
        output_dir=str(run.checkpoints),
        per_device_train_batch_size=spec.batch_size,
        per_device_eval_batch_size=spec.batch_size,
        gradient_accumulation_steps=spec.accumulate,
        num_train_epochs=spec.epochs,
        max_steps=spec.max_steps or -1,
        learning_rate=spec.learning_rate,
        max_grad_norm=1.0,
        seed=spec.seed,
        bf16=spec.bf16,
        eval_strategy="steps",
        eval_steps=1,  # `_train` sets it and save_steps, when it knows the length of an epoch
        save_strategy="steps",
        save_steps=1,
        logging_steps=spec.log_steps,
        logging_nan_inf_filter=False,
        prediction_loss_only=True,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.accelerator.is_available(),
    )
    check_launch(arguments.world_size)
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several devices through `accelerate launch`, not DataParallel
    return arguments


def blocks_of(data: PreparedData, spec: TrainingSpec) -> tuple[TokenBlocks, Dataset]:
    """All blocks of the training split, and those of the validation split that the specification asks for."""
    train_blocks = TokenBlocks(data.streams["train"], spec.length, "training split")
    valid_blocks = TokenBlocks(data.streams["valid"], spec.length, "validation split")
    if spec.valid_tokens is None:
        return train_blocks, valid_blocks
    return train_blocks, Subset(valid_blocks, evenly_spaced(len(valid_blocks), spec.valid_tokens // spec.length))


def config_of(spec: TrainingSpec, data: PreparedData) -> RFAConfig:
    """The model's configuration for the vocabulary of the data."""
    return spec.model_config(len(data.tokenizer), eos_token_id=data.tokenizer.eos_token_id)


def new_record(spec: TrainingSpec, data: PreparedData, test_fingerprint: str, processes: int) -> dict[str, Any]:
    """The record of a new run. A later evaluation compares its fingerprint of the test split."""
    return {
        "spec": spec.to_dict(),
        "config": config_of(spec, data).to_diff_dict(),
        "data": {
            "corpus": data.corpus,
            "split": data.split_note,
            "fingerprint": data.fingerprint,
            "test_fingerprint": test_fingerprint,
            "tokens": {split: len(stream) for split, stream in data.streams.items()},
        },
        "environment": environment(),
        "processes": processes,
        "finished": False,
        "steps": 0,
    }


def write_new_run(run: RunFolder, record: dict[str, Any], data: PreparedData) -> None:
    """Write the record and the tokenizer of a new run, both or neither."""
    run.clear()
    try:
        with full_disk_as_os_error(run.path):
            data.tokenizer.save_pretrained(run.tokenizer)
            write_digests(run.tokenizer)
        run.write(record)
    except BaseException:
        run.clear()
        raise


def save_model(trainer: ProtocolTrainer, run: RunFolder) -> None:
    """Save the trained model. All processes take part, because weights may be sharded; the first one renames."""
    staging = run.path / ".model"
    with quiet_transformers(), full_disk_as_os_error(run.path):
        try:
            trainer.save_model(str(staging))
            trainer.accelerator.wait_for_everyone()
            if trainer.is_world_process_zero():
                write_digests(staging)
                write_whole(run.model, lambda path: os.replace(staging, path))
        finally:
            if trainer.is_world_process_zero():
                shutil.rmtree(staging, ignore_errors=True)
