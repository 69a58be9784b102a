"""Networks that time-series models are compared with: a GRU with decay, DLinear, and forecasts by the season alone.

All take rows as `RFAForTimeSeries` does, and answer with a distribution of the values at each row.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rfa.checks import check_range, require
from rfa.models.series_tokens import WindowScaling, checked_readings, series_tokens, time_frequencies
from rfa.models.time_series import FIRST_DEGREES, LEAST_DEGREES, LEAST_DEVIATION, TimeSeriesOutput
from rfa.nn import NormalLinear


class SeriesControl(nn.Module):
    """A network of this file. Its outputs are Student-t distributions, as those of `RFAForTimeSeries` by default."""

    def sde_parameters(self) -> list[nn.Parameter]:
        """None. The optimiser asks for them."""
        return []


class GatedDecay(SeriesControl):
    """GRU-D: a gated recurrent unit whose state and last values decay over gaps.

        delta   time since the last reading of each channel, in typical gaps
        g_x, g_h = exp(-relu(w_x delta + b_x)), exp(-relu(W_h delta + b_h))
        x^      = m x + (1 - m) (g_x x_last + (1 - g_x) 0)
        h       = GRU([x^, m, log gap, time features], g_h h)

    A row without a reading has an output of its own but leaves the state as it was. Values are scaled as those of
    `RFAForTimeSeries`, by the same window.

    Args:
        channels: of the values.
        hidden_size: of the state. 96 gives as many parameters as two layers of attention with a size of 32.
        typical_gap: the unit of time.
        location, spread: of each channel in the training data, as in `RFATimeSeriesConfig`.
        scaling: "window" or "training", as there.
        span, time_features: as there: so many frequencies whose sine and cosine of the time enter each row.

    Source: Che, Purushotham, Cho, Sontag and Liu, 2018, "Recurrent neural networks for multivariate time series with
    missing values". Added are the gap, because attention has it too, and time features, without which no gate tells
    the phase of a cycle after a gap.
    """

    def __init__(
        self,
        channels: int,
        typical_gap: float,
        location: list[float],
        spread: list[float],
        hidden_size: int = 96,
        scaling: Literal["window", "training"] = "window",
        span: float = 128.0,
        time_features: int = 0,
    ):
        super().__init__()
        check_range("hidden_size", hidden_size, 1, 2**16)
        check_range("time_features", time_features, 0, 2**16)
        require(scaling in ("window", "training"), "scaling", scaling, "'window' or 'training'")
        self.channels, self.typical_gap, self.hidden_size = channels, typical_gap, hidden_size
        self.scaling = WindowScaling(location, spread, scaling)
        self.time_frequencies = time_frequencies(time_features, typical_gap, span)
        self.value_decay = nn.Parameter(torch.full((channels,), 0.1))
        self.value_bias = nn.Parameter(torch.zeros(channels))
        self.state_decay = nn.Linear(channels, hidden_size)
        self.cell = nn.GRUCell(2 * (channels + time_features) + 1, hidden_size)
        self.head = NormalLinear(hidden_size, 3 * channels)

    def forward(
        self, times: Float[Tensor, "batch rows"], values: Float[Tensor, "batch rows channels"]
    ) -> TimeSeriesOutput:
        """The distribution of the values at each row, from the readings up to and including it."""
        readings = checked_readings(times, values, self.channels)
        frequencies = torch.tensor(self.time_frequencies, device=values.device) if self.time_frequencies else None
        dtype = self.head.weight.dtype
        tokens = series_tokens(readings, self.scaling, self.typical_gap, dtype, frequencies=frequencies)
        widths = [self.channels, self.channels, 1, 1, 2 * len(self.time_frequencies)]
        scaled, observed, log_gap, query, phases = tokens.features.split(widths, dim=-1)
        since_first = (times - times[:, :1]).gather(1, tokens.of_readings.argsort(-1))
        clock = since_first.to(scaled.dtype) / self.typical_gap
        state = scaled.new_zeros(len(scaled), self.hidden_size)
        last, last_time = scaled.new_zeros(scaled[:, 0].shape), clock[:, :1].expand(-1, self.channels)
        states = []
        for row in range(scaled.shape[1]):
            delta = clock[:, row, None] - last_time
            kept = torch.exp(-F.relu(self.value_decay * delta + self.value_bias)) * last
            filled = torch.where(observed[:, row] > 0, scaled[:, row], kept)
            decayed = state * torch.exp(-F.relu(self.state_decay(delta)))
            inputs = [filled, observed[:, row], log_gap[:, row], phases[:, row]]
            states.append(self.cell(torch.cat(inputs, dim=-1), decayed))
            is_reading = query[:, row] == 0
            state = torch.where(is_reading, states[-1], state)
            last = torch.where(observed[:, row] > 0, scaled[:, row], last)
            last_time = torch.where(observed[:, row] > 0, clock[:, row, None], last_time)
        index = tokens.of_outputs[..., None]
        hidden = torch.stack(states, dim=1).gather(1, index.expand(-1, -1, self.hidden_size))
        raw = self.head(hidden).to(values.dtype).unflatten(-1, (3, self.channels))
        location, spread = (part.to(raw.dtype) for part in tokens.scale)
        return TimeSeriesOutput(
            location=location + spread * raw[..., 0, :],
            deviation=spread * (F.softplus(raw[..., 1, :]) + LEAST_DEVIATION),
            degrees_of_freedom=LEAST_DEGREES + F.softplus(raw[..., 2, :] + FIRST_DEGREES - LEAST_DEGREES),
        )


class _GridForecast(SeriesControl):
    """A forecast on a regular grid of times 0, 1, 2, ...: its errors have a learned deviation for each step ahead."""

    def __init__(self, channels: int, seen: int, horizon: int):
        super().__init__()
        check_range("seen", seen, 1, 2**16)
        check_range("horizon", horizon, 1, 2**16)
        self.seen, self.horizon = seen, horizon
        self.raw_deviation = nn.Parameter(torch.zeros(horizon, channels))
        self.raw_degrees = nn.Parameter(torch.full((horizon, channels), FIRST_DEGREES - LEAST_DEGREES))

    def forward(
        self, times: Float[Tensor, "batch rows"], values: Float[Tensor, "batch rows channels"]
    ) -> TimeSeriesOutput:
        """The distribution at each row. That of a row that was seen is its reading's, with no meaning."""
        channels = values.shape[-1]
        place = times.round().to(torch.int64)
        require(bool((place == times).all()), "times", "times between whole steps", "0, 1, 2, ...")
        last = int(place.max())
        require(last < self.seen + self.horizon, "times", last, f"at most {self.seen + self.horizon - 1}")
        grid = values.new_full((len(values), self.seen + self.horizon, channels), torch.nan)
        grid = grid.scatter(1, place[..., None].expand(-1, -1, channels), values)
        joined = torch.cat([grid[:, : self.seen].nan_to_num(), self.forecast(grid[:, : self.seen])], dim=1)
        step = (place - self.seen).clamp(min=0)
        deviation = F.softplus(self.raw_deviation)[step] + LEAST_DEVIATION
        return TimeSeriesOutput(
            location=joined.gather(1, place[..., None].expand(-1, -1, channels)),
            deviation=deviation.to(joined.dtype),
            degrees_of_freedom=(LEAST_DEGREES + F.softplus(self.raw_degrees))[step].to(joined.dtype),
        )

    def forecast(self, seen: Float[Tensor, "batch seen channels"]) -> Float[Tensor, "batch horizon channels"]:
        """The values after those seen, which are NaN where nothing was read."""
        raise NotImplementedError


