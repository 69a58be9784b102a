"""A step of the time-series model as a file of ONNX. The readings that it keeps are its state."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rfa.checks import needs, require
from rfa.files import check_writable, write_whole
from rfa.version import __version__

from .series_tokens import ReadingRows


class SeriesStep(nn.Module):
    """The step that `RFAForTimeSeries.export` writes, with its inputs and outputs."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = copy.deepcopy(model)
        for layer in self.model.layers:
            layer.attention.backend = "reference"
        self.eval()

    def forward(
        self, kept_times: Tensor, kept_values: Tensor, time: Tensor, value: Tensor, query_time: Tensor
    ) -> tuple[Tensor, ...]:
        """The distribution at `query_time`, and the readings that are kept."""
        seen = ~value.isnan().all(-1)
        times = torch.where(seen, torch.cat([kept_times[1:], time[None]]), kept_times)
        values = torch.where(seen, torch.cat([kept_values[1:], value[None]]), kept_values)
        found = self.model.predict_rows(
            ReadingRows(times[None], values[None], query_time[None, None], None), ordered=True
        )
        parts = found.location, found.deviation, found.degrees_of_freedom
        return *(part[0, 0] for part in parts if part is not None), times, values


@torch.no_grad()
def write_step(model: Any, path: Path, readings: int) -> None:
    """Write the file. The arguments are those of `RFAForTimeSeries.export`."""
    whole = isinstance(readings, int) and not isinstance(readings, bool) and readings >= 2
    require(whole, "readings", readings, "a whole number >= 2")
    needs("onnx", "onnxscript")
    check_writable("path", path)
    config, times = model.config, torch.arange(readings, dtype=torch.float64)
    values = torch.zeros(readings, config.channels, dtype=torch.float32)
    given = {"kept_times": times, "kept_values": values, "time": times[-1] + 1, "value": values[0]}
    given["query_time"] = times[-1] + 2
    outputs = ["location", "deviation", *["degrees_of_freedom"] * (config.likelihood == "student_t")]
    try:
        program = torch.onnx.export(
            SeriesStep(model),
            tuple(given.values()),
            dynamo=True,
            verbose=False,
            input_names=[*given],
            output_names=[*outputs, "new_times", "new_values"],
            custom_translation_table={torch.ops.aten.log1p.default: _log1p, torch.ops.aten.expm1.default: _expm1},
        )
    except torch.onnx.OnnxExporterError as error:
        expected = "one that ONNX can express: without a scan over the tokens"
        raise ValueError(f"preset: got {config.preset!r}, expected {expected}") from error
    assert program is not None
    found = program.model_proto
    for name, each in {"typical_gap": config.typical_gap, "rfa_version": __version__}.items():
        found.metadata_props.add(key=name, value=str(each))
    write_whole(path, lambda temporary: temporary.write_bytes(found.SerializeToString()))


def _log1p(x: Any) -> Any:
    """For ONNX, which has none: `log(1 + x)` loses the digits of a small x."""
    from onnxscript import opset18 as op

    u = op.Add(x, 1.0)
    exact = op.Div(op.Mul(op.Log(u), x), op.Sub(u, 1.0))  # the rounding of u cancels
    near = op.Where(op.Equal(u, 1.0), x, exact)
    return op.Where(op.Less(op.Abs(x), 0.5), near, op.Log(u))


def _expm1(x: Any) -> Any:
    """For ONNX, as `_log1p`."""
    from onnxscript import opset18 as op

    u = op.Exp(x)
    exact = op.Div(op.Mul(op.Sub(u, 1.0), x), op.Log(u))
    near = op.Where(op.Equal(u, 1.0), x, exact)
    return op.Where(op.Less(op.Abs(x), 0.5), near, op.Sub(u, 1.0))
