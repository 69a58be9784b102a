"""The Kalman filter of isotropic series, whose gains are scalars."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import accumulated_variance
from rfa.ops.cumulative import linear_scan

from .series import Series

_LEAST, _MOST = 1e-100, 1e100  # of a decay's square and of a precision: their products stay finite


class Filtered(NamedTuple):
    """The Kalman filter at each moment, in the common frame.

    Fields:
        before: precision without what was seen then, `(b, G)`.
        after: precision with it.
        prediction: mean without what was seen then, `(b, G, n)`.
        mean: mean with it.
        log_gain: `log K`, `(b, G)`; 0 where nothing was seen.
        cumulative: the sum of `log (1 - K)` up to it, without the first gain of a diffuse start, which is 1.
    """

    before: Tensor
    after: Tensor
    prediction: Tensor
    mean: Tensor
    log_gain: Tensor
    cumulative: Tensor


def filtered(series: Series) -> Filtered:
    """The filter over all moments of the grid.

    Precisions and gains depend on no data, so only they are found one moment after another; the means follow in a scan.
    """
    grid = series.grid
    kept = torch.exp(-series.model.decay * grid.lags)
    grown = series.forcing * accumulated_variance(series.model.decay, grid.lags)
    steps = list(zip(kept.square().clamp(min=_LEAST).unbind(1), grown.unbind(1), strict=True))
    precision = torch.zeros_like(series.forcing[:, 0]) if series.start is None else 1 / series.start[1]
    before, after = [], []
    for k, own in enumerate(grid.present.to(torch.float64).unbind(1)):
        if k:
            left, forced = steps[k - 1]
            precision = (precision / (left + forced * precision)).clamp(max=_MOST)
        before.append(precision)
        precision = precision + own
        after.append(precision)
    predicted, settled = torch.stack(before, 1), torch.stack(after, 1)
    log_gain = torch.where(grid.present, -torch.log1p(predicted), 0.0)
    counts = grid.present & (predicted > 0)
    log_rest = torch.where(counts, torch.where(counts, predicted, 1.0).log() - torch.log1p(predicted), 0.0)
    gain = torch.where(grid.present, 1 / (1 + predicted), 0.0)
    term = gain[..., None] * series.seen
    initial = torch.zeros_like(series.seen[:, 0]) if series.start is None else series.start[0]
    term = torch.cat([term[:, :1] + ((1 - gain[:, :1]) * initial)[:, None], term[:, 1:]], dim=1)
    mean = linear_scan((F.pad(kept, (1, 0)) * (1 - gain))[:, None], term.mT).mT
    prediction = torch.cat([initial[:, None], kept[..., None] * mean[:, :-1]], dim=1)
    return Filtered(predicted, settled, prediction, mean, log_gain, log_rest.cumsum(-1))
