"""Training on drawn series: against a bare loop, and what is refused."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rfa.training.series import SeriesBatch, SeriesTraining, series_loss, train_on_series
from rfa.training.trainer import one_cycle


class Line(nn.Module):
    """Says `a value + b` at readings, and `a time + b` of forecasts."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(x)) for x in (0.5, -0.1))

    def head_dynamics(self):
        return {}

    def forward(self, times, values, query_times=None, targets=None):
        found = self.a * (values if query_times is None else query_times[..., None]) + self.b
        seen = ~targets.isnan()
        return SimpleNamespace(loss=(found - torch.where(seen, targets, 0.0))[seen].square().mean())


def draw(series, generator):
    times = torch.rand(series, 5, generator=generator).cumsum(-1)
    values = torch.randn(series, 5, 1, generator=generator)
    ahead = times[:, -1:] + torch.rand(series, 2, generator=generator)
    targets = 2 * values + 1
    targets[:, 0] = math.nan
    return SeriesBatch(times, values, targets, ahead, 2 * ahead[..., None] + 1)


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
        at = bare(batch.times, batch.values, targets=batch.targets).loss
        ahead = bare(batch.times, batch.values, query_times=batch.query_times, targets=batch.future).loss
        optimizer.zero_grad()
        ((at + ahead) / 2).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        expected.append(((at + ahead) / 2).item())
    assert losses == pytest.approx(expected, rel=1e-5)  # float32: the learning rate is rounded in another order
    assert (model.a.item(), model.b.item()) == pytest.approx((2.0, 1.0), abs=0.01)
    assert seen[-1] == (steps, steps)


def test_targets_that_are_all_missing_do_not_count():
    batch = draw(3, torch.Generator().manual_seed(0))
    nothing = torch.full_like(batch.targets, math.nan)
    model = Line()
    alone = model(batch.times, batch.values, query_times=batch.query_times, targets=batch.future).loss
    assert series_loss(model, batch._replace(targets=nothing)).item() == alone.item()


def test_a_loss_that_is_not_finite_ends_the_run():
    model = Line()
    model.a.data.fill_(math.inf)
    with pytest.raises(RuntimeError, match=r"^training: got a loss of .* in step 1"):
        train_on_series(model, draw, SeriesTraining(steps=3))


@pytest.mark.parametrize("given", [{"steps": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"seed": -1}], ids=str)
def test_bad_numbers(given):
    with pytest.raises(ValueError, match=rf"^{next(iter(given))}: got"):
        SeriesTraining(**given)
