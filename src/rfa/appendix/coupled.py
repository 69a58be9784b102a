"""Cross-attention of two coupled processes (appendix E.4). It is dense: its terms do not separate by query and key."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rfa.checks import check_choice, require
from rfa.dynamics import accumulated_variance, cross_transport, decay_kernel, time_dtype
from rfa.nn.cache import locate_tokens
from rfa.nn.checks import check_frequencies, check_rates, check_sizes, check_states
from rfa.nn.dynamics import (
    INVERSE_TEMPERATURE,
    KEY_NOISE,
    NOISE_FLOOR,
    QUERY_NOISE,
    ROBUSTNESS,
    SMALLEST,
    PositiveParameters,
    bank,
)
from rfa.nn.projections import NormalLinear, complex_deviation, finite_where_absent, merge_heads, split_heads
from rfa.ops.dense import DenseRows, effective_variance, evidence, log_weights, masked_softmax, positive, row_blocks
from rfa.ops.positions import times_dtype
from rfa.ops.problem import Weight
from rfa.ops.transforms import without_autocast


class Process(NamedTuple):
    """One of the two: `(heads,)`, `frequency` `(heads, modes)`."""

    decay: Tensor
    frequency: Tensor
    process_noise: Tensor
    key_noise: Tensor
    prior_variance: Tensor  # of its state before it has been observed; the mean is zero


class PredictionWeights(NamedTuple):
    """gamma^2, sigma_0^2, nu_s and beta_s, by which predictions are weighed, `(heads,)` each."""

    query_noise: Tensor
    noise_floor: Tensor
    robustness: Tensor
    inverse_temperature: Tensor


class Observations(NamedTuple):
    """Keys and values `(batch, heads, length, 2 d)`, times `(b, length)`, True where they take part, or None."""

    key: Tensor
    value: Tensor
    times: Tensor
    mask: Tensor | None


def coupled_filter_attention(
    query: Tensor,
    target: Observations,
    auxiliary: Observations,
    *,
    target_process: Process,
    auxiliary_process: Process,
    coupling: Tensor,
    prediction_weights: PredictionWeights,
    weight: Weight = "student_t",
) -> Tensor:
    """Estimates of the target at its own times from all auxiliary observations at or before them.

    With `dx = A_x x dt + b y dt + noise`, `dy = A_y y dt + noise` and the lag `tau = t_i - s_j >= 0`, per mode:

        k_ij  = e^(lambda_x tau) x_j + lambda_xy(tau) y_j,     lambda_xy = b cross_transport(tau)
        Sigma = e^(-2 mu_x tau) P_j + sigma_x^2 phi_x(tau) + |lambda_xy|^2 (eta_y^2 + sigma_y^2 phi_y(tau)) + sigma_0^2
        L_ij  = -log Sigma - (nu_s + 1) log(1 + |q_i - k_ij|^2 / (nu_s d (Sigma + gamma^2)))
        out_i = sum_j softmax_j(beta_s L_ij) (e^(lambda_x tau) v^x_j + lambda_xy(tau) v^y_j)

    The paper observes both processes at the same times. Here `x_j`, the target at the time of source j, is its last
    observation m at or before that time, transported over the gap `g = s_j - t_m` by the same dynamics:
    `x_j = e^(lambda_x g) x_m + lambda_xy(g) y(t_m)`. There `y(t_m)` is the last auxiliary observation at or before
    `t_m`, transported by `lambda_y`. `P_j` is Sigma of that prediction without its floor, `eta_x^2` where the gap is
    zero. A state that has not been observed yet has mean zero and the process's `prior_variance`. Where both sequences
    have the same times this is the paper's formula. On noiseless data every prediction from observed pairs is exact,
    for any times.

    `|lambda_xy|^2` in a variance is its mean over the modes of a head. All modes have the same value, as in the paper,
    where the two processes share their frequencies.

    Args:
        query: `(batch, heads, queries, 2 d)`, at the target's times.
        target: its own observations, one a query.
        auxiliary: the observations that are attended to.
        target_process, auxiliary_process: decay, frequencies and noises.
        coupling: b, `(heads,)`, per unit of time.
        prediction_weights: gamma^2, sigma_0^2, nu_s and beta_s.
        weight: "student_t", the L of the formula, or "exponential".

    Returns:
        `(batch, heads, queries, 2 d)`; zeros for a query that sees no source. Differentiable in everything, to any
        order. Memory is O(queries x sources x heads x modes); without gradients rows go in blocks of bounded memory.
    """
    batch, heads, queries, channels = query.shape
    keys = auxiliary.key.shape[2]
    if not queries or not keys:
        return torch.zeros_like(query)
    dtype = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query):
        processes = target_process, auxiliary_process
        target_states, driver_states, target_variance = _sources(target, auxiliary, processes, coupling, dtype)
        states = torch.complex(*query.to(dtype).chunk(2, dim=-1))
        query_noise, floor, robustness, temperature = (p.to(dtype)[:, None, None] for p in prediction_weights)
        y_noise = auxiliary_process.key_noise.to(dtype)[:, None, None]

        def dense_rows(rows: slice) -> DenseRows:
            lag = target.times[:, rows, None] - auxiliary.times[:, None, :]
            visible = lag >= 0 if auxiliary.mask is None else (lag >= 0) & auxiliary.mask[:, None, :]
            seen = visible[:, None]
            lag = lag[:, None].to(time_dtype(lag.device)).masked_fill(~seen, 0.0)
            over = _transport(processes, coupling, lag, dtype)
            predicted = over.own * target_states + over.cross * driver_states
            unknown = ~torch.view_as_real(predicted).isfinite().all(-1).all(-1).all(-1)
            key, value = predicted.masked_fill(unknown[..., None, None], 0.0).unbind(-2)
            nonfinite = ~torch.view_as_real(states[:, :, rows]).isfinite().all(-1).all(-1)
            rows_alone = states[:, :, rows].masked_fill(nonfinite[..., None], 0.0)
            variance = over.remaining * target_variance + over.cross_power * y_noise + over.added + floor
            difference = rows_alone[:, :, :, None] - key
            residual = (difference.real.square() + difference.imag.square()).sum(-1)
            scale = (robustness * (channels // 2), effective_variance(variance, query_noise, weight))
            log_prior, weighed = -torch.log(positive(variance)), evidence(residual, scale, weight)
            return DenseRows(
                log_weights(log_prior, weighed, robustness, temperature, weight),
                visible,
                lambda weights: (weights[..., None] * value).sum(-2),
                nonfinite | (seen & unknown).any(-1),
            )

        estimate, _ = masked_softmax(row_blocks(batch, heads, queries, keys * channels), dense_rows)
    return torch.cat([estimate.real, estimate.imag], dim=-1).to(query.dtype)


def _pairs(observations: Observations, dtype: torch.dtype) -> Tensor:
    """Keys and values as complex states `(batch, heads, length, 2, modes)`, zero where they take no part."""
    states = torch.stack([observations.key, observations.value], dim=-2).to(dtype)
    if observations.mask is not None:
        states = states.masked_fill(~observations.mask[:, None, :, None, None], 0.0)
    return torch.complex(*states.chunk(2, dim=-1))


class _Transport(NamedTuple):
    """Over lags `(b, 1, rows, columns)`: what a state and its driver add, and their parts of the variance.

    The first two are `(b, heads, rows, columns, 1, modes)` complex, the others `(b, heads, rows, columns)`.
    """

    own: Tensor  # e^(lambda_x tau)
    cross: Tensor  # lambda_xy
    remaining: Tensor  # e^(-2 mu_x tau)
    cross_power: Tensor  # the mean of |lambda_xy|^2
    added: Tensor  # sigma_x^2 phi_x + |lambda_xy|^2 sigma_y^2 phi_y


def _transport(processes: tuple[Process, Process], coupling: Tensor, lag: Tensor, dtype: torch.dtype) -> _Transport:
    # in the dtype of the lags: phases must not be rounded before their cosine is taken
    x, y = ([p.to(lag.dtype)[:, None, None] for p in process] for process in processes)
    each, b = lag[..., None, None], coupling.to(lag.dtype)[:, None, None, None, None]
    decay, driver_decay = x[0][..., None, None], y[0][..., None, None]
    frequency, driver_frequency = x[1][..., None, :], y[1][..., None, :]
    cross = b * cross_transport(decay, frequency, driver_decay, driver_frequency, each)
    own = torch.exp(torch.complex(*torch.broadcast_tensors(-decay * each, frequency * each)))
    cross_power = (cross.real.square() + cross.imag.square()).mean((-2, -1))
    added = x[2] * accumulated_variance(x[0], lag) + cross_power * y[2] * accumulated_variance(y[0], lag)
    remaining = decay_kernel(2 * x[0], lag)
    states = (part.to(torch.promote_types(dtype, torch.complex64)) for part in (own, cross))
    return _Transport(*states, *(part.to(dtype) for part in (remaining, cross_power, added)))


def _last(times: Tensor, mask: Tensor | None, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last observation at or before each time: its index, the lag from it, and whether there is one."""
    seen = times[:, None, :] <= at[:, :, None]
    if mask is not None:
        seen = seen & mask[:, None, :]
    found = seen.any(-1)
    lag = (at[:, :, None] - times[:, None, :]).to(time_dtype(times.device)).masked_fill(~seen, torch.inf)
    lag, index = lag.min(dim=-1)
    return index, torch.where(found, lag, 0.0), found


