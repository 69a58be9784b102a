"""Train a network to forecast series of CSV files. It can be stopped and resumed; the best weights are kept."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from rfa.checks import require
from rfa.files import held, write_whole
from rfa.models import RFAForTimeSeries, RFATimeSeriesConfig, TimeSeriesCollator
from rfa.progress import TrainingProgress
from rfa.training import Stopped
from rfa.training.callbacks import StopOnSignal
from rfa.training.environment import environment
from rfa.training.saved_files import check_digests, checkpoints_in, missing_files, write_digests
from rfa.training.trainer import ProtocolTrainer, quiet_transformers

from .forecast_windows import SeriesWindows, training_part, windows_span
from .naive_forecast import validation_scores
from .network_folder import (
    CHECKPOINTS,
    LOCK,
    MODEL,
    NETWORK_FORMAT,
    NetworkRequest,
    TrainingData,
    check_network_free,
    load_network,
    read_record,
    read_training_data,
    write_record,
)

_VALIDATIONS = 20  # in a run


def train_network(
    request: NetworkRequest, out: str | Path, *, overwrite: bool = False, progress: TrainingProgress | None = None
) -> dict[str, Any]:
    """Train a network in a new folder.

    Args:
        request: what to train.
        out: the folder.
        overwrite: replace a network that is there.
        progress: called after each step with the step, their number, and the latest losses.

    Returns:
        The record, as in `network.json`.

    Raises:
        ValueError: for bad data, or a folder with other files.
        OSError: if a file cannot be written.
        Stopped: on Ctrl-C, after saving.
    """
    out = Path(out)
    check_network_free(out, overwrite)
    request = NetworkRequest(**{**asdict(request), "files": tuple(str(Path(f).absolute()) for f in request.files)})
    data = read_training_data(request)
    first, config = data.series[0], _config(request, data)  # all faults come before anything is removed
    with _locked(out):
        for name in (CHECKPOINTS, MODEL):
            shutil.rmtree(out / name, ignore_errors=True)
        record: dict[str, Any] = {
            "format": NETWORK_FORMAT,
            "finished": False,
            "request": asdict(request),
            "channels": list(first.channels),
            "unit": first.unit or None,
            "horizon": data.horizon,
            "context": data.context,
            "series": len(data.series),
            "readings": sum(int((~table.values.isnan()).sum()) for table in data.series),
            "notes": sorted({note for table in data.series for note in table.notes}),
            "split": data.split.words,
            "windows": {"train": len(data.split.train), "valid": len(data.split.valid)},
            "sha256": data.digests,
            "environment": environment(),
        }
        write_record(out, record)
        return _train(request, data, config, out, record, progress)


def resume_network(out: str | Path, *, progress: TrainingProgress | None = None) -> dict[str, Any]:
    """Continue the training of a folder from its newest checkpoint. A finished record is returned as it is.

    Raises:
        ValueError: for a folder without a network, changed files, or a damaged checkpoint.
        OSError, Stopped: as `train_network`.
    """
    out = Path(out)
    record = read_record(out)
    if record["finished"]:
        return record
    request = NetworkRequest(**record["request"])
    data = read_training_data(request)
    began = record["sha256"]
    changed = sorted(name for name in began.keys() | data.digests.keys() if began.get(name) != data.digests.get(name))
    require(not changed, "file", ", ".join(changed), "the files with which training began")
    config = _config(request, data)
    with _locked(out):
        return _train(request, data, config, out, record, progress)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    with held(out / LOCK) as mine:
        require(mine, "out", str(out), "a folder that no other process writes to")
        try:
            yield
        finally:
            with suppress(OSError):
                (out / LOCK).unlink()


class _Watch(TrainerCallback):
    """Keeps the best weights, and reports progress."""

    def __init__(self, out: Path, progress: TrainingProgress | None):
        self.out, self.progress = out, progress
        self._latest: dict[str, float] = {}

    def on_step_end(self, args, state, control, **kwargs):
        """Report the step."""
        if self.progress is not None:
            self.progress(state.global_step, state.max_steps, self._latest)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Stop at a loss that is not finite."""
        for name in ("loss", "eval_loss"):
            if name in (logs or {}):
                require(
                    math.isfinite(logs[name]), "training", f"{name} {logs[name]}", "a finite one; try a smaller rate"
                )
        self._latest |= {"loss": logs["loss"]} if logs and "loss" in logs else {}

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):
        """Save the weights where they are the best so far."""
        earlier = [line["eval_loss"] for line in state.log_history if "eval_loss" in line]
        if metrics["eval_loss"] <= min(earlier, default=math.inf):  # its own line is among them
            write_whole(self.out / MODEL, lambda folder: _save(model, folder))


def _save(model: RFAForTimeSeries, folder: Path) -> None:
    model.save_pretrained(str(folder))
    write_digests(folder)


def _config(request: NetworkRequest, data: TrainingData) -> RFATimeSeriesConfig:
    """The configuration by the part for training, in which each column needs a reading."""
    part = training_part(data.series, data.split.train)
    for place, name in enumerate(data.series[0].channels):
        seen = any(not bool(values[:, place].isnan().all()) for _, values in part)
        require(seen, "values", f"no reading of {name!r} in the part for training", "some there")
    span = windows_span(data.series, data.split.train, data.context)
    sizes = {name: getattr(request, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    return RFATimeSeriesConfig.from_data(part, span=span, preset=request.preset, **sizes)


def _train(
    request: NetworkRequest,
    data: TrainingData,
    config: RFATimeSeriesConfig,
    out: Path,
    record: dict[str, Any],
    progress: TrainingProgress | None,
) -> dict[str, Any]:
    set_seed(request.seed)
    train, valid = (SeriesWindows(data.series, places, data.context) for places in data.split[:2])
    model = RFAForTimeSeries(config)
    batch = min(request.batch_size, len(train))
    every = max(1, request.steps // _VALIDATIONS)
    arguments = TrainingArguments(
        output_dir=str(out / CHECKPOINTS),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=request.batch_size,
        max_steps=request.steps,
        learning_rate=request.rate,
        max_grad_norm=1.0,
        seed=request.seed,
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        logging_steps=1,
        logging_nan_inf_filter=False,
        prediction_loss_only=True,
        label_names=["targets"],
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    with quiet_transformers(), StopOnSignal() as stop:
        trainer = ProtocolTrainer(
            model,
            arguments,
            train_dataset=train,
            eval_dataset=valid,
            data_collator=TimeSeriesCollator(),
            callbacks=[_Watch(out, progress), stop],
        )
        trainer.remove_callback(PrinterCallback)
        checkpoint = _newest_checkpoint(out)
        if checkpoint is None or not trainer.is_last(checkpoint, request.steps):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            if stop.stopped and trainer.state.global_step < request.steps:
                raise Stopped(trainer.state.global_step, request.steps)
            if request.steps % every:  # the last step had no validation
                trainer.evaluate()
        else:
            trainer.load_last(checkpoint)
            if not (out / MODEL).exists():
                trainer.evaluate()
    best, _ = load_network(out)
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    record = {**record, "finished": True, "steps": request.steps, "validation_losses": losses}
    record |= {"parameters": best.num_parameters(), "scores": validation_scores(best, data)}
    write_record(out, record)
    return record


def _newest_checkpoint(out: Path) -> Path | None:
    found = [path for path in checkpoints_in(out / CHECKPOINTS) if not missing_files(path)]
    if not found:
        return None
    try:
        check_digests(found[-1])
    except ValueError as error:
        raise ValueError(f"out: {found[-1]} is damaged, delete it to go on from the one before: {error}") from error
    return found[-1]
