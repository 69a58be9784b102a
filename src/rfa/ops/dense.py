"""What all computations in ordinary autograd code share: limits of scores, non-finite states, one masked softmax.

A variance is right down to the smallest normal number of its dtype (1.2e-38 in float32, 2.2e-308 in float64). A
smaller one counts as that number and has no gradient. Scores of exponential weights, `r / (nu_s d (Sigma + gamma^2))`,
leave the range of the dtype earlier: there `Sigma + gamma^2` counts as `least_effective_variance` where it is smaller.

A state is not finite where it holds NaN or infinity. The estimates of the queries that see it become NaN, no others.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.checks import exported
from rfa.dynamics import rotate, turn

from .problem import Weight
from .transforms import readable, record, values_at_hand

Phases = tuple[Tensor, Tensor]  # cosine and sine

_SCORES = 2**24  # scores held at once where no gradient needs them: 64 MB in float32


class DenseRows(NamedTuple):
    """Some query rows before their softmax.

    Fields:
        score: logarithm of the weights in nats, `(batch, heads, rows, keys)`, or with more dimensions after the heads.
        visible: `(b, rows, keys)`, True where a query sees a key.
        average: from the normalised weights, shaped as `score`, to the estimate `(batch, heads, rows, channels)`.
        nonfinite: `(batch, heads, rows)`, the rows with a score that is not finite; None if there are none.
        nonfinite_values: `(batch, heads, rows)`, the rows that see such a value; None if `nonfinite` has them.
    """

    score: Tensor
    visible: Tensor
    average: Callable[[Tensor], Tensor]
    nonfinite: Tensor | None = None
    nonfinite_values: Tensor | None = None


def masked_softmax(
    blocks: list[slice], dense_rows: Callable[[slice], DenseRows], log_sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`average(softmax_j(score_ij))` over the visible keys, block of rows by block of rows.

    The estimate is `(batch, heads, queries, channels)`; the log sums, if asked for, are `log sum_j exp(score_ij)`,
    `(batch, heads, ..., queries)`. A row that sees no key gives zeros and -inf, a row that is not finite NaN.
    """
    estimates, sums = [], []
    for rows in blocks:
        score, visible, average, nonfinite, nonfinite_values = dense_rows(rows)
        between = (None,) * (score.dim() - visible.dim())
        visible = visible[(slice(None), *between)]
        # an empty row keeps its scores: a softmax over nothing but -inf is NaN, and so are its gradients
        empty = ~visible.any(-1, keepdim=True)
        score = score.masked_fill(~visible & ~empty, -torch.inf)
        record(score)
        estimate = average(score.softmax(-1))
        unknown = nonfinite if nonfinite_values is None or nonfinite is None else nonfinite | nonfinite_values
        estimates.append(fill_rows(estimate, unknown, empty.flatten(1, -3)))
        if log_sums:
            total = log_sum(score)
            if nonfinite is not None:
                total = total.masked_fill(nonfinite[(slice(None), slice(None), *between[1:])], torch.nan)
            sums.append(total.masked_fill(empty[..., 0], -torch.inf))
    return torch.cat(estimates, dim=2), torch.cat(sums, dim=-1) if log_sums else None


def dropped(weights: Tensor, share: float) -> Tensor:
    """The weights, of which a share becomes 0 and the others grow by `1 / (1 - share)`."""
    return F.dropout(weights, share) if share else weights


def fill_rows(estimate: Tensor, nonfinite: Tensor | None, empty: Tensor) -> Tensor:
    """The estimate with NaN in non-finite rows `(batch, heads, rows)` and zeros in empty ones `(b, 1, rows, 1)`."""
    if nonfinite is not None:
        estimate = estimate.masked_fill(nonfinite[..., None], torch.nan)
    return estimate.masked_fill(empty, 0.0)


def row_blocks(batch: int, heads: int, queries: int, keys: int) -> list[slice]:
    """The query rows to compute at a time: all for autograd, blocks of bounded memory without it.

    A recorded program has all rows in one block: it must serve other lengths too.
    """
    if not readable():
        return [slice(0, queries)]
    rows = queries if torch.is_grad_enabled() else _SCORES // max(1, batch * heads * keys)
    rows = max(1, rows)
    return [slice(start, min(start + rows, queries)) for start in range(0, max(1, queries), rows)]


