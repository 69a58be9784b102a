"""The contestants of a recipe of series: networks that are built and trained, filters that know the model."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from rfa.checks import require
from rfa.estimation import LinearSDE, recursive_estimate
from rfa.forecasting.choice import choose
from rfa.forecasting.rolling import Channel, FittedChannel
from rfa.forecasting.scores import forecast_scores
from rfa.forecasting.table import SeriesTable
from rfa.models import PRESETS, RFAForTimeSeries, RFATimeSeriesConfig
from rfa.progress import Progress
from rfa_lab.data.public_series import TableSetting
from rfa_lab.data.simulated_series import SeriesBatch, SimulatedSetting
from rfa_lab.data.unseen_series import UnseenSetting
from rfa_lab.training.series import Draw, SeriesTraining, train_on_series
from rfa_lab.training.series_controls import CONTROLS

# Filters that know the model of a simulated process: Kalman, WoLF, this library's, and one that knows the outliers

_LEAST_VARIANCE = 1e-12


SOFT = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # values of c^2 from which WoLF's is chosen
FILTERS = ("kalman", "wolf", "informed", "robust")


def known_filter(name: str, sde: LinearSDE, batch: SeriesBatch, soft: float = 4.0) -> Normal:
    """What a filter with the true model says of the signal `C x` at each row, from the readings up to and including it.

    It starts at the stationary distribution of the process, or at zero where there is none, as the simulation does.
    Each component has the noise `R / w`, with w by the name:

        kalman      1
        wolf        1 / (1 + e^T R^-1 e / c^2),  e the innovation (Duran-Martin and others, 2024)
        informed    1 / s^2, s the factor by which the error is too large: it knows the outliers
        robust      `recursive_estimate`

    Args:
        name: one of `FILTERS`.
        sde: the true model. R is diagonal.
        batch: the series.
        soft: c^2 of WoLF.
    """
    try:
        covariance = sde.stationary_covariance()
    except ValueError:  # a tracker starts at zero
        covariance = 1e-9 * torch.eye(sde.state_size, dtype=torch.float64)
    start = torch.zeros(sde.state_size, dtype=torch.float64), covariance
    if name == "robust":
        found = recursive_estimate(sde, batch.times, batch.values, initial=start)
        mean, covariance = found.mean, found.covariance
    else:
        mean, covariance = _weighted_filter(name, sde, batch, start, soft)
    row = sde.observation
    variance = (row @ covariance @ row.mT).diagonal(dim1=-2, dim2=-1)
    return Normal(mean @ row.mT, variance.clamp(min=_LEAST_VARIANCE).sqrt())


def _weighted_filter(
    name: str, sde: LinearSDE, batch: SeriesBatch, start: tuple[Tensor, Tensor], soft: float
) -> tuple[Tensor, Tensor]:
    """Mean and covariance at each row, `(batch, rows, ...)`. Readings are whitened by the noise."""
    lags = batch.times.diff(dim=-1)
    transition, variance = sde.transition(lags), sde.covariance(lags)
    deviation = sde.observation_noise.diagonal().sqrt()
    rows = sde.observation / deviation[:, None]
    values, seen = batch.values / deviation, ~batch.values.isnan()
    factors = torch.ones_like(values) if batch.noise is None else batch.noise
    mean = start[0].expand(len(values), -1)
    covariance = start[1].expand(len(values), -1, -1)
    means, covariances = [], []
    for k in range(values.shape[1]):
        if k:
            phi = transition[:, k - 1]
            mean = (phi @ mean[..., None])[..., 0]
            covariance = phi @ covariance @ phi.mT + variance[:, k - 1]
        here = seen[:, k]
        residual = torch.where(here, values[:, k] - mean @ rows.mT, 0.0)
        predicted = rows @ covariance @ rows.mT
        w = torch.where(here, _weights(name, residual, factors[:, k], soft), 0.0)
        root = w.sqrt()  # a missing component has weight 0, and no gain
        innovation = root[..., None] * predicted * root[..., None, :] + torch.eye(len(rows), dtype=torch.float64)
        shown = covariance @ rows.mT * root[..., None, :]
        gain = torch.linalg.solve(innovation, shown, left=False)
        mean = mean + (gain @ (root * residual)[..., None])[..., 0]
        covariance = covariance - gain @ shown.mT
        means.append(mean)
        covariances.append(covariance)
    return torch.stack(means, 1), torch.stack(covariances, 1)


def _weights(name: str, residual: Tensor, factor: Tensor, soft: float) -> Tensor:
    """The weight of each component of a row, from its whitened residual and the true factor of its error."""
    if name == "informed":
        return factor**-2
    if name == "wolf":
        return (1 / (1 + residual.square().sum(-1, keepdim=True) / soft)).expand_as(residual)
    return torch.ones_like(residual)


FITTED = ("level-ar", "chosen")  # filters that are fitted to each series, whose model they do not know


def fitted_filter(name: str, batch: SeriesBatch) -> Normal:
    """What a `RobustFilter` fitted to each series says of the signal at readings, and of the reading at other rows.

    At each row it has the readings up to it, but its parameters are fitted to all. "level-ar" is a level and an
    autoregression. "chosen" are the components that `rfa forecast` takes for the readings, with times that are numbers.
    """
    means, variances = torch.empty_like(batch.values), torch.empty_like(batch.values)
    for k, (times, values) in enumerate(zip(batch.times, batch.values[..., 0].numpy(), strict=True)):
        seen = ~np.isnan(values)
        times = times.where(times.diff(prepend=times[:1] - 1) > 0, times + 1e-9 * torch.arange(len(times)))
        table = SeriesTable(times, torch.as_tensor(values)[:, None], ("value",))
        words = ["level", "ar"]
        if name == "chosen":
            past = Channel(table.rows(seen), values[seen], (times.numpy()[seen], values[seen]))
            query_times = np.maximum(times.numpy()[-1:], past.times[-1:] + table.gap)
            words = choose({"linear": past}, query_times, True, lambda *_: None).words
        channel = Channel(table, values, (times.numpy(), values))
        try:
            fitted = FittedChannel.of(channel, words, True).filter
        except ValueError:  # it cannot be fitted to these readings
            fitted = FittedChannel.of(channel, ["level"], True).filter
        found = fitted.filter()
        noise = np.where(seen, fitted.parameters["sigma2.irregular"], 0.0)
        means[k, :, 0], variances[k, :, 0] = torch.as_tensor(found.mean), torch.as_tensor(found.variance - noise)
    return Normal(means, variances.clamp(min=_LEAST_VARIANCE).sqrt())


# Networks, and the scores of both

Setting = SimulatedSetting | TableSetting | UnseenSetting
Predict = Callable[[Setting, SeriesBatch], Distribution]
Scores = dict[str, dict[str, float | None]]  # by part and name
NETWORKS = (*PRESETS, *CONTROLS)
_TEST_SEED, _VALID_SEED = 20_260_000, 10_260_000  # of the series that all are scored on, and of those for choices
_CHUNK = 64  # series scored at once
_SAMPLE = 256  # series from which a network takes its scales
_AHEAD = 20  # batches


def build_network(name: str, fields: Mapping[str, Any], setting: Setting, seed: int) -> nn.Module:
    """One of `NETWORKS` with new weights, scaled to series of a setting.

    Raises `ValueError` for one that cannot take such series, or fields that its configuration does not have.
    """
    sample = setting.batch(_SAMPLE, torch.Generator().manual_seed(seed))
    series = list(zip(sample.times, sample.values, strict=True))
    torch.manual_seed(seed)
    if name in PRESETS:
        return RFAForTimeSeries(RFATimeSeriesConfig.from_data(series, preset=name, **fields))
    return _control(name, fields, setting, RFATimeSeriesConfig.from_data(series))


def check_network(name: str, fields: Mapping[str, Any], setting: Setting) -> None:
    """Check a network before there are data. Raises as `build_network`, and `TypeError`."""
    if name in PRESETS:
        RFATimeSeriesConfig(preset=name, **fields).build_attention()
    else:
        _control(name, fields, setting, RFATimeSeriesConfig())


def _control(name: str, fields: Mapping[str, Any], setting: Setting, scaled: RFATimeSeriesConfig) -> nn.Module:
    """A control network. It takes the scales of a configuration."""
    if name == "gru-d":
        known = {entry: getattr(scaled, entry) for entry in ("typical_gap", "span", "location", "spread")}
    else:
        expected = "another one: it needs a table, with readings on a grid"
        require(isinstance(setting, TableSetting), "preset", name, expected)
        known = {entry: getattr(setting, entry) for entry in ("seen", "horizon")}
    return CONTROLS[name](scaled.channels, **known, **fields)


def train_network(
    network: nn.Module,
    setting: Setting,
    training: SeriesTraining,
    progress: Progress | None = None,
    checkpoint: Path | None = None,
) -> list[float]:
    """Train in place on series of a setting, or go on from a checkpoint, and return the loss of each step."""
    draw: Draw = setting.batch if isinstance(setting, TableSetting) else _drawn_ahead(setting)
    return train_on_series(network, draw, training, progress, checkpoint)


def _drawn_ahead(setting: SimulatedSetting | UnseenSetting) -> Draw:
    """Batches of a simulation, which are drawn many at a time: its loop over rows costs the same for one."""
    ahead: list[SeriesBatch] = []

    def draw(series: int, generator: torch.Generator) -> SeriesBatch:
        if not ahead:
            drawn = setting.batch(_AHEAD * series, generator)
            ahead.extend(drawn.part(start, start + series) for start in range(0, _AHEAD * series, series))
        return ahead.pop(0)

    return draw


def network_predictor(network: nn.Module) -> Predict:
    """A network's predictions."""
    return lambda _, batch: network(batch.times, batch.values).unchecked()


