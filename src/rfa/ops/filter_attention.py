"""The public operator, and the same at positions that are located already."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rfa.dynamics import TimeDependentNoise

from .backends import Lags, backend_for
from .positions import checked_positions
from .prior import DecodingCache
from .problem import Options, Parameters, Prior, Problem, Weight, validate


def robust_filter_attention(
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
    times: Float[Tensor, "*t keys"] | Int[Tensor, "*t keys"] | None = None,
    query_times: Float[Tensor, "*s queries"] | Int[Tensor, "*s queries"] | None = None,
    key_mask: Bool[Tensor, "batch keys"] | None = None,
    segment_ids: Int[Tensor, "batch keys"] | None = None,
    causal: bool = True,
    weight: Weight = "student_t",
    rotate_values: bool = True,
    prior: Prior = "lyapunov",
    gate: bool = True,
    query_noise_in_bias: bool = False,
    horizon: Float[Tensor, " heads"] | None = None,
    noise: TimeDependentNoise | None = None,
    certified: float | None = None,
    return_log_precision: bool = False,
    backend: str = "auto",
    check_values: bool | None = None,
) -> (
    Float[Tensor, "batch heads queries value_channels"]
    | tuple[Float[Tensor, "batch heads queries value_channels"], Float[Tensor, "batch heads queries"]]
):
    r"""Robust filter attention: each query estimates its state from earlier keys, transported to its time.

    For one head and the lag `tau = t_i - t_j` (`|tau|` when not causal), with d complex modes per head:

        E     = exp(-mu tau)                                         the decay of a key
        Sigma = sigma^2 phi(tau) + eta^2 E^2 + sigma_0^2             its uncertainty (Lyapunov equation)
        r_ij  = |q_i - exp((-mu + i omega) tau) k_j|^2               its distance from the query
        L_ij  = -log Sigma - (nu_s + 1) log(1 + r_ij / (nu_s d (Sigma + gamma^2)))
        A     = softmax_j(beta_s L)
        out_i = sum_j A_ij exp((-mu + i omega) tau) v_j

    The decay multiplies A after normalisation: the rows of `A E` sum to less than one.

    Variances are right down to the smallest normal number, 1.2e-38 in float32 and in the fused backends. A smaller one
    counts as that number in logarithms and quotients and has no gradient there. With exponential weights
    `Sigma + gamma^2` counts as 2e-24 (float64: 5e-193) where it is smaller: scores would leave the range of the dtype.
    Where a state holds NaN or infinity, the estimates of the queries that see it become NaN, and no others change.

    Args:
        query: `(batch, heads, queries, 2 d)`; real parts first, then imaginary parts.
        key: `(batch, heads, keys, 2 d)`.
        value: `(batch, heads, keys, 2 dv)`; `dv = d` unless `rotate_values` is off.
        decay: mu >= 0 per head, per unit of time.
        frequency: omega per head and mode, radians per unit of time.
        process_noise: sigma^2 >= 0, variance per unit of time.
        key_noise: eta^2 >= 0, variance.
        query_noise: gamma^2 >= 0, variance.
        noise_floor: sigma_0^2 >= 0, variance.
        robustness: nu_s > 0, degrees of freedom per mode.
        inverse_temperature: beta_s > 0.
        times: of the keys, `(keys,)` or `(batch, keys)`, strictly increasing within a segment; 0, 1, 2, ...
        query_times: of the queries, `(queries,)` or `(batch, queries)`; the last of `times`. Later than every
            key is a forecast.
        key_mask: `(batch, keys)`, True for keys that take part.
        segment_ids: `(batch, keys)`; queries see keys of their own segment only and take the last ids.
        causal: key j takes part in query i when `t_j <= t_i`.
        weight: "student_t", the L of the formula, or "exponential", `L = -log Sigma - r / (nu_s d (Sigma + gamma^2))`.
        rotate_values: transport values by rotation too; off, they only decay.
        prior: "lyapunov", the `-log Sigma` of the formulas, or "riccati": in its place the weight `log c_ij` that a
            steady Kalman filter gives to a past observation.
        gate: off, `Sigma + gamma^2` is 1 in the residual term (the paper's M2.3).
        query_noise_in_bias: `-log(Sigma + gamma^2)` instead of `-log Sigma`, as in the released code.
        horizon: h >= 0 per head: a forecast of the time `t_i + h`. Lags grow by h, and the estimate is turned by h.
            The visible keys, the rotation within r and the Riccati weights do not change.
        noise: parts of the process noise beside the white part sigma^2, fields `(heads, parts)`: V of
            `rfa.dynamics.time_dependent_variance` replaces `sigma^2 phi` (appendix E.5). With prior="lyapunov" only.
            Where times are given, and in place of "triton", only the reference serves it, in O(N^2) memory.
        certified: eps, by which old keys may be left out: a query visits its newest keys first, and stops where all
            that are left weigh at most eps times the sum so far. The prior proves that before their content is seen.
            Then `|out - exact| <= 2 eps max |v|` beside rounding, and the log precision is at most eps too small. With
            the "cpu" backend the cost grows linearly with a long sequence, and with "triton" too in half precision
            without times, masks and segments; "triton" visits all keys otherwise. "reference" masks such keys and saves
            nothing. Gradients are those of what was computed; a NaN in a key that is left out may be missing in them.
            It needs prior="riccati" and causal=True. None or 0 visits all keys.
        return_log_precision: also return `log s_i = log sum_j exp(beta_s L_ij)` (appendix E.2).
        backend: "auto", or the name of one: it runs or raises. "cpu" and "triton" are differentiated once, in reverse.
            The transforms of `torch.func`, `torch.vmap` among them, forward mode and second derivatives are the
            reference's: "auto" takes it under a transform and in forward mode, the others raise.
        check_values: whether values of parameters and times are checked, as shapes and dtypes always are. None checks
            them on the CPU alone, because a GPU would have to finish its work first. Unchecked parameters out of range
            give NaN where "triton" serves causal Student-t weights in half precision at uniform times; elsewhere NaN,
            or numbers without meaning.

    Returns:
        The filtered values `(batch, heads, queries, 2 dv)`, before the innovation step, in the query's dtype; and
        the log precision `(batch, heads, queries)`, in float32 or float64. Half precisions accumulate in float32.
        A query that sees no key gets zeros and a log precision of -inf. With the Riccati prior the log precision
        of a segment's first query depends on the interval after it, whose gain the first key takes.

    Raises:
        ValueError: naming the argument, what was given and what was expected; also where a backend asked for by name
            does not serve such states. Under `torch.compile` shapes, dtypes and devices are checked, values are not.
            The values of tensors that `torch.vmap` has batched are not checked either.
        RuntimeError: where "cpu" is asked for and its kernels cannot be compiled.

    Source: section 3.2, algorithm 1.
    """
    noises = process_noise, key_noise, query_noise, noise_floor
    parameters = Parameters(decay, frequency, *noises, robustness, inverse_temperature, horizon, noise)
    options = Options(
        causal, weight, rotate_values, prior, gate, query_noise_in_bias, return_log_precision, certified=certified
    )
    validate(query, key, value, parameters, options, check_values=check_values)
    batch, _, queries, _ = query.shape
    marks = (times, query_times, key_mask, segment_ids)
    positions = checked_positions(batch, queries, key.shape[2], query.device, *marks, check_values=check_values)
    return located_filter_attention(query, key, value, Problem(parameters, positions, options), backend=backend)


def located_filter_attention(
    query: Float[Tensor, "batch heads queries channels"],
    key: Float[Tensor, "batch heads keys channels"],
    value: Float[Tensor, "batch heads keys value_channels"],
    problem: Problem,
    *,
    cache: DecodingCache | None = None,
    backend: str = "auto",
) -> (
    Float[Tensor, "batch heads queries value_channels"]
    | tuple[Float[Tensor, "batch heads queries value_channels"], Float[Tensor, "batch heads queries"]]
):
    """`robust_filter_attention` without its checks. A model locates its tokens once and calls this in every layer.

    Args:
        query, key, value: the states. With `options.in_frame` they are turned by `exp(-i omega t)` already (values that
            do not rotate are not), and the estimate stays in that frame: the caller turns it by `exp(+i omega t)` and
            by a horizon.
        problem: the other arguments of the public function.
        cache: what a decoder keeps of its keys and of the prior; for states in the frame only.
        backend: as in the public function, with its errors.

    Returns:
        The estimate, and the log precision if `options` ask for it.
    """
    lags: Lags | None = None
    if problem.parameters.noise is not None:
        lags = "uniform" if problem.positions.uniform else "given"
    run = backend_for(backend, query, value, lags, problem.options.dropout > 0).run
    estimate, log_precision = run(query, key, value, problem, cache)
    return estimate if log_precision is None else (estimate, log_precision)
