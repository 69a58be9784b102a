"""Train a network to forecast series of CSV files. It can be stopped and resumed; the best weights are kept."""

import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, set_seed

from rfa.checks import require
from rfa.environment import environment
from rfa.files import sha256, write_whole
from rfa.forecasting.filter import forecast_by_filter
from rfa.forecasting.network import (
    CHECKPOINTS,
    MODEL,
    NETWORK_FORMAT,
    RECORD,
    NetworkRequest,
    SeriesWindows,
    TrainingData,
    check_network_free,
    forecast_by_network,
    load_network,
    read_record,
    read_training_data,
    training_part,
    windows_span,
    write_record,
)
from rfa.forecasting.request import NETWORK, ForecastRequest, check_out, read_request, write_forecast
from rfa.forecasting.table import TableFormat
from rfa.models import RFAForTimeSeries, RFATimeSeriesConfig, TimeSeriesCollator
from rfa.models.saved_files import quiet_transformers, write_digests
from rfa.progress import StageProgress, TrainingProgress

from .callbacks import StopOnSignal
from .naive_forecast import validation_scores
from .run_folder import locked
from .trainer import ProtocolTrainer, trainer_arguments

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
    with locked(out):
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
    with locked(out):
        return _train(request, data, config, out, record, progress)


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
    arguments = trainer_arguments(
        out / CHECKPOINTS,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=request.batch_size,
        max_steps=request.steps,
        learning_rate=request.rate,
        seed=request.seed,
        eval_steps=every,
        save_steps=every,
        logging_steps=1,
        label_names=["targets"],
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
        trainer.train_from_newest_checkpoint(stop)
    best, _ = load_network(out)
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    record = {**record, "finished": True, "steps": request.steps, "validation_losses": losses}
    record |= {"parameters": best.num_parameters(), "scores": validation_scores(best, data)}
    write_record(out, record)
    return record


# From a CSV file to a folder with its forecast: by filters, by a trained network, or by one trained on the file


def forecast_file(
    request: ForecastRequest,
    out: str | Path,
    *,
    model: str = "filter",
    network: str | Path | None = None,
    training: dict[str, Any] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: StageProgress | None = None,
    training_progress: TrainingProgress | None = None,
) -> dict[str, Any]:
    """Forecast a CSV file, and write `forecast.csv`, `forecast.json` and `figure.png`.

    Args:
        request: what to forecast.
        out: the folder.
        model: "filter" (one for each channel) or "network".
        network: a folder of `train_network`. Without it a network is trained on the file, and kept in `out/network`.
        training: fields of `NetworkRequest` for that training, such as `steps`.
        overwrite: replace a forecast that is there.
        resume: continue a training on the file that was stopped.
        progress: of filters, called with the stage, the amount done and the total.
        training_progress: as in `train_network`.

    Returns:
        The content of `forecast.json`.

    Raises:
        ValueError: naming the argument, for bad data, options that do not fit together, or a folder with other files.
        OSError: if a file cannot be written.
        Stopped: on Ctrl-C in training, after saving.
    """
    out = Path(out)
    given = {name: value for name, value in (training or {}).items() if value is not None}
    _check_options(request, model, network, given, resume)
    check_out(out, overwrite, resume)
    table, query_times = read_request(request, by_filter=model == "filter")
    if model == "filter":
        forecaster = forecast_by_filter(request, progress)
        return write_forecast(request, forecaster, model, out, table, query_times)
    folder = Path(network) if network is not None else out / NETWORK
    if network is None:
        asked = {
            "time": request.time if isinstance(request.time, str) else list(request.time),
            "values": None if request.values is None else list(request.values),
            "table_format": request.table_format,
            "horizon": request.horizon,
            **given,
        }
        if resume and (folder / RECORD).exists():
            _check_same(asked, request.file, folder)
            resume_network(folder, progress=training_progress)
        else:
            values = None if request.values is None else tuple(request.values)
            learn = NetworkRequest(files=(str(request.file),), **{**asked, "values": values})
            train_network(learn, folder, overwrite=overwrite, progress=training_progress)
    forecaster, record = forecast_by_network(folder)
    about = {
        "network": str(folder),
        "trained_horizon": record["request"]["horizon"],
        "beyond_training": _farther(request, record, table),
        "scores": record.get("scores"),
    }
    return write_forecast(request, forecaster, model, out, table, query_times, about)


def _check_same(asked: dict[str, Any], file: Path, folder: Path) -> None:
    """Raise `ValueError` unless the training in the folder is of this file, with what is asked for now."""
    record = read_record(folder)
    require(sha256(file) in record["sha256"].values(), "file", str(file), f"the file on which {folder} is trained")
    request = {**record["request"], **asdict(TableFormat(**record["request"]["table_format"]))}
    for name, value in {**asked, **asdict(asked["table_format"])}.items():
        began = asked[name] if name == "table_format" else request[name]  # its options come one by one
        expected = f"{began!r}, with which the training in {folder} began (--overwrite begins a new one)"
        require(value == began, name, value, expected)


def _farther(request: ForecastRequest, record: dict[str, Any], table: Any) -> bool:
    """Whether the forecast looks farther ahead than the network's training."""
    same_kind = bool(table.unit) == (record["unit"] is not None)  # the forecaster refuses the other
    trained = record["request"]["horizon"]
    return same_kind and table.duration("horizon", request.horizon) > table.duration("horizon", trained)


def _check_options(request: ForecastRequest, model: str, network: Any, training: dict[str, Any], resume: bool) -> None:
    """Raise `ValueError` for options that do not fit together."""
    require(model in ("filter", "network"), "model", model, "filter or network")
    if model == "filter":
        given = [name for name, value in (("network", network), ("resume", resume or None)) if value is not None]
        require(not given and not training, "model", f"filter with {', '.join([*given, *training])}", "--model network")
        return
    require(request.components is None, "components", request.components, "none with a network")
    require(request.sensor is None, "sensor", request.sensor, "none with a network; --model filter takes several")
    require(request.robust, "not-robust", True, "it with --model filter")
    for name in ("positive", "counts", "angle"):
        require(not getattr(request, name), name, getattr(request, name), "it with --model filter")
    if network is not None:
        given = [*training, *(["resume"] if resume else [])]
        require(not given, "network", f"a trained one with {', '.join(given)}", "one of them")
