"""The operator on states that stand in the common frame already, as a decoder's cache keeps them."""

from jaxtyping import Float
from torch import Tensor

from rfa.dynamics import TimeDependentNoise

from .backends import backend_for
from .fused import Kept
from .inputs import Options, Parameters, Positions, Prior, Weight


def robust_filter_attention_in_frame(
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
    positions: Positions,
    weight: Weight = "student_t",
    prior: Prior = "lyapunov",
    gate: bool = True,
    query_noise_in_bias: bool = False,
    horizon: Float[Tensor, " heads"] | None = None,
    noise: TimeDependentNoise | None = None,
    return_log_precision: bool = False,
    kept: Kept | None = None,
    backend: str = "auto",
) -> (
    Float[Tensor, "batch heads queries value_channels"]
    | tuple[Float[Tensor, "batch heads queries value_channels"], Float[Tensor, "batch heads queries"]]
):
    """`robust_filter_attention` without its rotations: no state is turned, neither going in nor coming out.

    Args:
        query, key, value: `exp(-i omega t)` times the states, or the states themselves for values that do not turn.
        positions: where keys and queries stand, `(1 or batch, length)`, checked already.
        kept: what a cache keeps of its keys and of the prior.
        others: as `robust_filter_attention`; causal.

    Returns:
        The estimate in the frame: `exp(+i omega t)`, and a horizon's turn, are still to be applied. And the log
        precision, if asked for.

    Raises:
        ValueError: for a backend that is unknown or does not serve such states.
        RuntimeError: where it is "cpu" and cannot be compiled.
    """
    parameters = Parameters(
        decay,
        frequency,
        process_noise,
        key_noise,
        query_noise,
        noise_floor,
        robustness,
        inverse_temperature,
        horizon,
        noise,
    )
    options = Options(
        causal=True,
        weight=weight,
        rotate_values=False,
        prior=prior,
        gate=gate,
        query_noise_in_bias=query_noise_in_bias,
        log_precision=return_log_precision,
        in_frame=True,
    )
    run = backend_for(backend, query, value, separable=noise is None or positions.uniform).run
    estimate, log_precision = run(query, key, value, parameters, positions, options, kept)
    return estimate if log_precision is None else (estimate, log_precision)
