"""The scale of each measurement error: what an innovation says of it, and how often each scale occurs.

The error of a row comes from `N(0, s R)`. The scale s is 1 for most rows and larger for outliers. With e the innovation
in units of the noise, H the covariance of its prediction, and `h = tr H / m`:

    p(s | e) ~ p(s) N(e; 0, H + s I)
    w = sum_s p(s | e) / (h + s) / sum_s p(s | e) s / (h + s)
    scatter = Cov_s[(H + s I)^-1 e]

Source: Masreliez, Approximate non-Gaussian filtering with linear state and observation relations (1975), with a mixture
of scales for the density of the errors.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_SCALES = 18  # multiples of R: 1, and half decades above it. The last one grows with the row.
_ABOVE = 0.25  # prior probability of a scale above 1
_FALL = 0.6  # factor of that probability from one scale to the next
_PRIOR_ROWS = 5.0  # number of rows that the prior of the scales counts for
_PERSISTENCE = 0.3  # probability that a row has the scale of the row before: errors come in bursts
_LARGEST_VARIANCE = 100.0  # h, in units of the noise, above which less certain predictions no longer lower w


class NoiseScale(NamedTuple):
    """What is known of the scales s of a series.

    Args:
        counts: `(b, scales)`: rows with each scale so far, and the prior's (the parameter of a Dirichlet distribution).
        last: `(b, scales)`: the probability of each scale for the last row.
    """

    counts: Float[Tensor, "b scales"]
    last: Float[Tensor, "b scales"]

    @classmethod
    def prior(cls, like: Float[Tensor, "b ..."]) -> "NoiseScale":
        """Before the first row, for as many series as `like` has."""
        falling = _FALL ** torch.arange(_SCALES - 1, dtype=like.dtype, device=like.device)
        above = _ABOVE * falling / falling.sum()
        probability = torch.cat([1 - above.sum(dim=0, keepdim=True), above]).expand(len(like), -1)
        return cls(_PRIOR_ROWS * probability, probability)

    def expected(self) -> Float[Tensor, "b scales"]:
        """The probability of each scale for the next row."""
        learned = self.counts / self.counts.sum(-1, keepdim=True)
        return (1 - _PERSISTENCE) * learned + _PERSISTENCE * self.last

    def median(self) -> Float[Tensor, " b"]:
        """The median scale of the rows. It is 1 where R is right."""
        cumulative = (self.counts / self.counts.sum(-1, keepdim=True)).detach().cumsum(-1)
        return _scales(cumulative)[(cumulative < 0.5).sum(-1)]

    def updated(self, row: "ScalePosterior") -> "NoiseScale":
        """After a row."""
        valid = row.valid[:, None]
        return NoiseScale(self.counts + row.probability * valid, torch.where(valid, row.probability, self.last))


class ScalePosterior(NamedTuple):
    """What the innovation of one row says of its scale. Where there is no prediction, the row has weight 1.

    Args:
        weight: w, `(b,)`, in (0, 1]. The row counts as if its noise were R / w.
        gain_ratio: `(h + 1) / (h + 1 / w)`, `(b,)`, in (0, 1]: the row's gain over the gain with w = 1.
        scatter: `(b, m, m)`: the covariance between scales of the whitened correction.
        probability: `(b, scales)`: of each scale.
        log_evidence: `(b,)`: the log density of the row, 0 without a prediction.
        valid: `(b,)`: whether there is a row and a prediction of it.
    """

    weight: Float[Tensor, " b"]
    gain_ratio: Float[Tensor, " b"]
    scatter: Float[Tensor, "b m m"]
    probability: Float[Tensor, "b scales"]
    log_evidence: Float[Tensor, " b"]
    valid: Bool[Tensor, " b"]

    def where(self, condition: Bool[Tensor, " b"], other: "ScalePosterior") -> "ScalePosterior":
        """Itself in the series where the condition holds, the other one elsewhere."""
        pairs = zip(self, other, strict=True)
        return ScalePosterior(
            *(torch.where(condition.reshape(-1, *(1,) * (mine.dim() - 1)), mine, theirs) for mine, theirs in pairs)
        )

    def selected(self, series: Tensor) -> "ScalePosterior":
        """Of some series by their index."""
        return ScalePosterior(*(x[series] for x in self))


def infer_scale(
    expected: Float[Tensor, "b scales"],
    innovation: Float[Tensor, "b m"],
    variance: Float[Tensor, "b m m"],
    present: Bool[Tensor, "b m"],
) -> ScalePosterior:
    """The posterior of the scale of one row, by the equations of this file.

    With w the Kalman gain is the mean of the gains over s. This is exact where H is a multiple of I. The larger h, the
    less the row says of s. In the limit 1 / w would be the mean of all s, and the row would count for nothing. So h is
    bounded.

    Args:
        expected: p(s).
        innovation: e in units of the noise, 0 where a component is missing.
        variance: H, the covariance of the prediction of e, 0 where a component is missing.
        present: which components are observed.
    """
    observed = present.sum(-1).clamp(min=1)
    scale = _scales(innovation).expand(len(innovation), -1)
    last = torch.maximum(scale[:, -1], innovation.square().sum(-1) / observed)  # so that no row lies above all scales
    scale = torch.cat([scale[:, :-1], last[:, None]], dim=-1)
    noise = torch.diag_embed(torch.where(present[:, None, :], scale[..., None], 1.0))
    variance, factor = _cholesky_factors(variance, noise)
    correction = torch.cholesky_solve(innovation[:, None, :, None].expand(*scale.shape, -1, 1), factor)[..., 0]
    log_density = -(correction * innovation[:, None]).sum(-1) / 2 - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    joint = expected.log() + log_density
    probability = torch.softmax(joint, dim=-1)
    mean_variance = variance.diagonal(dim1=-2, dim2=-1).sum(-1) / observed
    bounded = mean_variance.clamp(max=_LARGEST_VARIANCE)
    ratio = probability / (bounded[:, None] + scale)
    weight = ratio.sum(-1) / (ratio * scale).sum(-1)
    gain_ratio = weight * (mean_variance + 1) / (weight * mean_variance + 1)
    deviation = correction - (probability[..., None] * correction).sum(1, keepdim=True)
    scatter = (probability[..., None, None] * deviation[..., :, None] * deviation[..., None, :]).sum(1)
    large = mean_variance > _LARGEST_VARIANCE
    reduction = torch.where(large, bounded / torch.where(large, mean_variance, 1.0), 1.0)
    scatter = scatter * reduction[:, None, None].square()
    return ScalePosterior(weight, gain_ratio, scatter, probability, torch.logsumexp(joint, dim=-1), present.any(-1))


def _cholesky_factors(variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """H and the Cholesky factors of `H + s I`. Where rounding makes that indefinite, H loses its correlations."""
    factor, failed = torch.linalg.cholesky_ex(variance[:, None] + noise)
    indefinite = (failed > 0).any(-1)
    if not bool(indefinite.any()):
        return variance, factor
    diagonal = torch.diag_embed(variance.diagonal(dim1=-2, dim2=-1).abs())
    variance = torch.where(indefinite[:, None, None], diagonal, variance)
    return variance, torch.linalg.cholesky(variance[:, None] + noise)


def _scales(like: Tensor) -> Float[Tensor, " scales"]:
    """The scales s, multiples of R."""
    return 10.0 ** (torch.arange(_SCALES, dtype=like.dtype, device=like.device) / 2)
