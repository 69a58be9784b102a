"""The time-series model: readings at any times in, distributions of values at any times out."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, StudentT
from transformers.utils import ModelOutput

from rfa.checks import needs, require
from rfa.files import check_writable, write_whole
from rfa.nn import NormalLinear, RobustFilterAttention
from rfa.nn.dynamics import softplus_inverse
from rfa.ops.positions import check_given, check_tensor, times_dtype
from rfa.ops.transforms import readable, values_at_hand
from rfa.version import __version__

from .decoder import RFABlock, RFAPreTrainedModel
from .packing import NO_COLUMNS
from .series_tokens import ReadingRows, Scale, WindowScaling, checked_readings, series_tokens
from .time_series_config import RFATimeSeriesConfig

FIRST_DEGREES, LEAST_DEGREES = 5.0, 2.0  # of freedom, at the start and at least
LEAST_DEVIATION = 1e-4  # spreads
HEAD_DEVIATION = 0.1  # of the first predictions, in spreads


@dataclass
class TimeSeriesOutput(ModelOutput):
    """What `RFAForTimeSeries` returns.

    Fields:
        loss: mean negative log likelihood of the seen targets, 0 where none is seen; None without targets.
        location, deviation: of the distribution, `(batch, outputs, channels)`, in the units of the values.
        degrees_of_freedom: of a Student-t distribution, `(batch, outputs, channels)`; None for a Gaussian one.
        robust_weights: of each layer, `(batch, heads, outputs, length)`, on request.
    """

    loss: Tensor | None = None
    location: Tensor | None = None
    deviation: Tensor | None = None
    degrees_of_freedom: Tensor | None = None
    robust_weights: tuple[Tensor, ...] | None = None

    @property
    def distribution(self) -> Distribution:
        """The distribution of the values at the outputs' times, one for each channel, in their units."""
        return self._distribution(None if readable(self.location) else False)  # vmap has no values to read

    def unchecked(self) -> Distribution:
        """The distribution, also of numbers that are not finite: a training that diverges has a loss that is none."""
        if self.degrees_of_freedom is None:
            return self._distribution(False)
        lost = self.degrees_of_freedom.isnan()  # PyTorch checks them in any case
        location = cast(Tensor, self.location).masked_fill(lost, torch.nan)
        degrees = self.degrees_of_freedom.masked_fill(lost, LEAST_DEGREES)
        return TimeSeriesOutput(None, location, self.deviation, degrees)._distribution(False)

    def _distribution(self, checked: bool | None) -> Distribution:
        location, deviation = cast(Tensor, self.location), cast(Tensor, self.deviation)
        if self.degrees_of_freedom is None:
            return Normal(location, deviation, validate_args=checked)
        return StudentT(self.degrees_of_freedom, location, deviation, validate_args=checked)