def _take(states: Tensor, index: Tensor) -> Tensor:
    """The states `(batch, heads, length, ...)` at indices `(b, places)`."""
    index = index.view(index.shape[0], 1, index.shape[1], *(1,) * (states.dim() - 3))
    return torch.take_along_dim(states, index, dim=2)


def _sources(
    target: Observations,
    auxiliary: Observations,
    processes: tuple[Process, Process],
    coupling: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """At the times of the auxiliary observations: the target as it is known then, the observation, and a variance.

    States `(batch, heads, 1, sources, 2, modes)` complex, of keys and of values; the variance of the target's,
    `(b, heads, 1, sources)`.
    """
    x, y = processes
    y_noise, y_prior, x_noise, x_prior = (
        p.to(dtype)[:, None] for p in (y.key_noise, y.prior_variance, x.key_noise, x.prior_variance)
    )
    target_states, auxiliary_states = _pairs(target, dtype), _pairs(auxiliary, dtype)

    index, lag, found = _last(auxiliary.times, auxiliary.mask, target.times)  # the auxiliary at the target's times
    over = _transport((y, y), torch.zeros_like(coupling), lag[:, None, None], dtype)  # nothing drives it
    driver = over.own[:, :, 0] * _take(auxiliary_states, index)
    driver = driver.masked_fill(~found[:, None, :, None, None], 0.0)
    driver_variance = torch.where(found[:, None], over.remaining[:, :, 0] * y_noise + over.added[:, :, 0], y_prior)

    index, lag, found = _last(target.times, target.mask, auxiliary.times)  # the target at the auxiliary's times
    over = _transport(processes, coupling, lag[:, None, None], dtype)
    carried = over.own[:, :, 0] * _take(target_states, index) + over.cross[:, :, 0] * _take(driver, index)
    carried = carried.masked_fill(~found[:, None, :, None, None], 0.0)
    driver_variance = torch.take_along_dim(driver_variance, index[:, None], dim=2)
    variance = over.remaining[:, :, 0] * x_noise + over.cross_power[:, :, 0] * driver_variance + over.added[:, :, 0]
    variance = torch.where(found[:, None], variance, x_prior)
    return carried[:, :, None], auxiliary_states[:, :, None], variance[:, :, None]


# Robust filter attention across two coupled processes as a layer (appendix E.4)


class _HeadProcess(PositiveParameters):
    """The given decay and frequencies of one process, and its learned noises."""

    def __init__(self, frequency: Tensor, decay: Tensor, steady_state: float):
        super().__init__()
        each = torch.ones_like(decay)
        self.register_buffer("frequency", frequency.clone())
        self.register_buffer("decay", decay.clone())
        self.hold("process_noise", torch.where(decay > 0, 2 * decay * steady_state, SMALLEST))
        self.hold("key_noise", KEY_NOISE * each)
        self.hold("prior_variance", each)

    def forward(self, dtype: torch.dtype) -> Process:
        return Process(self.get_buffer("decay"), self.get_buffer("frequency"), **self.positive(dtype))


class _Weighing(PositiveParameters):
    """How predictions are weighed, and how strongly one process drives the other."""

    def __init__(self, heads: int, coupling: float):
        super().__init__()
        each = torch.ones(heads)
        self.hold("query_noise", QUERY_NOISE * each)
        self.hold("robustness", ROBUSTNESS * each)
        self.hold("inverse_temperature", INVERSE_TEMPERATURE * each)
        self.register_buffer("noise_floor", NOISE_FLOOR * each)
        self.coupling = nn.Parameter(coupling * each)  # of either sign

    def forward(self, dtype: torch.dtype) -> PredictionWeights:
        return PredictionWeights(noise_floor=self.get_buffer("noise_floor"), **self.positive(dtype))


class CoupledFilterAttention(nn.Module):
    """Cross-attention: a target process x, estimated from an auxiliary process y that drives it.

    Each observation of y predicts the target, and predictions are weighed as in robust filter attention.
    `rfa.appendix.coupled.coupled_filter_attention` gives the formulas and says how the two sequences, each with its own
    times, are paired. There is no fused kernel: memory is O(queries x sources x hidden_size) where gradients are asked
    for, and bounded without.

    Args:
        hidden_size: d_model of the target.
        num_heads: H.
        auxiliary_size: d_model of the auxiliary sequence; the target's.
        frequency, decay: of the target, as of `rfa.nn.RobustFilterAttention`.
        auxiliary_frequency, auxiliary_decay: of the auxiliary process; the target's.
        coupling: the initial b, per unit of time; at 0 the layer does not see the auxiliary states, only their times.
        steady_state: initial steady-state variance `sigma^2 / (2 mu)` of both.
        weight: "student_t" or "exponential".
        innovation: return the correction toward the estimate, not the estimate.

    Raises:
        ValueError: if sizes or options do not fit together.

    Source: appendix E.4.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        auxiliary_size: int | None = None,
        frequency: Float[Tensor, "heads modes"] | None = None,
        decay: Float[Tensor, " heads"] | None = None,
        auxiliary_frequency: Float[Tensor, "heads modes"] | None = None,
        auxiliary_decay: Float[Tensor, " heads"] | None = None,
        coupling: float = 0.1,
        steady_state: float = 0.1,
        weight: Weight = "student_t",
        innovation: bool = True,
    ):
        super().__init__()
        auxiliary_size = hidden_size if auxiliary_size is None else auxiliary_size
        check_sizes(hidden_size, num_heads)
        require(auxiliary_size >= 1, "auxiliary_size", auxiliary_size, "a number >= 1")
        check_choice("weight", weight, Weight)
        require(math.isfinite(coupling), "coupling", coupling, "a finite number")
        require(0 <= steady_state < math.inf, "steady_state", steady_state, "a finite number >= 0")
        self.hidden_size, self.num_heads, self.auxiliary_size = hidden_size, num_heads, auxiliary_size
        modes = hidden_size // num_heads
        frequency, decay = bank(num_heads, modes, frequency, decay)
        auxiliary_frequency = frequency if auxiliary_frequency is None else auxiliary_frequency
        auxiliary_decay = decay if auxiliary_decay is None else auxiliary_decay
        check_frequencies("auxiliary_frequency", auxiliary_frequency, num_heads, modes)
        check_rates("decay", decay, num_heads)
        check_rates("auxiliary_decay", auxiliary_decay, num_heads)
        self.weight, self.innovation = weight, innovation

        def projection(size: int) -> NormalLinear:
            return NormalLinear(size, 2 * hidden_size, complex_deviation(size, hidden_size))

        self.query_projection, self.key_projection, self.value_projection = (projection(hidden_size) for _ in range(3))
        self.auxiliary_key_projection, self.auxiliary_value_projection = (projection(auxiliary_size) for _ in range(2))
        deviation = complex_deviation(hidden_size, hidden_size) * math.sqrt(0.5)
        self.output_projection = NormalLinear(2 * hidden_size, hidden_size, deviation)
        self.target_process = _HeadProcess(frequency, decay, steady_state)
        self.auxiliary_process = _HeadProcess(auxiliary_frequency, auxiliary_decay, steady_state)
        self.judge = _Weighing(num_heads, coupling)  # this name is that of its parameters in checkpoints

    def forward(
        self,
        hidden_states: Float[Tensor, "batch length hidden"],
        auxiliary_states: Float[Tensor, "batch sources auxiliary"],
        *,
        times: Float[Tensor, "*t length"] | Int[Tensor, "*t length"] | None = None,
        auxiliary_times: Float[Tensor, "*s sources"] | Int[Tensor, "*s sources"] | None = None,
        key_mask: Bool[Tensor, "batch length"] | None = None,
        auxiliary_key_mask: Bool[Tensor, "batch sources"] | None = None,
    ) -> Float[Tensor, "batch length hidden"]:
        """The layer's correction of the target, to be added to its residual stream.

        Args:
            hidden_states: tokens of the target.
            auxiliary_states: tokens of the auxiliary sequence.
            times: of the target, strictly increasing; 0, 1, 2, ... by default.
            auxiliary_times: of the auxiliary sequence, on the same clock; 0, 1, 2, ... by default.
            key_mask: True for target tokens that are observations; the others are queries only.
            auxiliary_key_mask: True for auxiliary tokens that take part.

        Returns:
            `(batch, length, hidden)`. The estimate of a target token that sees no source is zero.

        Raises:
            ValueError: for states, times or masks that do not fit together.
        """
        batch, length, _ = check_states("hidden_states", hidden_states, self.hidden_size, self.query_projection)
        others, sources, _ = check_states(
            "auxiliary_states", auxiliary_states, self.auxiliary_size, self.auxiliary_key_projection
        )
        require(others == batch, "auxiliary_states", others, f"batch {batch}, that of hidden_states")
        device = hidden_states.device
        require(auxiliary_states.device == device, "auxiliary_states", auxiliary_states.device, f"device {device}")
        positions = locate_tokens(batch, length, device, times, key_mask, None)
        try:
            auxiliary = locate_tokens(batch, sources, device, auxiliary_times, auxiliary_key_mask, None)
        except ValueError as error:
            raise ValueError(f"auxiliary_{error}") from None
        times = torch.arange(length, device=device) if times is None else times
        auxiliary_times = torch.arange(sources, device=device) if auxiliary_times is None else auxiliary_times
        dtype = times_dtype(times, auxiliary_times)  # in which their differences are exact
        times, auxiliary_times = (torch.atleast_2d(each.to(dtype)) for each in (times, auxiliary_times))

        hidden_states = finite_where_absent(hidden_states, positions)
        auxiliary_states = finite_where_absent(auxiliary_states, auxiliary)
        query, key, value = (
            split_heads(projection(hidden_states), self.num_heads)
            for projection in (self.query_projection, self.key_projection, self.value_projection)
        )
        auxiliary_key, auxiliary_value = (
            split_heads(projection(auxiliary_states), self.num_heads)
            for projection in (self.auxiliary_key_projection, self.auxiliary_value_projection)
        )
        estimate = coupled_filter_attention(
            query,
            Observations(key, value, times, key_mask),
            Observations(auxiliary_key, auxiliary_value, auxiliary_times, auxiliary_key_mask),
            target_process=self.target_process(query.dtype),
            auxiliary_process=self.auxiliary_process(query.dtype),
            coupling=self.judge.coupling,
            prediction_weights=self.judge(query.dtype),
            weight=self.weight,
        )
        if self.innovation:
            estimate = estimate - value
        return self.output_projection(merge_heads(estimate))
