"""The anisotropic operator of appendix B.1: decay, noises and attention weights of each mode its own; and its layer."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rfa.checks import require
from rfa.dynamics import covariance, decay_kernel
from rfa.nn.attention import Attention, QueryStates
from rfa.nn.cache_layer import FilterLayer
from rfa.nn.dynamics import INVERSE_TEMPERATURE, ROBUSTNESS, HeadDynamics, PositiveParameters, bank
from rfa.nn.projections import HeadStates
from rfa.ops.dense import (
    DenseRows,
    effective_variance,
    evidence,
    finite,
    log_weights,
    masked_softmax,
    positive,
    rotated,
    row_blocks,
    sees_any,
)
from rfa.ops.positions import Positions, checked_positions
from rfa.ops.problem import Options, Parameters, Weight, validate
from rfa.ops.transforms import without_autocast

_NOISES = ("process_noise", "key_noise")  # both, or neither in the zero-noise form
_PER_MODE = ("decay", "frequency", *_NOISES, "query_noise")
_OF_HEADS = ("noise_floor", "robustness", "inverse_temperature")


def tensor_filter_attention(
    query: Float[Tensor, "batch heads queries channels"],
    key: Float[Tensor, "batch heads keys channels"],
    value: Float[Tensor, "batch heads keys channels"],
    *,
    times: Float[Tensor, "*t keys"] | Int[Tensor, "*t keys"] | None = None,
    query_times: Float[Tensor, "*s queries"] | Int[Tensor, "*s queries"] | None = None,
    key_mask: Bool[Tensor, "batch keys"] | None = None,
    segment_ids: Int[Tensor, "batch keys"] | None = None,
    causal: bool = True,
    weight: Weight = "student_t",
    rotate_values: bool = True,
    return_log_precision: bool = False,
    **parameters: Float[Tensor, "heads ..."],
) -> (
    Float[Tensor, "batch heads queries channels"]
    | tuple[Float[Tensor, "batch heads queries channels"], Float[Tensor, "batch heads queries modes"]]
):
    r"""Robust filter attention with decay, noises and weights of each mode its own.

    For one head and the lag `tau = t_i - t_j` (`|tau|` when not causal), with d complex modes k:

        E[k]     = exp(-mu_k tau)
        Sigma[k] = sigma_k^2 phi_k(tau) + eta_k^2 E[k]^2 + sigma_0^2
        D2_ij    = sum_k |q_i[k] - exp((-mu_k + i omega_k) tau) k_j[k]|^2 / (Sigma[k] + gamma_k^2)
        L_ij[k]  = -log Sigma[k] - (nu_s + 1) log(1 + D2_ij / (nu_s d))
        A[k]     = softmax_j(beta_s L[k])
        out_i[k] = sum_j A_ij[k] exp((-mu_k + i omega_k) tau) v_j[k]

    The modes share one distance, but each has its own weights. Where the modes of a head agree this is
    `robust_filter_attention`, which costs d times less: use that where one decay a head is enough.

    The decay is formed for each pair of times. The stationary frame would split it into `exp(-mu t_i) exp(mu t_j)`,
    which overflows (appendix B.2; measured in docs/record/experiments.md).

    Time is `O(N^2 d)`. So is memory where gradients are enabled: fourteen numbers are kept for each mode of each pair
    of a query and a key (4 GB in float32 for one head of 32 modes and 1,500 tokens). Without gradients rows are
    computed in blocks of bounded memory.

    Without `process_noise` and `key_noise` both are 0. This is the zero-noise form (appendix B.2.3), of which xPos is a
    limit: Sigma is constant, so the modes of a head have the same weights.

    Args:
        query, key, value: `(batch, heads, length, 2 d)`; real parts first, then imaginary parts. Values have as many
            channels, whether they rotate or not: each mode has its own weights.
        times, query_times, key_mask, segment_ids, causal, rotate_values: as of `robust_filter_attention`. Query times
            that are later than every key are a forecast.
        weight: "student_t", the L of the formula, or "exponential", `L[k] = -log Sigma[k] - D2 / (nu_s d)`.
        return_log_precision: also return `log s_i[k] = log sum_j exp(beta_s L_ij[k])`, one for each mode.
        **parameters: `decay`, `frequency`, `process_noise`, `key_noise` and `query_noise`, `(heads, modes)`;
            `noise_floor`, `robustness` and `inverse_temperature`, `(heads,)`. All with the units and bounds of
            `robust_filter_attention`.

    Returns:
        The filtered values `(batch, heads, queries, 2 d)`, before the innovation step, in the query's dtype; and
        the log precisions `(batch, heads, queries, modes)`, in float32 or float64. Half precisions accumulate in
        float32, float64 stays float64. A query that sees no key gets zeros and log precisions of -inf.

    Raises:
        ValueError: naming the argument, what was given and what was expected. Under `torch.compile` shapes, dtypes and
            devices are checked, values are not. Values that `torch.vmap` has batched are not checked either.
        TypeError: for parameters of other names.

    Source: appendix B.1, with the robust weight and temperature of section 3.2, so that agreeing modes give that one.
    """
    expected = {*_PER_MODE, *_OF_HEADS}
    if parameters.keys() not in (expected, expected - {*_NOISES}):
        raise TypeError(f"parameters: got {sorted(parameters)}, expected {sorted(expected)}")
    given = _with_noises(parameters)
    options = Options(causal, weight, rotate_values, "lyapunov", True, False, return_log_precision)
    anywhere = options._replace(rotate_values=False)  # the width of the values is checked below, for another reason
    validate(query, key, value, given, anywhere, _PER_MODE)
    batch, _, queries, channels = query.shape
    positions = checked_positions(batch, queries, key.shape[2], query.device, times, query_times, key_mask, segment_ids)
    if value.shape[-1] != channels:
        raise ValueError(
            f"value: got {value.shape[-1]} channels, expected {channels}, the query's: each mode has weights of its own"
        )
    return _located(positions, query, key, value, given, options)


def _with_noises(given: dict[str, Tensor]) -> Parameters:
    """The parameters, with zeros for both noises where they are not given."""
    zeros = {} if _NOISES[0] in given else dict.fromkeys(_NOISES, torch.zeros_like(given["decay"]))
    return Parameters(**given, **zeros)  # type: ignore[arg-type]


def _located(
    positions: Positions, query: Tensor, key: Tensor, value: Tensor, given: Parameters, options: Options
) -> Any:
    """`tensor_filter_attention` of arguments that are checked already."""
    batch, heads, queries, channels = query.shape
    rotate_values, return_log_precision = options.rotate_values, options.log_precision
    dtype = torch.promote_types(query.dtype, torch.float32)
    frequency = given.frequency  # stays in its own dtype: phases are formed before rounding
    key, value = positions.without_absent(key, value)
    with without_autocast(query):
        query_frame = rotated(query.to(dtype), frequency, positions.query_times, inverse=True)
        key_frame = rotated(key.to(dtype), frequency, positions.key_times, inverse=True)
        value_frame = value.to(dtype)
        if rotate_values:
            value_frame = rotated(value_frame, frequency, positions.key_times, inverse=True)
        states, nonfinite = zip(*map(finite, (query_frame, key_frame, value_frame)), strict=True)
        by_mode = tuple(x.unflatten(-1, (2, channels // 2)).permute(0, 1, 4, 2, 3) for x in states)

        def dense_rows(rows: slice) -> DenseRows:
            rows_alone = (by_mode[0][..., rows, :], *by_mode[1:])
            unknown = (nonfinite[0][..., rows], *nonfinite[1:])
            return _rows(rows_alone, unknown, given.to(dtype), positions.rows(rows), options)

        blocks = row_blocks(batch, heads * channels // 2, queries, key.shape[2])
        estimate, log_sums = masked_softmax(blocks, dense_rows, return_log_precision)
        if rotate_values:
            estimate = rotated(estimate, frequency, positions.query_times)
    estimate = estimate.to(query.dtype)
    if log_sums is None:
        return estimate
    return estimate, log_sums.mT.expand(batch, heads, queries, channels // 2)


def _rows(
    states: tuple[Tensor, ...],
    nonfinite: tuple[Tensor, ...],
    parameters: Parameters,
    positions: Positions,
    options: Options,
) -> DenseRows:
    """Scores `(batch, heads, modes, queries, keys)` of some rows, from states `(batch, heads, modes, length, 2)`."""
    query, key, value = states
    modes = query.shape[2]
    rate, process_noise, key_noise, query_noise = (
        x[..., None, None]
        for x in (parameters.decay, parameters.process_noise, parameters.key_noise, parameters.query_noise)
    )
    noise_floor, robustness, inverse_temperature = (
        x[:, None, None, None] for x in (parameters.noise_floor, parameters.robustness, parameters.inverse_temperature)
    )
    visible = positions.visible(options.causal)
    lag = (positions.query_times[:, :, None] - positions.key_times[:, None, :]).abs()
    lag = lag.masked_fill(~visible, 0.0)[:, None, None].to(query.dtype)

    decay = decay_kernel(rate, lag)
    variance = covariance(rate, process_noise, key_noise, noise_floor, lag)
    real, imaginary = (query[..., :, None, part] - decay * key[..., None, :, part] for part in (0, 1))
    total = effective_variance(variance, query_noise, options.weight)
    constant = total.detach()  # as in `evidence`, with the least of the modes' variances as its scale
    least = constant.amin(2, keepdim=True)
    scaled = (real.square() + imaginary.square()) * (least / constant) * (constant / total)
    weighed = evidence(scaled.sum(2, keepdim=True), (robustness * modes, least), options.weight)
    log_prior = -torch.log(positive(variance))
    return DenseRows(
        log_weights(log_prior, weighed, robustness, inverse_temperature, options.weight),
        visible,
        lambda weights: (weights * decay @ value).permute(0, 1, 3, 4, 2).flatten(-2),
        nonfinite[0] | sees_any(visible, nonfinite[1]),
        sees_any(visible, nonfinite[2]),
    )


class TensorFilterAttention(Attention):
    """The anisotropic operator between projections: each mode learns noises of its own (appendix B.1).

    Memory is `O(N^2 d)`, as of `tensor_filter_attention`. There is no cache and no fused kernel.

    Args:
        hidden_size: d_model.
        num_heads: H.
        frequency, decay: `(heads, modes)`, and `(heads, modes)` or `(heads,)`, as of `rfa.nn.RobustFilterAttention`.
        noise: whether keys have a process noise and a measurement noise; False for the form of appendix B.2.3.
        weight, rotate_values, innovation, steady_state: as of `rfa.nn.RobustFilterAttention`.
        tie_key_value, causal, normalise_states: of every layer; see `rfa.nn.Attention`.

    Raises:
        ValueError: if sizes or options do not fit together.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        frequency: Float[Tensor, "heads modes"] | None = None,
        decay: Float[Tensor, "heads ..."] | None = None,
        noise: bool = True,
        weight: Weight = "student_t",
        rotate_values: bool = True,
        innovation: bool = True,
        steady_state: float = 0.1,
        **options: Any,
    ):
        known = {"tie_key_value", "causal", "normalise_states"}
        for name in options.keys() - known:
            require(False, name, options[name], f"options among {', '.join(sorted(known))}")
        super().__init__(hidden_size, num_heads, innovation, backend="reference", certified=None, **options)
        frequency, decay = bank(num_heads, self.modes, frequency, decay)
        rates = (decay if decay.dim() == 2 else decay[:, None]).expand(frequency.shape)
        single = frequency.reshape(-1, 1), rates.reshape(-1)  # each mode as a head of its own
        self.mode_dynamics = HeadDynamics(*single, steady_state=steady_state, robust=False)
        if not noise:
            del self.mode_dynamics.raw_process_noise, self.mode_dynamics.raw_key_noise
        self.weighing = PositiveParameters()
        each = torch.ones(num_heads, dtype=frequency.dtype, device=frequency.device)
        for name, value in (("robustness", ROBUSTNESS), ("inverse_temperature", INVERSE_TEMPERATURE)):
            self.weighing.hold(name, value * each)
        self.options = Options(self.causal, weight, rotate_values, "lyapunov", True, False, False)

    def estimate(
        self,
        query: QueryStates,
        key: HeadStates,
        value: HeadStates,
        *,
        positions: Positions,
    ) -> QueryStates:
        """The operator under the layer's dynamics."""
        given = {name: x.reshape(self.num_heads, -1) for name, x in self.mode_dynamics().items()}
        given |= {"noise_floor": given["noise_floor"][:, 0], **self.weighing.positive(query.dtype)}
        return _located(positions, query, key, value, _with_noises(given), self.options)  # type: ignore[no-any-return]

    def estimate_with_cache(
        self, query: HeadStates, key: HeadStates, value: HeadStates, cached: FilterLayer, *, positions: Positions
    ) -> HeadStates:
        """Raise `ValueError`: there is no cache of this layer."""
        raise ValueError("past_key_values: got a cache, expected None: TensorFilterAttention has none")
