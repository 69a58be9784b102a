"""The time-series model: readings at any times in, distributions of values at any times out.

Every reading is a token of one sequence in order of time, and every query is one too. A query is marked absent as a
key: it sees the readings and no token sees it. So the decoder of the language model serves without another kind of
attention.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributions import Distribution, Normal, StudentT
from transformers.utils import ModelOutput

from rfa.checks import require
from rfa.dynamics import time_dtype
from rfa.nn import NormalLinear
from rfa.nn.dynamics import softplus_inverse
from rfa.ops.positions import Positions, check_given, check_tensor, checked_positions, first_time, times_dtype
from rfa.ops.transforms import readable, values_at_hand

from .decoder import RFAPreTrainedModel
from .time_series_data import RFATimeSeriesConfig, robust_location_and_spread

FEWEST = 4  # readings of a channel: fewer say too little of its spread
FEWEST_LOCATED = 3  # of fewer, one wrong reading moves the median anywhere
LINEAR_UP_TO = 4.0  # spreads: a reading farther out enters by its logarithm
LEAST_GAP = 0.05  # typical gaps: added before the logarithm, because a query may stand at a reading's time
FIRST_DEGREES, LEAST_DEGREES = 5.0, 2.0  # of freedom, at the start and at least
LEAST_DEVIATION = 1e-4  # spreads
HEAD_DEVIATION = 0.1  # of the first predictions, in spreads


class Scale(NamedTuple):
    """Location and spread of each window, `(batch, 1, channels)`, in the units of the values."""

    location: Tensor
    spread: Tensor


class ReadingRows(NamedTuple):
    """A batch of windows whose parts fit together, as `checked_readings` returns them."""

    times: Tensor  # (batch, length)
    values: Tensor  # (batch, length, channels), NaN where nothing was read
    query_times: Tensor | None  # (batch, queries); None where every row of `values` is a query

    def present(self) -> Bool[Tensor, "batch length"]:
        """Whether a row holds a reading of any channel."""
        return ~self.values.isnan().all(-1)


class SeriesTokens(NamedTuple):
    """The sequence that the decoder receives.

    Features are scaled values (0 where nothing was read), flags of what was read, the logarithm of the gap to the
    reading before, and whether the token is a query.
    """

    features: Tensor  # (batch, tokens, 2 channels + 2)
    positions: Positions  # in typical gaps
    of_outputs: Tensor  # (batch, outputs), the tokens of the outputs


def checked_readings(
    times: Tensor,
    values: Tensor,
    channels: int,
    observed_mask: Tensor | None = None,
    query_times: Tensor | None = None,
) -> ReadingRows:
    """The arguments of `RFAForTimeSeries.forward`, checked."""
    check_tensor("values", values)
    fits = values.dim() == 3 and values.shape[-1] == channels and values.is_floating_point()
    expected = f"floating-point (batch, length, channels) with {channels} channels"
    require(fits, "values", f"{values.dtype} {tuple(values.shape)}", expected)
    check_tensor("times", times)
    if observed_mask is not None:
        check_given("observed_mask", observed_mask, "torch.bool", values.device, tuple(values.shape))
        values = values.masked_fill(~observed_mask, torch.nan)
    batch, length, _ = values.shape
    present = ~values.isnan().all(-1)
    if readable(values):
        finite = not bool(values.isinf().any())
        require(finite, "values", "infinite values", "finite ones, or NaN where nothing is read")
        empty = (~present.any(-1)).nonzero().flatten().tolist()
        require(not empty, "values", f"no reading in batch rows {empty}", "at least one reading in each row")
    checked_positions(batch, length, length, values.device, times, None, present, None)
    times = torch.atleast_2d(times).expand(batch, length)
    if query_times is not None:
        check_tensor("query_times", query_times)
        queries = query_times.shape[-1] if query_times.dim() else 0
        checked_positions(batch, queries, queries, values.device, None, query_times)
        query_times = torch.atleast_2d(query_times).expand(batch, queries)
    return ReadingRows(times, values, query_times)


def scale_of_windows(values: Float[Tensor, "batch length channels"], config: RFATimeSeriesConfig) -> Scale:
    """Location and spread of each window, channel by channel.

    A channel with fewer than three readings in a window takes location and spread of the training data. A channel with
    three readings, or with more than half of them equal, takes the spread. Gradients go through medians.
    """
    batch = values.shape[0]
    location, spread = (values.new_tensor(x).expand(batch, -1) for x in (config.location, config.spread))
    if config.scaling == "window" and values.shape[1]:
        own_location, own_spread = robust_location_and_spread(values)
        count = (~values.isnan()).sum(1)
        location = torch.where(count >= FEWEST_LOCATED, own_location, location)
        spread = torch.where((count >= FEWEST) & (own_spread > 0), own_spread, spread)
    return Scale(location[:, None], spread[:, None])


def series_tokens(readings: ReadingRows, scale: Scale, typical_gap: float, dtype: torch.dtype) -> SeriesTokens:
    """The tokens of a batch of windows, in order of time; a query comes after the reading of the same time."""
    times, values, query_times = readings
    batch, length, channels = values.shape
    present = readings.present()
    common = times_dtype(times, query_times)
    every = times.to(common) if query_times is None else torch.cat([times.to(common), query_times.to(common)], dim=1)
    clock = (every - first_time(times.to(common), ~present)).to(time_dtype(times.device)) / typical_gap
    tokens = every.shape[1]
    wide = clock.dtype  # a finite reading stays finite, however far out it is
    scaled = (values.nan_to_num().to(wide) - scale.location.to(wide)) / scale.spread.to(wide)
    observed = ~values.isnan()
    parts = torch.cat([torch.where(observed, logarithmic_beyond(scaled), 0.0), observed], dim=-1)
    of_queries = (0, 0, 0, tokens - length)  # zeros for the queries after the readings
    parts, is_key = F.pad(parts, of_queries), F.pad(present, of_queries[2:])

    order = (~is_key).to(torch.int8).argsort(dim=-1, stable=True)
    order = order.gather(1, clock.detach().gather(1, order).argsort(dim=-1, stable=True))
    clock, is_key = clock.gather(1, order), is_key.gather(1, order)
    parts = parts.gather(1, order[..., None].expand(-1, -1, 2 * channels))
    features = torch.cat([parts, torch.stack([_log_gap(clock, is_key), ~is_key], dim=-1)], dim=-1).to(dtype)
    positions = checked_positions(batch, tokens, tokens, values.device, clock, None, is_key, None)
    return SeriesTokens(features, positions, order.argsort(-1)[:, 0 if query_times is None else length :])


def logarithmic_beyond(x: Float[Tensor, "..."], linear: float = LINEAR_UP_TO) -> Float[Tensor, "..."]:
    """`x` up to `|x| = linear`, and `linear (1 + log(|x| / linear))` with its sign beyond; its slope is continuous."""
    size = x.abs()
    return torch.where(size <= linear, x, x.sign() * linear * (1 + torch.log(size.clamp(min=linear) / linear)))


def _log_gap(clock: Tensor, is_key: Tensor) -> Tensor:
    """`log(gap + 0.05)` of each token to the reading before it, in typical gaps; 0 without one."""
    index = torch.arange(clock.shape[1], device=clock.device).expand(clock.shape)
    last = torch.where(is_key, index, -1).cummax(-1).values
    before = torch.cat([last.new_full((len(last), 1), -1), last[:, :-1]], dim=1)
    gap = (clock - clock.gather(1, before.clamp(min=0))).masked_fill(before < 0, 1 - LEAST_GAP)
    return torch.log(gap + LEAST_GAP)


@dataclass
class TimeSeriesOutput(ModelOutput):
    """What `RFAForTimeSeries` returns.

    Fields:
        loss: mean negative log likelihood of the seen targets, 0 where none is seen; None without targets.
        location, deviation: of the distribution, `(batch, outputs, channels)`, in the units of the values.
        degrees_of_freedom: of a Student-t distribution, `(batch, outputs, channels)`; None for a Gaussian one.
    """

    loss: Tensor | None = None
    location: Tensor | None = None
    deviation: Tensor | None = None
    degrees_of_freedom: Tensor | None = None

    @property
    def distribution(self) -> Distribution:
        """The distribution of the values at the outputs' times, one for each channel, in their units."""
        return self._distribution(None if readable(self.location) else False)  # vmap has no values to read

    def _distribution(self, checked: bool | None) -> Distribution:
        """The distribution; unchecked ones of numbers that are not finite too, as of a training that diverges."""
        location, deviation = cast(Tensor, self.location), cast(Tensor, self.deviation)
        degrees = self.degrees_of_freedom
        if degrees is None:
            return Normal(location, deviation, validate_args=checked)
        if checked is False:
            lost = degrees.isnan()  # PyTorch checks them in any case
            location, degrees = location.masked_fill(lost, torch.nan), degrees.masked_fill(lost, LEAST_DEGREES)
        return StudentT(degrees, location, deviation, validate_args=checked)


