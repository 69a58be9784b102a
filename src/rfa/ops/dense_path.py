"""A kernel's separable path in ordinary autograd code, in any dtype, for where no fused kernel serves."""

import math

import torch
from torch import Tensor

from .fused import FusedPrior, Rotation, Score, Visibility
from .inputs import Weight, row_blocks
from .scores import among_visible, evidence, judged, log_sum, positive

_LN2 = math.log(2)


def path_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation | None,
    prior: FusedPrior,
    visibility: Visibility,
    score: Score,
    gate: bool = True,
    rotate_values: bool = False,
    key_norm: Tensor | None = None,
    decode: bool = False,
) -> tuple[Tensor, Tensor]:
    """The estimate and `log2 sum_j 2^z` of causal rows in the common frame, as `rfa.ops.fused` defines them.

    The interface is a kernel's. Rows are independent: without gradients they are computed in blocks of bounded memory.
    """
    key_path, query_path = prior.key_path, prior.query_path
    known = rotation is None and visibility.causal and score != "dot_product"
    if not known or key_path is None or query_path is None:
        raise NotImplementedError("dense_path: causal rows along a path in the common frame only")
    batch, heads, queries, _ = query.shape
    weight: Weight = "student_t" if score == "student_t" else "exponential"
    coefficient, share, key_noise, floor, query_noise, exponent = (x[:, None, None] for x in prior.scalars.to(query))
    estimates, totals = [], []
    for rows in row_blocks(batch, heads, queries, key.shape[2]):
        visible = visibility.key_times[:, None, :] <= visibility.query_times[:, rows, None]
        if visibility.key_groups is not None and visibility.query_groups is not None:
            visible = visible & (visibility.key_groups[:, None, :] == visibility.query_groups[:, rows, None])
        visible = visible[:, None]
        apart = query_path[..., rows, None] - key_path[..., None, :]
        apart = apart.masked_fill(~visible, 0.0)
        decay = torch.exp(-apart[0]).to(query.dtype)
        lost = -torch.expm1(-2 * apart[0])
        variance = (apart[1] + key_path[1][..., None, :] * lost).to(query.dtype)
        variance = variance + key_noise * decay.square() + floor
        scale = (1 / share, judged(variance, query_noise, weight)) if gate else (1 / share,)
        if prior.key_bias is None:
            bias = -exponent * torch.log2(positive(variance))
        else:
            bias = prior.key_bias.to(query.dtype)[..., None, :] - apart[2].abs().to(query.dtype)
        part = query[:, :, rows]
        residual = part.square().sum(-1)[..., None] + decay.square() * key.square().sum(-1)[..., None, :]
        residual = (residual - 2 * decay * (part @ key.mT)).relu()
        z = bias - coefficient * evidence(residual, scale, weight) / (_LN2 if weight == "student_t" else 1.0)
        z, empty = among_visible(z * _LN2, visible)
        estimates.append((z.softmax(-1) * decay @ value).masked_fill(empty, 0.0))
        totals.append((log_sum(z) / _LN2).masked_fill(empty[..., 0], -torch.inf))
    return torch.cat(estimates, dim=2), torch.cat(totals, dim=2).to(torch.float64)