def filter_predictor(name: str, soft: float = 4.0) -> Predict:
    """The predictions of a filter that is fitted to each series, or has the true model of a simulated process."""
    if name in FITTED:
        return lambda _, batch: fitted_filter(name, batch)
    return lambda setting, batch: known_filter(name, cast(SimulatedSetting, setting).sde, batch, soft)


def best_soft(setting: Setting, series: int) -> float:
    """The c^2 with which WoLF has the least mean squared error on series for choices."""

    def error(soft: float) -> float:
        found = score(filter_predictor("wolf", soft), setting, series, choice=True)
        return sum(math.inf if part["mse"] is None else part["mse"] for part in found.values())

    return min(SOFT, key=error)


def validation_loss(network: nn.Module, setting: Setting, series: int) -> float:
    """The mean negative log likelihood by which learning rates are compared; infinite where it is none."""
    found = score(network_predictor(network), setting, series, choice=True)
    parts = [part["nll"] for part in found.values()]
    return sum(math.inf if nll is None else nll for nll in parts) / len(parts)


def score(predict: Predict, setting: Setting, series: int, choice: bool = False) -> Scores:
    """The scores over so many series of a setting, which are the same for every contestant.

    Those of "filter" are over rows with a reading, those of "forecast" over rows without, where they have targets. With
    `choice` the series are those for choices, not those of the test.
    """
    generator = torch.Generator().manual_seed(_VALID_SEED if choice else _TEST_SEED)
    batch = setting.batch(series, generator, "valid" if choice else "test")
    asked, read = ~batch.targets.isnan(), ~batch.values.isnan().all(-1, keepdim=True)
    rows = {"filter": asked & read, "forecast": asked & ~read}
    sums: dict[str, dict[str, float]] = {name: {} for name, present in rows.items() if bool(present.any())}
    for start in range(0, series, _CHUNK):
        part = batch.part(start, start + _CHUNK)
        with torch.no_grad():
            distribution = predict(setting, part)
        for name, total in sums.items():
            targets = part.targets.to(distribution.mean)
            found = forecast_scores(distribution, targets, rows[name][start : start + _CHUNK])._asdict()
            for key, value in found.items():
                total[key] = total.get(key, 0.0) + value * (1 if key == "targets" else found["targets"])
    return {name: _means(**total) for name, total in sums.items()}


def _means(targets: float, **sums: float) -> dict[str, float | None]:
    """Scores from their sums over targets; None for a network whose answers are not finite."""
    means = {name: value / targets for name, value in sums.items()}
    return {name: value if math.isfinite(value) else None for name, value in means.items()} | {"targets": targets}