class RFAForTimeSeries(RFAPreTrainedModel):
    """Filters, forecasts and imputes irregular series of several channels.

    A query carries no value: it has its time, and the gap since the reading before it. The decoder is that of the
    language model, so `config.preset` may be any of its presets.
    """

    config_class = RFATimeSeriesConfig
    main_input_name = "values"

    def __init__(self, config: RFATimeSeriesConfig):
        super().__init__(config)
        features = 2 * (config.channels + 1)
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

        Returns:
            A `TimeSeriesOutput`. Its `distribution` is a `torch.distributions` object over `(batch, outputs, channels)`
            in the units of `values`. Its `loss` is the mean negative log likelihood of the seen targets, 0 without any.

        Raises:
            ValueError: for shapes that do not fit, times that do not increase, infinite values, or a row of the batch
                without any reading.
        """
        config = cast(RFATimeSeriesConfig, self.config)
        readings = checked_readings(times, values, config.channels, observed_mask, query_times)
        scale = scale_of_windows(readings.values, config)
        tokens = series_tokens(readings, scale, config.typical_gap, self.embedding.weight.dtype)
        hidden_states = self.run_blocks(self.embedding(tokens.features), tokens.positions)
        index = tokens.of_outputs[..., None].expand(-1, -1, hidden_states.shape[-1])
        raw = self.head(hidden_states.gather(1, index))
        raw = raw.to(torch.promote_types(readings.values.dtype, torch.float32)).unflatten(-1, (-1, config.channels))
        location, spread = (part.to(raw.dtype) for part in scale)
        output = TimeSeriesOutput(
            location=location + spread * raw[..., 0, :],
            deviation=spread * (F.softplus(raw[..., 1, :]) + LEAST_DEVIATION),
            degrees_of_freedom=LEAST_DEGREES + F.softplus(raw[..., 2, :]) if raw.shape[-2] == 3 else None,
        )
        if targets is not None:
            output.loss = self._loss(output, targets, target_mask)
        else:
            require(target_mask is None, "target_mask", "a mask without targets", "targets with it")
        return output

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
        compared = torch.where(seen, targets, cast(Tensor, output.location).detach())
        likelihood = output._distribution(False).log_prob(compared)
        return -torch.where(seen, likelihood, 0.0).sum() / seen.sum().clamp(min=1)