def least_effective_variance(weight: Weight, dtype: torch.dtype) -> float:
    """The least `Sigma + gamma^2` that residuals are divided by: 2e-24 with exponential weights in float32."""
    tiny = torch.finfo(dtype).tiny
    return tiny if weight == "student_t" else tiny**0.625


def positive(variance: Tensor) -> Tensor:
    """A variance kept away from zero, so that its logarithm is finite."""
    return variance.clamp(min=torch.finfo(variance.dtype).tiny)


def effective_variance(variance: Tensor, query_noise: Tensor, weight: Weight) -> Tensor:
    """`Sigma + gamma^2`, by which residuals are divided; Sigma may be 0."""
    return (variance + query_noise).clamp(min=least_effective_variance(weight, variance.dtype))


def evidence(residual: Tensor, scale: tuple[Tensor, ...], weight: Weight) -> Tensor:
    """`log(1 + r / s)`, or `r / s` of exponential weights, where s is the product of `scale`.

    The gradient of a quotient divides by the square of s, which may be 0. So the quotient is formed with s held
    constant, times each factor's constant over that factor: 1, with the gradient of its reciprocal. Beyond 1e19 in
    float32 the quotient is formed as two factors, each with a logarithm of its own.
    """
    constant = functools.reduce(torch.mul, [factor.detach() for factor in scale])
    one = functools.reduce(torch.mul, [factor.detach() / factor for factor in scale])
    if weight == "exponential":
        return residual / constant * one
    largest = torch.finfo(residual.dtype).max
    ordinary = values_at_hand(residual, constant) and residual.numel()
    if ordinary and residual.detach().max() < largest**0.5 * constant.min():
        return torch.log1p(residual / constant * one)
    ceiling = (largest**0.5 * constant).clamp(max=largest)
    near = torch.minimum(residual, ceiling) / constant * one
    return torch.log1p(near) + torch.log(torch.maximum(residual, ceiling) / ceiling)


def log_weights(
    log_prior: Tensor, evidence: Tensor, robustness: Tensor, inverse_temperature: Tensor, weight: Weight
) -> Tensor:
    """`beta_s L = beta_s (log_prior - (nu_s + 1) evidence)`; with exponential weights `- evidence` (section 3.2).

    `log_prior` is `-log Sigma` by default; `evidence` is that of r against `nu_s d (Sigma + gamma^2)`.
    """
    exponent = robustness + 1 if weight == "student_t" else 1.0
    return inverse_temperature * (log_prior - exponent * evidence)


def log_sum(score: Tensor) -> Tensor:
    """`log sum_j exp(score_j)`. Its gradient is the softmax to all digits.

    PyTorch's gradient is the exponential of a score less the result. Near 1e6 float32 knows that only to 0.06.
    """
    if not score.shape[-1]:
        return score.logsumexp(-1)
    highest = score.detach().amax(-1, keepdim=True)
    return highest[..., 0] + (score - highest).exp().sum(-1).log()


def squared_distance(query: Tensor, key: Tensor, decay: Tensor) -> Tensor:
    """`r = |q|^2 + E^2 |k|^2 - 2 E q.k` of states in the common frame, `(batch, heads, queries, keys)`; 0 or more."""
    squares = query.square().sum(-1)[..., :, None] + decay.square() * key.square().sum(-1)[..., None, :]
    residual = squares - 2 * decay * (query @ key.mT)
    rounded = (residual <= 0) & (squares > 0)  # at distance 0 a gradient would consist of rounding alone
    return residual.masked_fill(rounded, 0.0)


def finite(states: Tensor) -> tuple[Tensor, Tensor]:
    """States with zeros instead of those that are not finite, and which these are, `(batch, heads, length)`.

    A weight of zero times NaN is NaN. So a NaN must not meet the weights of rows that do not see it.
    """
    nonfinite = ~states.isfinite().all(-1)
    return states.masked_fill(nonfinite[..., None], 0.0), nonfinite


