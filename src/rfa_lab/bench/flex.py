"""The operator by PyTorch's flex attention: causal, at the times 0, 1, 2, ...

Flex attention computes `s_ij = q~_i.k~_j` of the states in the common frame. A `score_mod` makes of it the score

    r_ij = |q_i|^2 + E^2 |k_j|^2 - 2 E s_ij
    z_ij = beta_s L_ij

from the norms and from tables of the lag. A softmax has no factor after it, so the decay E joins the score, and two log
sums correct the result:

    out_i = exp(l'_i - l_i) sum_j softmax_j(z_ij + log E_ij) v~_j
    l_i   = log sum_j exp(z_ij)          l'_i = log sum_j exp(z_ij + log E_ij)

It costs two calls of flex attention. Compiled, they hold no scores. Source: Dong et al. 2024 (arXiv:2412.05496).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from rfa.ops.prior import UNIT, lag_tables
from rfa.ops.problem import Problem

_LN2 = math.log(2)
_LEAST_CHANNELS = 16  # of values, as flex attention's kernels need them

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, batch, head, query, key) to a score


class ScorePair(NamedTuple):
    """The functions that make scores: z, and `z + log E`."""

    plain: Score
    decayed: Score


def causal_blocks(length: int, device: torch.device) -> Any:
    """Which keys a query sees."""
    return create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device=device)


def decayed_attention(
    attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, scores: ScorePair
) -> Tensor:
    """The estimate of states in the common frame; `attend` is flex attention with its scale of 1 and its mask."""
    log_sums = AuxRequest(lse=True)
    estimate, decayed = attend(query, key, value, scores.decayed, return_aux=log_sums)
    _, plain = attend(query, key, value[..., :_LEAST_CHANNELS].contiguous(), scores.plain, return_aux=log_sums)
    return estimate * (decayed.lse - plain.lse).exp()[..., None]


def filter_scores(query: Tensor, key: Tensor, problem: Problem) -> ScorePair:
    """For states in the common frame. All numbers are buffers that flex attention captures."""
    parameters, keys = problem.parameters, key.shape[2]
    tables, coefficient, _ = lag_tables(parameters, problem.options, keys)
    decay, prior, inverse_variance = (table.clone() for table in tables)  # compiled, views would lose their gradients
    steps = torch.arange(keys, device=key.device)
    log_decay = (-parameters.decay.double()[:, None] * steps).float()
    query_norm, key_norm = (states.square().sum(-1) for states in (query, key))
    student = problem.options.weight == "student_t"

    def plain(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        lag = (i - j).abs()
        e, w = decay[h, lag], inverse_variance[h, lag]
        r = (query_norm[b, h, i] + e * e * key_norm[b, h, j] - 2 * e * score).relu()
        evidence = coefficient[h] * (torch.log2(1 + w * r * UNIT) if student else w * r)
        return (prior[h, lag] - evidence) * _LN2

    def decayed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return plain(score, b, h, i, j) + log_decay[h, (i - j).abs()]

    return ScorePair(plain, decayed)
