"""What the time-series model knows of its data: series as users have them, their robust scales, its configuration,
and batches for transformers' `Trainer`."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Shaped
from torch import Tensor
from transformers import PreTrainedConfig

from rfa.checks import as_array, check_range, require

from .attention import AttentionConfig, StateSpaceConfig
from .configuration import ATTENTION_FIELDS, DecoderConfig, with_value_errors
from .presets import PRESETS

MEDIAN_DEVIATION = 1.482602218505602  # standard deviations of a normal distribution per median deviation

# (times, values), or a mapping with these entries and others
SeriesExample = tuple[Any, Any] | Mapping[str, Any]


def times_and_values(
    example: SeriesExample,
) -> tuple[Shaped[Tensor, " length"], Float[Tensor, "length channels"]]:
    """Times as they are, lists of numbers in float64, and values in a floating-point dtype.

    Args:
        example: times `(length,)`, in order; values `(length, channels)`, or `(length,)` for one channel, with NaN
            where nothing was read.

    Raises:
        ValueError: naming the entry, for other shapes, something that is no number, or infinite values.
    """
    if isinstance(example, Mapping):
        for name in ("times", "values"):
            require(name in example, "series", sorted(map(str, example)), f"an entry {name!r}")
        given = example["times"], example["values"]
    else:
        pair = isinstance(example, tuple | list) and len(example) == 2
        require(pair, "series", type(example).__name__, "(times, values), or a mapping with these entries")
        given = example[0], example[1]
    times, values = (numbers(name, each) for name, each in zip(("times", "values"), given, strict=True))
    values = values[:, None] if values.dim() == 1 else values
    values = values if values.is_floating_point() else values.to(torch.float64)
    for name, each, dimensions in (("times", times, 1), ("values", values, 2)):
        require(each.dim() == dimensions, name, tuple(each.shape), f"{dimensions} dimensions")
    require(len(times) == len(values), "values", tuple(values.shape), f"one row for each of {len(times)} times")
    require(not bool(values.isinf().any()), "values", "infinite values", "finite values, or NaN where nothing was read")
    return times, values


def numbers(name: str, given: Any) -> Shaped[Tensor, "*shape"]:
    """Numbers as a tensor, NaN where something is missing.

    Lists become float64: in float32 a clock of seconds since 1970 would lose its minutes.

    Raises:
        ValueError: for text, dates, nothing, or lists of different lengths.
    """
    if isinstance(given, Tensor):
        found = given
    else:
        try:
            array = as_array(given)
            found = torch.as_tensor(array if array.dtype != object else array.astype(np.float64))
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{name}: got {type(given).__name__} ({reason}), expected numbers") from None
    require(not found.is_complex() and found.dtype != torch.bool, name, found.dtype, "real numbers")
    return found


def median(values: Float[Tensor, "batch length channels"]) -> Float[Tensor, "batch channels"]:
    """The median along the length without NaN, of two middle numbers their mean; NaN where all are NaN."""
    missing = values.isnan()
    ordered = values.masked_fill(missing, math.inf).sort(dim=1).values  # infinity, unlike NaN, has a gradient of zero
    count = (~missing).sum(1, keepdim=True)
    middle = torch.cat([(count - 1).clamp(min=0) // 2, (count // 2).minimum((count - 1).clamp(min=0))], dim=1)
    low, high = ordered.gather(1, middle).unbind(1)
    return torch.where(missing.all(1), math.nan, torch.lerp(low, high, 0.5))


def robust_location_and_spread(
    values: Float[Tensor, "batch length channels"],
) -> tuple[Float[Tensor, "batch channels"], Float[Tensor, "batch channels"]]:
    """The median, and 1.4826 times the median absolute deviation from it (Hampel 1974); NaN without readings."""
    location, missing = median(values), values.isnan()
    deviation = (values.masked_fill(missing, 0.0) - location[:, None]).abs()
    return location, MEDIAN_DEVIATION * median(deviation.masked_fill(missing, math.nan))


_MOST_CHANNELS = 2**20
_LEARNED = {"learn_frequencies": "frequencies", "learn_decay": "decay"}


@with_value_errors
@strict
class RFATimeSeriesConfig(DecoderConfig):
    """The configuration of `RFAForTimeSeries`. `from_data` reads gap, span, location and spread off training data.

    The model divides all times by `typical_gap`. So decays, slopes and frequencies of a preset, which are per token in
    a language model, are per typical gap. The bank of frequencies runs from one radian per typical gap down to about
    one radian per span, in geometric steps.

    Args:
        channels: of the values.
        preset: the attention, one of `PRESETS`. Filters and posterior routing learn frequencies and decays here, where
            the preset has them; dot products keep what the preset says.
        typical_gap: between readings, in the unit of the times.
        span: of a window, in the unit of the times.
        location, spread: of each channel in the training data, for channels that a window hardly shows; 0 and 1.
        scaling: "window" (each window by the median and the median deviation of its readings, channel by channel) or
            "training" (every window by `location` and `spread`). With "window" the scale of every output comes from all
            readings of the window, so earlier outputs know of later readings. That does no harm where all questions lie
            after the last reading, as in forecasts. For a filter take "training": then a causal model is causal in
            every digit.
        causal: readings later than a query's time stay unseen. Off for imputation.
        likelihood: of a value, "student_t" or "gaussian".
        hidden_size, num_hidden_layers, num_attention_heads: the decoder's sizes.
        intermediate_size: size of the feed-forward network; by default four times `hidden_size`.
        attention_dropout: share of the attention weights that training drops; it needs the reference backend.
        layer_norm_eps: as elsewhere in transformers.
        attention: the attention itself, instead of `preset`, or the dictionary from its `to_dict`.
        **kwargs: fields of attention by their plain names, such as `learn_decay=False` or `base=100.0`.

    Raises:
        ValueError: if a value is unknown or values do not fit together.
    """

    model_type = "rfa_time_series"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["degrees_of_freedom"]

    refuses_idle_fields = True

    channels: int = 1
    preset: str = "rfa"
    typical_gap: float | int = 1.0
    span: float | int = 128.0
    location: list[float | int] | None = None
    spread: list[float | int] | None = None
    scaling: Literal["window", "training"] = "window"
    likelihood: Literal["student_t", "gaussian"] = "student_t"
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        for name in kwargs.keys() - _transformers_fields():
            require(False, name, kwargs[name], f"one of {', '.join([*self.field_names(), *sorted(ATTENTION_FIELDS)])}")
        check_range("channels", self.channels, 1, _MOST_CHANNELS)
        if self.location is None:
            self.location = [0.0] * self.channels
        if self.spread is None:
            self.spread = [1.0] * self.channels
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check that the values fit together. `strict` calls this."""
        for name in ("typical_gap", "span"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a positive finite number")
        require(self.span > self.typical_gap, "span", self.span, f"more than typical_gap = {self.typical_gap}")
        for name, least in (("location", -math.inf), ("spread", 0.0)):
            given = getattr(self, name)
            require(len(given) == self.channels, name, given, f"one number for each of {self.channels} channels")
            require(all(least < x < math.inf for x in given), name, given, f"finite numbers above {least}")
        super().validate_architecture()

    def length_in_training(self) -> int:
        """The span in typical gaps, plus one."""
        return max(2, round(self.span / self.typical_gap) + 1)

    @classmethod
    def start_of_attention(cls, given: dict[str, Any]) -> AttentionConfig | None:
        """The preset, with its bank of frequencies from the typical gap to the span."""
        if given.get("attention") is not None:
            return given["attention"]
        name = given.get("preset", cls.preset)
        require(isinstance(name, str) and name in PRESETS, "preset", name, f"one of {', '.join(PRESETS)}")
        attention = PRESETS[name]
        gap, span = given.get("typical_gap", cls.typical_gap), given.get("span", cls.span)
        changes: dict[str, Any] = {}
        if "base" not in attention.without_effect() and _spans_a_bank(span, gap):
            changes["base"] = span / gap
        if isinstance(attention, StateSpaceConfig):
            parts = ((option, getattr(attention, part).kind) for option, part in _LEARNED.items())
            changes |= {option: True for option, kind in parts if kind != "none"}
        return attention.changed(changes)

    def __setattr__(self, name: str, value: object) -> None:
        built = name in ("preset", "typical_gap", "span") and name in vars(self) and "attention" in vars(self)
        if built and value != getattr(self, name):  # attention was made of it
            raise ValueError(f"{name}: got {value!r} for a finished configuration, expected a new configuration")
        super().__setattr__(name, value)

    @classmethod
    def from_data(cls, series: Iterable[SeriesExample], /, **fields: Any) -> Self:
        """The configuration for training data.

        Args:
            series: the training series, `(times (length,), values (length, channels))` each, or mappings with these
                entries, as `TimeSeriesCollator` takes them: tensors, NumPy arrays, pandas objects or lists. NaN where
                nothing was read. A series should be as long as the windows of training.
            fields: of the configuration. They replace what the data say.

        Returns:
            The configuration. `typical_gap` is the median gap between readings of all series, `span` the longest
            series, `location` and `spread` the median and the median deviation of all readings, channel by channel.

        Raises:
            ValueError: without two readings in any series, for a channel that is never seen, infinite values, or series
                of different channels.
        """
        gaps, spans = list[Tensor](), list[float]()
        seen = list[Tensor]()
        for number, example in enumerate(series):
            times, values = times_and_values(example)
            channels = values.shape[1] if not seen else seen[0].shape[1]
            expected = f"{channels}, as the series before"
            require(values.shape[1] == channels, "values", f"{values.shape[1]} channels in series {number}", expected)
            present = ~values.isnan().all(-1)
            of_readings = times[present]
            gaps.append(of_readings.diff().to(torch.float64))
            spans.append(float(of_readings[-1] - of_readings[0]) if len(of_readings) else 0.0)
            seen.append(values[present].to(torch.float64))
        require(bool(gaps), "series", "none", "at least one series")
        every = torch.cat(gaps)
        require(bool(every.numel()), "series", "no gap between readings", "at least two readings in one series")
        require(bool((every > 0).all()), "times", float(every.min()), "strictly increasing times of readings")
        readings = torch.cat(seen)
        unseen = readings.isnan().all(0).nonzero().flatten().tolist()
        require(not unseen, "values", f"channels {unseen} without any reading", "readings of every channel")
        location, spread = (part[0] for part in robust_location_and_spread(readings[None]))
        spread = torch.where(spread > 0, spread, torch.ones_like(spread))
        gap = float(every.median())
        known: dict[str, Any] = {
            "channels": readings.shape[1],
            "typical_gap": gap,
            "span": max(*spans, 2 * gap),
            "location": location.tolist(),
            "spread": spread.tolist(),
        }
        return cls(**(known | fields))


def _spans_a_bank(span: object, gap: object) -> bool:
    """Whether both are numbers that give a bank; `validate_architecture` has the messages for others."""
    numbers = isinstance(span, int | float) and isinstance(gap, int | float)
    return numbers and 0 < gap < span < math.inf  # type: ignore[operator]


def _transformers_fields() -> set[str]:
    """The names that a file may hold beside the fields: transformers' own."""
    return {
        *PreTrainedConfig().to_dict(),
        *vars(PreTrainedConfig()),
        "architectures",
        "auto_map",
        "name_or_path",
        "torch_dtype",
        "use_cache",  # the Trainer adds it
    }


_ENTRIES = ("times", "values", "query_times", "targets")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeSeriesCollator:
    """Makes one batch of several series: holds readings back as queries, and pads shorter series with rows of NaN.

    Each example is a dictionary of NumPy arrays, lists or tensors: `times` `(length,)` and `values` `(length,
    channels)`, with NaN where nothing was read. It may have `query_times` and `targets` of its own. Then nothing is
    held back. `targets` without `query_times` are those of the rows. Values in float64 stay so: the model takes each
    window's location from them before it rounds to its own dtype.

    Args:
        forecast: this share of the readings, the last ones, becomes queries with targets.
        hold_out: this share of the other readings, taken at random, becomes queries with targets too.

    Raises:
        ValueError: for a share that is not between 0 and 1, or examples that do not fit.
    """

    forecast: float = 0.25
    hold_out: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forecast", "hold_out"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "a share from 0 to below 1")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Shaped[Tensor, "..."]]:
        """The arguments of `RFAForTimeSeries.forward` for these series."""
        require(len(examples) > 0, "examples", "none", "at least one series")
        parts = [self._parts(example) for example in examples]
        names, channels = set(parts[0]), parts[0]["values"].shape[1]
        for part in parts:
            found = part["values"].shape[1]
            require(found == channels, "values", f"{found} channels", f"{channels}, as in the first series")
            require(set(part) == names, "examples", sorted(part), f"the same entries in each, {sorted(names)}")
        return {name: _padded(name, parts) for name in parts[0]}

    def _parts(self, example: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a series, with held-back readings as queries."""
        for name in example:
            require(name in _ENTRIES, "examples", name, f"some of {_ENTRIES}")
        times, values = times_and_values(example)
        require(len(times) > 0, "times", "no rows", "at least one row in each series")
        values = _in_wide_dtype(values)
        given = {name: example[name] for name in example if example[name] is not None}
        part = {"times": times, "values": values}
        if "query_times" in given:
            part["query_times"] = numbers("query_times", given["query_times"])
            require(part["query_times"].dim() == 1, "query_times", tuple(part["query_times"].shape), "(queries,)")
        if "targets" in given:
            outputs, channels = len(part.get("query_times", times)), values.shape[1]
            targets = part["targets"] = _in_wide_dtype(numbers("targets", given["targets"]))
            fits = tuple(targets.shape) == (outputs, channels)
            require(fits, "targets", tuple(targets.shape), f"{(outputs, channels)}, one row for each output")
        if "targets" in part or "query_times" in part:
            return part
        held = self._held(~values.isnan().all(-1))
        if held is None:
            return part
        kept = values.masked_fill(held[:, None], math.nan)
        return {"times": times, "values": kept, "query_times": times[held], "targets": values[held]}

    def _held(self, present: Tensor) -> Tensor | None:
        """Which rows are held back, `(length,)`; None for no share. At least one reading stays, and one is held."""
        if not (self.forecast or self.hold_out):
            return None
        rows = present.nonzero().flatten()
        require(len(rows) > 1, "values", f"{len(rows)} readings in a series", "at least two, to hold one back")
        last = math.ceil(self.forecast * len(rows))
        before = rows[: max(1, len(rows) - last)]
        drawn = min(len(before) - 1, math.ceil(self.hold_out * len(before)))
        held = torch.zeros_like(present)
        held[rows[len(before) :]] = True
        held[before[torch.randperm(len(before))[:drawn]]] = True
        return held


def _padded(name: str, parts: list[dict[str, Tensor]]) -> Tensor:
    """One entry of all series, with rows that are no reading and targets that are not scored at the end."""
    given, rows = [part[name] for part in parts], []
    longest = max(map(len, given))
    for part, one in zip(parts, given, strict=True):
        missing = longest - len(one)
        if name in ("times", "query_times"):
            filling = part["times"][-1:].to(one.dtype).expand(missing)
        else:
            filling = one.new_full((missing, *one.shape[1:]), math.nan)
        rows.append(torch.cat([one, filling]))
    return torch.stack(rows)


def _in_wide_dtype(readings: Tensor) -> Tensor:
    """Readings in the default dtype at least. float64 stays: in float32 a high level would swallow what changes."""
    kind = readings.dtype if readings.is_floating_point() else torch.float64
    return readings.to(torch.promote_types(kind, torch.get_default_dtype()))
