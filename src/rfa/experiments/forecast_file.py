"""From a CSV file to a folder with its forecast: by filters, by a trained network, or by one trained on the file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rfa.checks import require
from rfa.data.series_table import TableFormat
from rfa.files import sha256
from rfa.progress import StageProgress, TrainingProgress

from .forecast_filter import forecast_by_filter
from .forecast_network import forecast_by_network
from .forecast_training import resume_network, train_network
from .forecasting import NETWORK, ForecastRequest, check_out, read_request, write_forecast
from .network_folder import RECORD, NetworkRequest, read_record


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
    table, query_times = read_request(request)
    if model == "filter":
        forecaster = forecast_by_filter(request, progress)
        return write_forecast(request, forecaster, model, out, table, query_times)
    folder = Path(network) if network is not None else out / NETWORK
    if network is None:
        asked = {
            "time": request.time,
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
    if network is not None:
        given = [*training, *(["resume"] if resume else [])]
        require(not given, "network", f"a trained one with {', '.join(given)}", "one of them")
