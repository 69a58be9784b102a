"""Training on drawn series: against a bare loop, and what is refused."""

import math

import pytest
import torch
from torch import nn

from rfa.models.time_series import TimeSeriesOutput
from rfa_lab.data.simulated_series import SeriesBatch
from rfa_lab.training.callbacks import Diverged
from rfa_lab.training.series import SeriesTraining, series_loss, train_on_series
from rfa_lab.training.trainer import one_cycle


class Line(nn.Module):
    """Says `a value + b` at readings, and `a time + b` of forecasts."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(x)) for x in (0.5, -0.1))

    def sde_parameters(self):
        return {}

    def forward(self, times, values):
        found = self.a * torch.where(values.isnan(), times[..., None], values) + self.b
        return TimeSeriesOutput(location=found, deviation=torch.full_like(found, 0.5))


def draw(series, generator):
    times = torch.rand(series, 7, generator=generator).cumsum(-1)
    values = torch.randn(series, 7, 1, generator=generator)
    values[:, 5:] = math.nan
    targets = 2 * torch.where(values.isnan(), times[..., None], values) + 1
    targets[:, 0] = math.nan
    return SeriesBatch(times, values, targets)


def bare_loss(model, batch):
    error = (batch.targets - model(batch.times, batch.values).distribution.mean) / 0.5
    parts = error[:, 1:5], error[:, 5:]
    return sum(part.square().mean() for part in parts) / 4 + math.log(0.5 * math.sqrt(2 * math.pi))


def test_a_run_is_a_bare_loop_and_learns():
    model, bare, steps = Line(), Line(), 200
    seen = []
    losses = train_on_series(
        model, draw, SeriesTraining(steps=steps, batch_size=4, learning_rate=0.1), lambda *x: seen.append(x)
    )
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(bare.parameters(), betas=(0.9, 0.999))
    expected = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * one_cycle(step, steps)
        batch = draw(4, generator)
        loss = bare_loss(bare, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)  # float32: the learning rate is rounded in another order
    assert (model.a.item(), model.b.item()) == pytest.approx((2.0, 1.0), abs=0.01)
    assert seen[-1] == (steps, steps)


def test_rows_without_targets_do_not_count():
    batch = draw(3, torch.Generator().manual_seed(0))
    targets, model = batch.targets.clone(), Line()
    targets[:, :5] = math.nan
    error = (batch.targets - model(batch.times, batch.values).distribution.mean)[:, 5:] / 0.5
    alone = error.square().mean() / 2 + math.log(0.5 * math.sqrt(2 * math.pi))
    assert series_loss(model, batch._replace(targets=targets)).item() == pytest.approx(alone.item(), rel=1e-6)
    with pytest.raises(ValueError, match=r"^targets: got 'none that is known'"):
        series_loss(model, batch._replace(targets=torch.full_like(targets, math.nan)))


def test_a_loss_that_is_not_finite_ends_the_run():
    model = Line()
    model.a.data.fill_(math.inf)
    with pytest.raises(ValueError, match=r"^training: got a loss of .* in step 1"):
        train_on_series(model, draw, SeriesTraining(steps=3))


def test_weights_that_are_not_finite_after_the_last_step_end_the_run():
    """Its loss is still that before the step."""
    model = Line()
    model.a.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(Diverged, match=r"^training: got weights that are not finite after step 1, "):
        train_on_series(model, draw, SeriesTraining(steps=1))


@pytest.mark.parametrize("given", [{"steps": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"seed": -1}], ids=str)
def test_bad_numbers(given):
    with pytest.raises(ValueError, match=rf"^{next(iter(given))}: got"):
        SeriesTraining(**given)
