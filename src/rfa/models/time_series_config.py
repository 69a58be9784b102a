"""The configuration of the time-series model: the decoder's sizes, and what is known of the data."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import PreTrainedConfig

from rfa.checks import check_range, require

from .attention import AttentionConfig, StateSpaceConfig
from .configuration import ATTENTION_FIELDS, DecoderConfig, with_value_errors
from .presets import PRESETS
from .time_series_data import SeriesExample, robust_location_and_spread, times_and_values

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
        num_key_value_heads: groups of heads share keys and values; by default each head has its own.
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
