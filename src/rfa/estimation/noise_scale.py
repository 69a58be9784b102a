"""The scales of measurement errors: what a prediction says of a row, and how often each scale occurs.

A row's error comes from `N(0, s R)`. The scale s is 1 for most rows and anything above 1 for the others.

Source: Masreliez, Approximate non-Gaussian filtering with linear state and observation relations (1975), with a mixture
of scales for the density of the errors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_SCALES = 18  # multiples of R: 1 and half decades above it; the last grows with the row
_ABOVE = 0.25  # prior probability of a scale above 1
_FALL = 0.6  # of that probability from one scale to the next
_ROWS = 5.0  # that the prior of the scales counts for
_PERSISTENCE = 0.3  # probability that a row has the scale of the row before: errors come in bursts
_VAGUEST = 100.0  # variance, in units of the noise, up to which a vaguer prediction makes a row less certain


class NoiseScale(NamedTuple):
    """What is known of the scales s of a series.

    counts: `(b, scales)`: of rows with each scale so far, and of the prior (the parameter of a Dirichlet distribution).
    last: `(b, scales)`: the probability of each scale for the last row.
    """

    counts: Tensor
    last: Tensor

    @classmethod
    def prior(cls, like: Tensor) -> "NoiseScale":
        """Before any row of series `(b, ...)`."""
        falling = _FALL ** torch.arange(_SCALES - 1, dtype=like.dtype, device=like.device)
        above = _ABOVE * falling / falling.sum()
        probability = torch.cat([1 - above.sum(dim=0, keepdim=True), above]).expand(len(like), -1)
        return cls(_ROWS * probability, probability)

    def expected(self) -> Tensor:
        """The probability of each scale for the next row."""
        learned = self.counts / self.counts.sum(-1, keepdim=True)
        return (1 - _PERSISTENCE) * learned + _PERSISTENCE * self.last

    def typical(self) -> Tensor:
        """The scale of the middle row, `(b,)`: 1 where R is right."""
        share = (self.counts / self.counts.sum(-1, keepdim=True)).detach().cumsum(-1)
        return _scales(share)[(share < 0.5).sum(-1)]

    def seen(self, row: "Judged") -> "NoiseScale":
        """After a row."""
        told = row.told[:, None]
        return NoiseScale(self.counts + row.probability * told, torch.where(told, row.probability, self.last))


class Judged(NamedTuple):
    """What a prediction says of a row. Where it says nothing, the row counts in full.

    weight: w, `(b,)`, in (0, 1]: the row counts as if its noise were R / w.
    gain: `(h + 1) / (h + 1 / w)`, `(b,)`, in (0, 1]: the row's gain, in units of the gain with w = 1.
    scatter: `(b, m, m)`: how far the whitened correction differs between scales.
    probability: `(b, scales)`: of each scale.
    evidence: `(b,)`: the log density of the row, 0 where nothing is said.
    told: `(b,)`: whether there is a row, and a prediction of it.
    """

    weight: Tensor
    gain: Tensor
    scatter: Tensor
    probability: Tensor
    evidence: Tensor
    told: Tensor

    def where(self, condition: Tensor, other: "Judged") -> "Judged":
        """Itself in the series where the condition holds, the other one elsewhere."""
        pairs = zip(self, other, strict=True)
        return Judged(*(torch.where(_wide(condition, mine), mine, theirs) for mine, theirs in pairs))


def weigh(expected: Tensor, missed: Tensor, variance: Tensor, here: Tensor) -> Judged:
    """A row, judged by its innovation e.

        p(s | e) ~ p(s) N(e; 0, H + s I)
        w = sum_s p / (h + s) / sum_s p s / (h + s),    h = tr H / m
        scatter = Cov_s[(H + s I)^-1 e]

    With w the Kalman gain is the mean of the gains over s, exactly where H is a multiple of I. The larger h, the less
    can be said of s. In the limit 1 / w is the mean of all s: a row would count for nothing. So h is capped.

    Args:
        expected: p(s), `(b, scales)`.
        missed: e in units of the noise, `(b, m)`; 0 where a component is missing.
        variance: H, of the prediction of e, `(b, m, m)`; 0 there.
        here: `(b, m)`: which components are seen.
    """
    seen = here.sum(-1).clamp(min=1)
    scale = _scales(missed).expand(len(missed), -1)
    last = torch.maximum(scale[:, -1], missed.square().sum(-1) / seen)  # no row lies beyond it
    scale = torch.cat([scale[:, :-1], last[:, None]], dim=-1)
    noise = torch.diag_embed(torch.where(here[:, None, :], scale[..., None], 1.0))
    variance, factor = _factored(variance, noise)
    correction = torch.cholesky_solve(missed[:, None, :, None].expand(*scale.shape, -1, 1), factor)[..., 0]
    log_density = -(correction * missed[:, None]).sum(-1) / 2 - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    joint = expected.log() + log_density
    probability = torch.softmax(joint, dim=-1)
    spread = variance.diagonal(dim1=-2, dim2=-1).sum(-1) / seen
    capped = spread.clamp(max=_VAGUEST)
    share = probability / (capped[:, None] + scale)
    weight = share.sum(-1) / (share * scale).sum(-1)
    gain = weight * (spread + 1) / (weight * spread + 1)
    apart = correction - (probability[..., None] * correction).sum(1, keepdim=True)
    scatter = (probability[..., None, None] * apart[..., :, None] * apart[..., None, :]).sum(1)
    vague = torch.where(spread > _VAGUEST, capped / torch.where(spread > _VAGUEST, spread, 1.0), 1.0)
    scatter = scatter * vague[:, None, None].square()
    return Judged(weight, gain, scatter, probability, torch.logsumexp(joint, dim=-1), here.any(-1))


def _factored(variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """H, and the Cholesky factors of `H + s I`; where rounding has cost H its sign, without its correlations."""
    factor, failed = torch.linalg.cholesky_ex(variance[:, None] + noise)
    lost = (failed > 0).any(-1)
    if not bool(lost.any()):
        return variance, factor
    alone = torch.diag_embed(variance.diagonal(dim1=-2, dim2=-1).abs())
    variance = torch.where(lost[:, None, None], alone, variance)
    return variance, torch.linalg.cholesky(variance[:, None] + noise)


def _wide(condition: Tensor, like: Tensor) -> Tensor:
    """`(b,)`, with as many dimensions as another."""
    return condition.reshape(-1, *(1,) * (like.dim() - 1))


def _scales(like: Tensor) -> Tensor:
    """Of R, `(scales,)`."""
    return 10.0 ** (torch.arange(_SCALES, dtype=like.dtype, device=like.device) / 2)
