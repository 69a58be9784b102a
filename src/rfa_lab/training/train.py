"""One run, from its specification to a trained model in its run folder."""

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import Dataset, Subset
from transformers import TrainingArguments, set_seed

from rfa.environment import environment
from rfa.files import FULL, named_errors, write_whole
from rfa.models import RFAConfig, RFAForCausalLM
from rfa.models.saved_files import checkpoints_in, missing_files, quiet_transformers, write_digests
from rfa.ops import choose_backend
from rfa.progress import Progress, TrainingProgress
from rfa_lab.data import PreparedData, TokenBlocks, check_text, evenly_spaced, fingerprint, load_corpus, prepare

from .callbacks import MetricsLogger, StopOnSignal
from .run_folder import RunFolder
from .spec import TrainingSpec
from .trainer import ClipDynamics, ProtocolTrainer, tensor_float_32

TRAINED_ON = ("train", "valid")  # the splits that a run reads, and that its data fingerprint covers


def train(
    spec: TrainingSpec,
    out: str | Path,
    *,
    overwrite: bool = False,
    data_progress: Progress | None = None,
    progress: TrainingProgress | None = None,
) -> dict[str, Any]:
    """Train a model in a new run folder.

    Args:
        spec: the model, the data and the protocol.
        out: the run folder.
        overwrite: replace an existing run folder.
        data_progress: called with the bytes of text read so far and their total.
        progress: called after each step with the step, the total number of steps and the latest metrics. During
            validation the metrics contain `validated`, the fraction that is done.

    Returns:
        The run's record, as in run.json.

    Raises:
        ValueError: for bad data, a run folder that exists, or a loss that is not finite.
        OSError: if the disk is full. The last complete checkpoint stays.
        Stopped: on Ctrl-C, after saving. A signal in the last step raises it too, when the run is finished.
        Exception: with `overwrite`, if kernels cannot be compiled on this machine; nothing was deleted then.
    """
    spec = spec.with_absolute_paths()
    run = RunFolder(out)
    run.check_free(overwrite)
    arguments = _arguments(run, spec)  # this sets up the processes of a distributed run
    with arguments.main_process_first(local=False):  # which tokenises; the others read the cache
        data = prepare(spec.data, spec.tokenizer, spec.split_by, splits=TRAINED_ON, progress=data_progress)
    test = load_corpus(spec.data, spec.split_by).documents("test")
    check_text(test)  # now, because it is read only after training
    blocks, _ = _blocks(data, spec)  # errors come before anything is written
    if len(blocks) < spec.batch_size * arguments.world_size:
        raise ValueError(
            f"batch_size: got {spec.batch_size} on {arguments.world_size} device(s), "
            f"expected at most the {len(blocks)} blocks of the training split"
        )
    record = {
        "spec": spec.to_dict(),
        "config": _config(spec, data).to_diff_dict(),
        "data": {
            "corpus": data.corpus,
            "split": data.split_note,
            "fingerprint": data.fingerprint,
            "test_fingerprint": fingerprint(test),  # a later evaluation compares it
            "tokens": {split: len(stream) for split, stream in data.streams.items()},
        },
        "environment": environment(),
        "processes": arguments.world_size,
        "finished": False,
        "steps": 0,
    }
    if overwrite and run.path.exists():  # the old run must not be lost if a kernel cannot be compiled here
        choose_backend(spec.model_config(vocab_size=2).attention.backend, arguments.device)
    with _locked_run(run, arguments):
        if arguments.process_index == 0:
            run.check_free(overwrite)
            _write_new_run(run, record, data)
        PartialState().wait_for_everyone()
        return _train(run, spec, data, arguments, progress)


def resume(
    out: str | Path,
    *,
    data_progress: Progress | None = None,
    progress: TrainingProgress | None = None,
) -> dict[str, Any]:
    """Continue a run from its newest checkpoint, or from its start if it has none yet.

    Args, returns and raises as `train`. The record of a finished run is returned unchanged.

    Raises:
        ValueError: if the folder is no run, if its data have changed, or if the number of processes differs from that
            at the start of the run: they would read other batches.
    """
    run = RunFolder(out)
    record = run.read()
    if record.get("finished"):
        return record
    spec = TrainingSpec.from_dict(record["spec"])
    arguments = _arguments(run, spec)
    processes = record.get("processes", 1)
    if arguments.world_size != processes:
        raise ValueError(f"processes: got {arguments.world_size}, expected {processes}, which began {run.path}")
    tokenizer = run.load_tokenizer()  # checkpoints need the ids of the run's own tokenizer
    with arguments.main_process_first(local=False):
        data = prepare(spec.data, tokenizer, spec.split_by, splits=TRAINED_ON, progress=data_progress)
    if data.fingerprint != record["data"]["fingerprint"]:
        raise ValueError(f"data: {spec.data} has changed since run {run.path} was started, expected the same text")
    with _locked_run(run, arguments):
        if arguments.process_index == 0:
            if run.read() != record:
                raise ValueError(f"run: {run.path} was changed by another process while its text was read")
            run.write({**record, "resumed": [*record.get("resumed", []), environment()]})
        PartialState().wait_for_everyone()
        return _train(run, spec, data, arguments, progress)


