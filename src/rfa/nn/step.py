"""How far an estimate moves the present state: the gain of appendix E.2."""

import torch
from torch import Tensor


def precision_gain(log_precision: Tensor, query_noise: Tensor, tempering: Tensor) -> Tensor:
    """`G_i = sigmoid(p log s_i + log gamma^2)`, the gain of an innovation that weighs evidence against the query.

    The query counts as a measurement of variance gamma^2, the context as one of precision `s_i^p`: `p = 1` takes the
    transported observations as independent, smaller values discount what they share, and `p -> 0` leaves the
    constant gain `gamma^2 / (1 + gamma^2)`.

    Args:
        log_precision: log s_i, `(batch, heads, queries)`; -inf where a query sees no key.
        query_noise: gamma^2, `(heads,)`, variance.
        tempering: p > 0, `(heads,)`.

    Returns:
        `(batch, heads, queries)` between 0 and 1, in the dtype of `log_precision`; 0 where a query sees no key.

    Source: appendix E.2.
    """
    dtype = log_precision.dtype
    log_noise = query_noise.to(dtype).clamp(min=torch.finfo(dtype).tiny).log()[:, None]
    unseen = log_precision == -torch.inf  # p times that would have no gradient
    score = tempering.to(dtype)[:, None] * log_precision.masked_fill(unseen, 0.0) + log_noise
    return torch.sigmoid(score).masked_fill(unseen, 0.0)
