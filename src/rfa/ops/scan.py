"""First-order linear recurrences along a sequence, in O(log N) steps."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_scan(factor: Tensor, term: Tensor) -> Tensor:
    """`h_i = factor_i h_{i-1} + term_i` along the last dimension, with `h_{-1} = 0`.

    Pairs of neighbours are joined into one step, the sequence of half the length is solved the same way, and the places
    in between follow: O(N) work in O(log N) steps, all of them differentiable. Nothing is divided, so that factors in
    [0, 1] with terms >= 0 lose no digits.

    Args:
        factor: `(..., length)`; broadcasts against `term` in all but the last dimension.
        term: `(..., length)`.

    Returns:
        `(..., length)`.
    """
    length = term.shape[-1]
    if length < 2:
        return term
    pairs = length // 2 * 2
    first, second = factor[..., 0:pairs:2], factor[..., 1:pairs:2]
    odd = linear_scan(second * first, second * term[..., 0:pairs:2] + term[..., 1:pairs:2])
    before = F.pad(odd, (1, 0))[..., : (length + 1) // 2]  # h at the odd place before each even one
    even = factor[..., 0::2] * before + term[..., 0::2]
    joined = torch.stack([even[..., : length // 2], odd], dim=-1).flatten(-2)
    return torch.cat([joined, even[..., -1:]], dim=-1) if length % 2 else joined