class DLinear(_GridForecast):
    """Two linear maps from the values seen to those ahead: of a moving average, and of what it leaves over.

    Missing values are the last ones seen before them. All channels share the maps.

    Args:
        channels: of the values.
        seen: rows of the grid before the forecasts.
        horizon: rows of the forecasts.
        kernel: rows of the moving average, an odd number.

    Source: Zeng, Chen, Zhang and Xu, 2023, "Are transformers effective for time series forecasting?"
    """

    def __init__(self, channels: int, seen: int, horizon: int, kernel: int = 25):
        super().__init__(channels, seen, horizon)
        require(kernel >= 1 and kernel % 2 == 1, "kernel", kernel, "an odd number")
        self.kernel = kernel
        self.of_average, self.of_rest = nn.Linear(seen, horizon), nn.Linear(seen, horizon)

    def forecast(self, seen: Float[Tensor, "batch seen channels"]) -> Float[Tensor, "batch horizon channels"]:
        """The sum of the two maps."""
        by_channel = _filled(seen).mT.to(self.of_rest.weight.dtype)
        half = self.kernel // 2
        average = F.avg_pool1d(F.pad(by_channel, (half, half), mode="replicate"), self.kernel, stride=1)
        return (self.of_average(average) + self.of_rest(by_channel - average)).mT.to(seen.dtype)