class RFAForTimeSeries(RFAPreTrainedModel):
    """Filters, forecasts and imputes irregular series of several channels.

    Readings and queries are tokens of one sequence in order of time. A query carries no value: it has its time, and
    the gap since the reading before it. It sees readings, and no token sees it. The decoder is that of the language
    model, so `config.preset` may be any of its presets.
    """

    config_class = RFATimeSeriesConfig
    main_input_name = "values"

    def __init__(self, config: RFATimeSeriesConfig):
        super().__init__(config)
        features = 2 * (config.channels + 1)
        self.scaling = WindowScaling(config.location or [], config.spread or [], config.scaling)
        self.embedding = NormalLinear(features, config.hidden_size, deviation=(features * config.hidden_size) ** -0.5)
        self.add_blocks(config)
        starts = [0.0, float(softplus_inverse(torch.tensor(1.0, device="cpu")))]
        if config.likelihood == "student_t":
            starts.append(float(softplus_inverse(torch.tensor(FIRST_DEGREES - LEAST_DEGREES, device="cpu"))))
        start = torch.tensor(starts, device="cpu").repeat_interleave(config.channels)
        self.head = NormalLinear(config.hidden_size, len(start), HEAD_DEVIATION * config.hidden_size**-0.5, start)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        times: Float[Tensor, "*t length"] | Int[Tensor, "*t length"],
        values: Float[Tensor, "batch length channels"],
        observed_mask: Bool[Tensor, "batch length channels"] | None = None,
        query_times: Float[Tensor, "*q queries"] | Int[Tensor, "*q queries"] | None = None,
        targets: Float[Tensor, "batch outputs channels"] | None = None,
        target_mask: Bool[Tensor, "batch outputs channels"] | None = None,
        segment_ids: Int[Tensor, "batch length"] | None = None,
        query_segment_ids: Int[Tensor, "batch queries"] | None = None,
        output_robust_weights: bool = False,
    ) -> TimeSeriesOutput:
        """The distribution of the values at the queries' times, and the loss where targets are given.

        The distribution at `query_times` is that of values at these times, given the readings at or before each of them
        (all readings with `causal=False`). Without `query_times` there is one output for each row of `values`: the
        distribution at that row's time, given the readings up to and including the row. So a filter of hidden states is
        trained with the hidden states as targets. To train on readings alone, hold some of them back as queries, as
        `TimeSeriesCollator` does: a row sees its own reading. Then ask by queries too, at the readings' times for a
        filter, because the outputs of rows were not trained.

        Args:
            times: of the readings, `(length,)` or `(batch, length)`, in the unit of `config.typical_gap`, strictly
                increasing among rows with a reading. A row without any reading is no key, so padding is a row of NaN at
                any finite time. Gradients reach times and values.
            values: the readings, NaN where nothing was read.
            observed_mask: False where nothing was read, beside NaN.
            query_times: `(queries,)` or `(batch, queries)`, in any order, in the past or in the future. A query at a
                reading's time sees the reading.
            targets: values at the outputs' times; NaN is not scored.
            target_mask: False where a target is not scored, beside NaN.
            segment_ids: the series of a packed row, to which each reading belongs.
            query_segment_ids: the series to which each query belongs.
            output_robust_weights: also return the robust weight of each reading for each output, by layer and head:
                `1 / (1 + r / (nu_s d (Sigma + gamma^2)))` with the terms of `rfa.robust_filter_attention`, or
                `exp(-r / ...)` of exponential weights. It is 1 for a reading whose key is the output's query, falls
                with their distance r, and is 0 where the output does not see the reading. Training need not make it
                small for outliers. Presets of the filter only.

        Returns:
            A `TimeSeriesOutput`. Its `distribution` is a `torch.distributions` object over `(batch, outputs, channels)`
            in the units of `values`. Its `loss` is the mean negative log likelihood of the seen targets, 0 without any.

        Raises:
            ValueError: for shapes that do not fit, times that do not increase, infinite values, a row of the batch
                without any reading, or segments with `frequencies="as_released"`.
        """
        relative = segment_ids is None or self.config.attention.is_relative()
        require(relative, "segment_ids", "segments", NO_COLUMNS)
        readings = checked_readings(
            times, values, self.config.channels, observed_mask, query_times, segment_ids, query_segment_ids
        )
        output = self.predict_rows(readings, output_robust_weights=output_robust_weights)
        if targets is not None:
            output.loss = self._loss(output, targets, target_mask)
        else:
            require(target_mask is None, "target_mask", "a mask without targets", "targets with it")
        return output

    def predict_rows(
        self,
        readings: ReadingRows,
        scale: Scale | None = None,
        output_robust_weights: bool = False,
        ordered: bool = False,
    ) -> TimeSeriesOutput:
        """The output without its loss. `scale` and `ordered` are those of `series_tokens`."""
        config = cast(RFATimeSeriesConfig, self.config)
        dtype = self.embedding.weight.dtype
        tokens = series_tokens(readings, self.scaling, config.typical_gap, dtype, scale, ordered)
        weights: list[Tensor] = []

        def watch(layer: RFABlock, hidden_states: Tensor) -> None:
            attention: Any = layer.attention
            filters = isinstance(attention, RobustFilterAttention) and attention.aggregation == "consensus"
            require(filters, "output_robust_weights", True, "a preset of the robust filter")
            of_tokens = attention.robust_weights(layer.attention_norm(hidden_states), tokens.positions)
            rows = tokens.of_outputs[:, None, :, None].expand(-1, of_tokens.shape[1], -1, of_tokens.shape[3])
            of_outputs = of_tokens.gather(2, rows)
            columns = tokens.of_readings[:, None, None].expand(*of_outputs.shape[:3], -1)
            weights.append(of_outputs.gather(3, columns))

        watched = watch if output_robust_weights else None
        hidden_states = self.run_blocks(self.embedding(tokens.features), tokens.positions, watch=watched)
        index = tokens.of_outputs[..., None].expand(-1, -1, hidden_states.shape[-1])
        raw = self.head(hidden_states.gather(1, index))
        raw = raw.to(torch.promote_types(readings.values.dtype, torch.float32)).unflatten(-1, (-1, config.channels))
        location, spread = (part.to(raw.dtype) for part in tokens.scale)
        return TimeSeriesOutput(
            location=location + spread * raw[..., 0, :],
            deviation=spread * (F.softplus(raw[..., 1, :]) + LEAST_DEVIATION),
            degrees_of_freedom=LEAST_DEGREES + F.softplus(raw[..., 2, :]) if raw.shape[-2] == 3 else None,
            robust_weights=tuple(weights) if output_robust_weights else None,
        )

    def _loss(self, output: TimeSeriesOutput, targets: Tensor, target_mask: Tensor | None) -> Tensor:
        """Mean negative log likelihood of the seen targets; 0 without any."""
        shape = tuple(cast(Tensor, output.location).shape)
        given = isinstance(targets, Tensor) and targets.is_floating_point() and tuple(targets.shape) == shape
        require(given, "targets", tuple(getattr(targets, "shape", ())), f"floating-point {shape}")
        seen = ~targets.isnan()
        if target_mask is not None:
            check_given("target_mask", target_mask, "torch.bool", targets.device, shape)
            seen = seen & target_mask
        if values_at_hand(targets):
            require(not bool((targets.isinf() & seen).any()), "targets", "infinite values", "finite ones or NaN")
        # at its location an unseen target has a finite likelihood, whose gradient is then 0
        likelihood = output.unchecked().log_prob(torch.where(seen, targets, cast(Tensor, output.location).detach()))
        return -torch.where(seen, likelihood, 0.0).sum() / seen.sum().clamp(min=1)

    @torch.no_grad()
    def export(self, path: str | Path, readings: int) -> None:
        """Write a step as a file of ONNX. It runs in onnxruntime, without this library and PyTorch.

        The state is the last readings. One run takes one reading into it, and gives the distribution at one time: that
        of `forward` with the readings that are kept. The network reads all of them again in each run.

        | input | what |
        | --- | --- |
        | `kept_times`, `kept_values` | the state, `(readings,)` in float64 and `(readings, channels)` in float32 |
        | `time`, `value` | of the reading, likewise, a number and `(channels,)`. NaN: not read; all NaN: no reading |
        | `query_time` | float64, when a value is asked for. Not before `time` and the last reading |

        | output | what |
        | --- | --- |
        | `location`, `deviation`, `degrees_of_freedom` | as in `TimeSeriesOutput`, `(channels,)` |
        | `new_times`, `new_values` | the state of the next run |

        A series begins with zeros and NaN. The metadata of the file have `typical_gap` and `rfa_version`.

        Args:
            path: of the file, which is written whole.
            readings: how many are kept, at least 2.

        Raises:
            ValueError: for fewer readings, a place that cannot be written, and a preset that ONNX cannot express: one
                that scans over its tokens, such as one with a content clock.
            MissingExtra: without the packages `onnx` and `onnxscript`.
        """
        whole = isinstance(readings, int) and not isinstance(readings, bool) and readings >= 2
        require(whole, "readings", readings, "a whole number >= 2")
        needs("onnx", "onnxscript")
        check_writable("path", Path(path))
        config, times = cast(RFATimeSeriesConfig, self.config), torch.arange(readings, dtype=torch.float64)
        values = torch.zeros(readings, config.channels, dtype=torch.float32)
        given = {"kept_times": times, "kept_values": values, "time": times[-1] + 1, "value": values[0]}
        given["query_time"] = times[-1] + 2
        outputs = ["location", "deviation", *["degrees_of_freedom"] * (config.likelihood == "student_t")]
        try:
            program = torch.onnx.export(
                SeriesStep(self),
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
        write_whole(Path(path), lambda temporary: temporary.write_bytes(found.SerializeToString()))

    @torch.no_grad()
    def sample(
        self,
        times: Float[Tensor, "*t length"] | Int[Tensor, "*t length"],
        values: Float[Tensor, "batch length channels"],
        query_times: Float[Tensor, "*q queries"] | Int[Tensor, "*q queries"],
        num_samples: int = 1,
        observed_mask: Bool[Tensor, "batch length channels"] | None = None,
    ) -> Float[Tensor, "samples batch queries channels"]:
        """Trajectories: values at all queries' times, drawn together.

        Values are drawn in order of time, and each draw becomes a reading for the draws after it. So the trajectories
        have the dependence between times that `forward`'s distributions lack. The cost is one forward pass a query.

        Args:
            times, values, observed_mask: as in `forward`.
            query_times: `(queries,)` or `(batch, queries)`, in any order; none may be equal to another one, or to the
                time of a reading.
            num_samples: the number of trajectories.

        Returns:
            Values at the queries' times, in the units of `values`.

        Raises:
            ValueError: as `forward`, for equal times, or without a sample to draw.
        """
        whole = isinstance(num_samples, int) and not isinstance(num_samples, bool) and num_samples >= 1
        require(whole, "num_samples", num_samples, "a whole number >= 1")
        check_tensor("query_times", query_times)
        readings = checked_readings(times, values, self.config.channels, observed_mask, query_times)
        batch, length, channels = readings.values.shape
        asked = cast(Tensor, readings.query_times)
        _check_distinct(readings)
        scale = Scale(*(part[:, :1].repeat(num_samples, 1, 1) for part in self.scaling(readings.values, tokens=1)))
        order, clock = asked.argsort(-1), times_dtype(readings.times, asked)
        every = torch.cat([readings.times.to(clock), asked.gather(1, order).to(clock)], dim=1)
        drawn = readings.values.new_full((batch, order.shape[1], channels), torch.nan)
        every, known = every.repeat(num_samples, 1), torch.cat([readings.values, drawn], 1).repeat(num_samples, 1, 1)
        by_time = every.argsort(dim=-1, stable=True)
        place = by_time.argsort(-1)[:, length:]
        every = every.gather(1, by_time)
        known = known.gather(1, by_time[..., None].expand(-1, -1, channels))
        for step in range(order.shape[1]):
            at = place[:, step : step + 1]
            rows = ReadingRows(every, known, every.gather(1, at), None)
            value = self.predict_rows(rows, scale).distribution.sample().to(known.dtype)
            known = known.scatter(1, at[..., None].expand(-1, -1, channels), value)
        result = known.gather(1, place[..., None].expand(-1, -1, channels))
        back = order.argsort(-1).repeat(num_samples, 1)[..., None].expand(-1, -1, channels)
        return result.gather(1, back).unflatten(0, (num_samples, batch))


def _check_distinct(readings: ReadingRows) -> None:
    """Raise `ValueError` for a query at the time of a reading or of another query."""
    asked = cast(Tensor, readings.query_times)
    of_readings = (readings.times[:, :, None] == asked[:, None, :]) & readings.present()[:, :, None]
    equal = of_readings.any() | (asked.sort(dim=-1).values.diff(dim=-1) == 0).any()
    require(
        not bool(equal), "query_times", "equal times", "times of no reading, each once; or forward(...).distribution"
    )


# A step of the model as a file of ONNX: the readings that it keeps are its state


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