class FiniteStates(NamedTuple):
    """Query, key and value `(batch, heads, length, channels)` with zeros instead of those that are not finite.

    The last two fields, `(batch, heads, length)`, are True for a non-finite query, and for a non-finite key or value.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    nonfinite: Tensor
    nonfinite_keys: Tensor

    @classmethod
    def of(cls, *states: Tensor) -> "FiniteStates":
        """The finite states of query, key and value."""
        (query, nonfinite), (key, of_key), (value, of_value) = map(finite, states)
        return cls(query, key, value, nonfinite, of_key | of_value)

    def unknown(self, rows: slice, visible: Tensor) -> Tensor:
        """Which of these queries are not finite or see a key that is not, `(batch, heads, rows)`."""
        return self.nonfinite[:, :, rows] | sees_any(visible, self.nonfinite_keys)


def rotated(states: Tensor, frequency: Tensor, times: Tensor, inverse: bool = False) -> Tensor:
    """`rotate`. A state that is not finite becomes NaN and gives the frequencies no gradient."""
    return of_finite(lambda states: rotate(states, frequency, times, inverse), states)


def turned(states: Tensor, phases: Phases, inverse: bool = False) -> Tensor:
    """`rotated` by known cosine and sine."""
    cos, sin = phases
    return of_finite(lambda states: turn(states, cos, -sin if inverse else sin), states)


def into_frame(
    states: tuple[Tensor, Tensor, Tensor], of_keys: Phases, of_queries: Phases, dtype: torch.dtype, values: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and, with `values`, value turned backwards by the phases at keys and at queries, in a dtype."""
    query, key, value = (x.to(dtype) for x in states)
    query, key = turned(query, of_queries, inverse=True), turned(key, of_keys, inverse=True)
    return query, key, turned(value, of_keys, inverse=True) if values else value


def of_finite(function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """`function(states)`, state by state. A non-finite state becomes NaN, and no gradient goes back through it."""
    if all_finite(states):
        return function(states)
    states, nonfinite = finite(states)
    return function(states).masked_fill(nonfinite[..., None], torch.nan)


def all_finite(states: Tensor) -> bool:
    """Whether all numbers are known to be finite. False where a look at them costs too much."""
    return values_at_hand(states) and bool(states.detach().sum(dtype=torch.float32).isfinite())


def sees_any(visible: Tensor, nonfinite: Tensor) -> Tensor:
    """Which queries see a key that is `nonfinite` `(batch, heads, keys)`; `visible` is `(b, queries, keys)`."""
    seen = visible.to(torch.float32) @ nonfinite.mT.to(torch.float32)  # counted: no mask of every head
    return seen.mT > 0


def linear_scan(factor: Tensor, term: Tensor) -> Tensor:
    """`h_i = factor_i h_{i-1} + term_i` along the last dimension, with `h_{-1} = 0`.

    Pairs of neighbours are joined into one step, the sequence of half the length is solved the same way, and the steps
    in between follow: O(N) work in O(log N) steps, all of them differentiable. Nothing is divided: factors in [0, 1]
    with terms >= 0 lose no digits. The factor broadcasts against the term in all but the last dimension.

    Raises:
        ValueError: in an export: a program would not serve other lengths.
    """
    length = term.shape[-1]
    if exported():  # exporters to ONNX drop PyTorch's guard, and the program would be wrong at other lengths
        raise ValueError("export: got a scan, expected none: it halves the sequence until one token is left")
    if length < 2:
        return term
    pairs = length // 2 * 2
    first, second = factor[..., 0:pairs:2], factor[..., 1:pairs:2]
    odd = linear_scan(second * first, second * term[..., 0:pairs:2] + term[..., 1:pairs:2])
    before = F.pad(odd, (1, 0))[..., : (length + 1) // 2]  # h at the odd index before each even one
    even = factor[..., 0::2] * before + term[..., 0::2]
    joined = torch.stack([even[..., : length // 2], odd], dim=-1).flatten(-2)
    return torch.cat([joined, even[..., -1:]], dim=-1) if length % 2 else joined