class SeasonalNaive(_GridForecast):
    """The last value seen at the same phase of the season, else the last value. Only the deviations are learned.

    Args:
        channels: of the values.
        seen: rows of the grid before the forecasts.
        horizon: rows of the forecasts.
        period: of the season, in rows.
    """

    def __init__(self, channels: int, seen: int, horizon: int, period: int = 24):
        super().__init__(channels, seen, horizon)
        check_range("period", period, 1, seen)
        self.period = period

    def forecast(self, seen: Float[Tensor, "batch seen channels"]) -> Float[Tensor, "batch horizon channels"]:
        """The last season again and again."""
        filled, last = _filled(seen), torch.full_like(seen[:, : self.period], torch.nan)
        for start in range(self.seen % self.period, self.seen, self.period):
            season = seen[:, start : start + self.period]
            last = torch.where(season.isnan(), last, season)
        last = torch.where(last.isnan(), filled[:, -1:], last)
        return last[:, torch.arange(self.horizon, device=seen.device) % self.period]


class SeasonalMean(_GridForecast):
    """The mean of all values seen at about the same phase of the season, and of the window's mean as one more value.

    It is what the seasonal naive forecast becomes where one value is a noisy witness of its phase. Only the deviations
    are learned.

    Args:
        channels: of the values.
        seen: rows of the grid before the forecasts.
        horizon: rows of the forecasts.
        period: of the season, in rows.
        width: rows before and after the same phase that count as it. 2 is the best of 0 to 3 on ETTh1's training and
            validation windows with 0 to 90 % of the rows dropped.
    """

    def __init__(self, channels: int, seen: int, horizon: int, period: int = 24, width: int = 2):
        super().__init__(channels, seen, horizon)
        check_range("period", period, 1, seen)
        check_range("width", width, 0, period // 2)
        lag = (torch.arange(seen, seen + horizon)[:, None] - torch.arange(seen)) % period
        self.near: Tensor
        self.register_buffer("near", torch.minimum(lag, period - lag) <= width, persistent=False)

    def forecast(self, seen: Float[Tensor, "batch seen channels"]) -> Float[Tensor, "batch horizon channels"]:
        """The mean over the phase, shrunk to the window's."""
        near, known = self.near.to(seen.dtype), (~seen.isnan()).to(seen.dtype)
        mean = seen.nan_to_num().sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
        return (near @ seen.nan_to_num() + mean) / (near @ known + 1)


def _filled(grid: Float[Tensor, "batch rows channels"]) -> Float[Tensor, "batch rows channels"]:
    """Each missing value as the last one before it; before the first one, as that."""
    rows = torch.arange(grid.shape[1], device=grid.device)[None, :, None]
    seen = ~grid.isnan()
    before = torch.where(seen, rows, -1).cummax(dim=1).values
    first = seen.to(torch.int64).argmax(dim=1, keepdim=True)
    return grid.gather(1, torch.where(before < 0, first, before)).nan_to_num()


CONTROLS: Mapping[str, type[SeriesControl]] = MappingProxyType(
    {"gru-d": GatedDecay, "dlinear": DLinear, "seasonal-naive": SeasonalNaive, "seasonal-mean": SeasonalMean}
)
