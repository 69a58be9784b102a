"""The operator's forward pass by PyTorch's flex attention, for GPUs that the Triton kernels do not serve."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from rfa.checks import require
from rfa.dynamics import rotation_of_heads
from rfa.ops.dense import turned
from rfa.ops.kernel import HALF_AND_SINGLE
from rfa.ops.positions import Positions, checked_positions
from rfa.ops.prior import UNIT, SeparablePath, lag_tables, separable_path
from rfa.ops.problem import Options, Parameters, Prior, Problem, Weight, validate

_LN2 = math.log(2)
_LEAST_CHANNELS = 16  # of values, as flex attention's kernels need them

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, batch, head, query, key) to a score


def flex_filter_attention(
    query: Float[Tensor, "batch heads queries channels"],
    key: Float[Tensor, "batch heads keys channels"],
    value: Float[Tensor, "batch heads keys value_channels"],
    *,
    decay: Float[Tensor, " heads"],
    frequency: Float[Tensor, "heads modes"],
    process_noise: Float[Tensor, " heads"],
    key_noise: Float[Tensor, " heads"],
    query_noise: Float[Tensor, " heads"],
    noise_floor: Float[Tensor, " heads"],
    robustness: Float[Tensor, " heads"],
    inverse_temperature: Float[Tensor, " heads"],
    key_mask: Bool[Tensor, "batch keys"] | None = None,
    segment_ids: Int[Tensor, "batch keys"] | None = None,
    causal: bool = True,
    weight: Weight = "student_t",
    rotate_values: bool = True,
    prior: Prior = "lyapunov",
    return_log_precision: bool = False,
    attend: Callable[..., Any] = flex_attention,
) -> (
    Float[Tensor, "batch heads queries value_channels"]
    | tuple[Float[Tensor, "batch heads queries value_channels"], Float[Tensor, "batch heads queries"]]
):
    r"""`rfa.robust_filter_attention` at the times 0, 1, 2, ...

    Flex attention computes `s_ij = q~_i.k~_j` of the states in the common frame. A `score_mod` makes of it the score

        r_ij = |q_i|^2 + E^2 |k_j|^2 - 2 E s_ij
        z_ij = beta_s L_ij

    from the norms and from tables of the lag. A softmax has no factor after it, so the decay E joins the score, and two
    log sums correct the result:

        out_i = exp(l'_i - l_i) sum_j softmax_j(z_ij + log E_ij) v~_j
        l_i   = log sum_j exp(z_ij)          l'_i = log sum_j exp(z_ij + log E_ij)

    It costs two calls of flex attention. Compiled, they hold no scores; the mask of blocks is made once, from one
    boolean a pair. Not compiled, they hold all scores.

    States and all parameters have gradients, as autograd takes them through flex attention, where it has any: it
    refuses them on the CPU. They equal the reference's where that refusal is switched off. No GPU has run them yet.

    Args:
        query, key, value: as in `rfa.robust_filter_attention`, in float32, bfloat16 or float16. The computation is in
            float32: states rounded to half precision after the rotation would double the error of the estimate.
        decay, frequency, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature: the same.
        key_mask, segment_ids, causal, weight, rotate_values, prior, return_log_precision: the same.
        attend: flex attention itself; `torch.compile(flex_attention)` on a GPU, where it becomes a fused kernel.

    Returns:
        The filtered values in the query's dtype, and the log precision if it is asked for.

    Raises:
        ValueError: as `rfa.robust_filter_attention`; for float64; or where a gradient is needed on the CPU.

    Source: section 3.2, algorithm 1; flex attention is Dong et al. 2024 (arXiv:2412.05496).
    """
    parameters = Parameters(
        decay, frequency, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature
    )
    options = Options(causal, weight, rotate_values, prior, True, False, return_log_precision)
    validate(query, key, value, parameters, options)
    require(query.dtype in HALF_AND_SINGLE, "query", query.dtype, "float32, bfloat16 or float16")
    _check_gradients(query, key, value, *parameters.tensors().values())
    batch, _, queries, _ = query.shape
    positions = checked_positions(batch, queries, key.shape[2], query.device, None, None, key_mask, segment_ids)
    if not query.numel():  # which flex attention does not take
        empty = value.new_zeros(*query.shape[:-1], value.shape[-1]).to(query.dtype)
        return (empty, query.new_zeros(query.shape[:-1], dtype=torch.float32)) if return_log_precision else empty
    problem = Problem(parameters, positions, options)
    key, value = positions.without_absent(key, value)
    of_keys, of_queries = (rotation_of_heads(frequency, times) for times in positions.times_of_heads())
    dtype = query.dtype
    query, key, value = (states.float() for states in (query, key, value))
    query, key = turned(query, of_queries, inverse=True), turned(key, of_keys, inverse=True)
    if rotate_values:
        value = turned(value, of_keys, inverse=True)
    attend = functools.partial(attend, scale=1.0, block_mask=visible_blocks(batch, positions, causal))
    estimate, log_precision = decayed_attention(attend, query, key, value, filter_scores(query, key, problem))
    if rotate_values:
        estimate = turned(estimate, of_queries)
    return (estimate.to(dtype), log_precision) if return_log_precision else estimate.to(dtype)


def decayed_attention(
    attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, scores: "ScorePair"
) -> tuple[Tensor, Tensor]:
    """The estimate and the log precision of states in the common frame, by two calls of flex attention.

    Args:
        attend: flex attention with its scale of 1 and its mask.
        query, key, value: the states.
        scores: of these states, from `filter_scores`.
    """
    log_sums = AuxRequest(lse=True)
    estimate, decayed = attend(query, key, value, scores.decayed, return_aux=log_sums)
    _, plain = attend(query, key, value[..., :_LEAST_CHANNELS].contiguous(), scores.plain, return_aux=log_sums)
    unseen = plain.lse == -torch.inf
    factor = (decayed.lse - plain.lse).masked_fill(unseen, -torch.inf).exp()
    return (estimate * factor[..., None]).masked_fill(unseen[..., None], 0.0), plain.lse


def _check_gradients(*tensors: Tensor) -> None:
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    needed = on_cpu and torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    expected = "a GPU, or a call under torch.no_grad(): flex attention has no gradient on the CPU"
    require(not needed, "query", "states or parameters on the CPU that need a gradient", expected)


class ScorePair(NamedTuple):
    """The functions that make scores: z, and `z + log E`."""

    plain: Score
    decayed: Score


def filter_scores(query: Tensor, key: Tensor, problem: Problem) -> ScorePair:
    """For states in the common frame. All numbers are buffers that flex attention captures."""
    parameters, positions, options = problem.parameters, problem.positions, problem.options
    keys, first = key.shape[2], key.shape[2] - query.shape[2]
    tables, coefficient, _ = lag_tables(parameters, options, keys)
    decay, prior, inverse_variance = (table.clone() for table in tables)  # compiled, views would lose their gradients
    steps = torch.arange(keys, device=key.device)
    log_decay = (-parameters.decay.double()[:, None] * steps).float()
    query_norm, key_norm = (states.square().sum(-1) for states in (query, key))
    student = options.weight == "student_t"
    path: SeparablePath | None = None
    if options.prior == "riccati" and positions.key_groups is not None:  # a gain depends on the key before
        path = separable_path(problem)

    def residual(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        lag = (i + first - j).abs()
        e = decay[h, lag]
        return lag, (query_norm[b, h, i] + e * e * key_norm[b, h, j] - 2 * e * score).relu()

    def evidence(h: Tensor, lag: Tensor, r: Tensor) -> Tensor:
        w = inverse_variance[h, lag]
        return coefficient[h] * (torch.log2(1 + w * r * UNIT) if student else w * r)

    def by_lag(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        lag, r = residual(score, b, h, i, j)
        return (prior[h, lag] - evidence(h, lag, r)) * _LN2

    if path is None:
        plain = by_lag
    else:
        key_bias, at_keys, at_queries = _riccati_buffers(path, query.shape[0])

        def along_path(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            lag, r = residual(score, b, h, i, j)
            return (key_bias[b, h, j] - (at_queries[b, h, i] - at_keys[b, h, j]).abs() - evidence(h, lag, r)) * _LN2

        plain = along_path

    def decayed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return plain(score, b, h, i, j) + log_decay[h, (i + first - j).abs()]

    return ScorePair(plain, decayed)


def _riccati_buffers(path: SeparablePath, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """The bias of each key and C at keys and at queries, in bits, `(batch, heads, length)` in float32.

    They are copies: a compiled flex attention gives views wrong gradients.
    """
    assert path.key_bias is not None
    bias, at_keys, at_queries = (
        part.float().expand(batch, -1, -1).clone(memory_format=torch.contiguous_format)
        for part in (path.key_bias, path.key_path[2], path.query_path[2])
    )
    return bias, at_keys, at_queries


def visible_blocks(batch: int, positions: Positions, causal: bool) -> Any:
    """Which keys a query sees; None for all."""
    groups = positions.key_groups
    queries, keys = positions.query_times.shape[-1], positions.key_times.shape[-1]
    if groups is None and not causal:
        return None
    first, device = keys - queries, positions.key_times.device
    own = positions.query_groups
    if groups is not None and own is None:
        own = groups.new_zeros(batch, queries)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j <= i + first if causal else j >= 0
        return seen if groups is None or own is None else seen & (groups[b, j] == own[b, i])

    return create_block_mask(visible, None if groups is None else batch, None, queries, keys, device=device)