def _arguments(run: RunFolder, spec: TrainingSpec) -> TrainingArguments:
    """The Trainer's arguments. This sets up the processes of a distributed run."""
    arguments = TrainingArguments(
        output_dir=str(run.checkpoints),
        per_device_train_batch_size=spec.batch_size,
        per_device_eval_batch_size=spec.batch_size,
        gradient_accumulation_steps=spec.accumulate,
        num_train_epochs=spec.epochs,
        max_steps=spec.max_steps or -1,
        learning_rate=spec.learning_rate,
        seed=spec.seed,
        bf16=spec.bf16,
        eval_steps=1,  # `_train` sets it and save_steps, when it knows the length of an epoch
        save_steps=1,
        logging_steps=spec.log_steps,
        ddp_find_unused_parameters=False,
        max_grad_norm=1.0,
        eval_strategy="steps",
        save_strategy="steps",
        logging_nan_inf_filter=False,
        prediction_loss_only=True,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != arguments.world_size:
        raise ValueError(f"processes: {launched} were launched, {arguments.world_size} work together")
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several devices through `accelerate launch`, not DataParallel
    return arguments


@contextmanager
def _locked_run(run: RunFolder, arguments: TrainingArguments) -> Iterator[None]:
    """The processes of one launch share the run. The first of them holds the lock against other launches.

    An error of a full disk says which checkpoint is kept.
    """
    with run.lock() if arguments.process_index == 0 else nullcontext():
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                kept = [path.name for path in checkpoints_in(run.checkpoints) if not missing_files(path)]
                said = f"{kept[-1]} is kept, from which --resume goes on" if kept else "no checkpoint is kept"
                error.strerror, error.filename = f"{error.strerror}; {said}", error.filename or str(run.path)
            raise


def is_first_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for a launch: it is the first, or alone."""
    ranks = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")  # what accelerate reads
    return all(environment.get(name, "0") == "0" for name in ranks)


def _blocks(data: PreparedData, spec: TrainingSpec) -> tuple[TokenBlocks, Dataset]:
    """All blocks of the training split, and those of the validation split that the specification asks for."""
    train_blocks = TokenBlocks(data.streams["train"], spec.length, "training split")
    valid_blocks = TokenBlocks(data.streams["valid"], spec.length, "validation split")
    if spec.valid_tokens is None:
        return train_blocks, valid_blocks
    return train_blocks, Subset(valid_blocks, evenly_spaced(len(valid_blocks), spec.valid_tokens // spec.length))


def _config(spec: TrainingSpec, data: PreparedData) -> RFAConfig:
    """The model's configuration for the vocabulary of the data."""
    return spec.model_config(len(data.tokenizer), eos_token_id=data.tokenizer.eos_token_id)


def _write_new_run(run: RunFolder, record: dict[str, Any], data: PreparedData) -> None:
    """Write the record and the tokenizer of a new run, both or neither."""
    run.clear()
    try:
        with named_errors(run.tokenizer):
            data.tokenizer.save_pretrained(run.tokenizer)
            write_digests(run.tokenizer)
        run.write(record)
    except BaseException:
        run.clear()
        raise


def _train(
    run: RunFolder,
    spec: TrainingSpec,
    data: PreparedData,
    arguments: TrainingArguments,
    progress: TrainingProgress | None,
) -> dict[str, Any]:
    set_seed(spec.seed)
    model = RFAForCausalLM(_config(spec, data))
    train_blocks, valid_blocks = _blocks(data, spec)
    at_once = spec.batch_size * arguments.world_size
    batches = len(train_blocks) // at_once
    steps_an_epoch = math.ceil(batches / spec.accumulate)
    arguments.eval_steps = arguments.save_steps = spec.eval_steps or steps_an_epoch

    def tokens_at(step: int) -> int:
        epochs, rest = divmod(step, steps_an_epoch)
        return (epochs * batches + min(rest * spec.accumulate, batches)) * at_once * spec.length

    # compile the kernels here, where Ctrl-C still stops everything; later it would stop only the compiler
    choose_backend(model.config.attention.backend, arguments.device)
    logger = MetricsLogger(run, model, tokens_at, progress)
    with quiet_transformers(), tensor_float_32(), StopOnSignal() as stop, logger:
        trainer = ProtocolTrainer(
            model,
            arguments,
            train_dataset=train_blocks,
            eval_dataset=valid_blocks,
            callbacks=[ClipDynamics(), logger, stop],
            one_group=spec.one_group,
        )
        trainer.train_from_newest_checkpoint(stop)

    losses = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    valid_loss = losses[trainer.state.global_step]
    record = {
        **run.read(),
        "finished": True,
        "steps": trainer.state.global_step,
        "result": {
            "valid_loss": valid_loss,
            "valid_perplexity": math.exp(min(valid_loss, 700.0)),
            "tokens": tokens_at(trainer.state.global_step),
            "tokens_per_second": logger.tokens_per_second,
            "parameters": model.num_parameters(),
        },
    }
    save_model(trainer, run)
    if trainer.is_world_process_zero():
        run.write(record)
    stop.check(trainer.state)  # in the last step or after it: the run is complete, but the caller must not go on
    return record


def save_model(trainer: ProtocolTrainer, run: RunFolder) -> None:
    """Save the trained model. All processes take part, because weights may be sharded; the first one renames."""
    staging = run.path / ".model"
    with quiet_transformers(), named_errors(run.model):
        try:
            trainer.save_model(str(staging))
            trainer.accelerator.wait_for_everyone()
            if trainer.is_world_process_zero():
                write_digests(staging)
                write_whole(run.model, lambda path: os.replace(staging, path))
        finally:
            if trainer.is_world_process_zero():
                shutil.rmtree(staging, ignore_errors=True)
