"""The operator where everything is checked already: what its public function and the layers come to."""

from jaxtyping import Float
from torch import Tensor

from .backends import backend_for
from .fused import Kept
from .inputs import Options, Parameters, Positions


def filter_attention_at(
    positions: Positions,
    query: Float[Tensor, "batch heads queries channels"],
    key: Float[Tensor, "batch heads keys channels"],
    value: Float[Tensor, "batch heads keys value_channels"],
    parameters: Parameters,
    options: Options,
    *,
    kept: Kept | None = None,
    backend: str = "auto",
) -> (
    Float[Tensor, "batch heads queries value_channels"]
    | tuple[Float[Tensor, "batch heads queries value_channels"], Float[Tensor, "batch heads queries"]]
):
    """`robust_filter_attention` without its checks, of which those of values wait for a GPU at each call.

    Args:
        positions: where keys and queries stand, `(1 or batch, length)`.
        query, key, value: the states; with `options.in_frame` they are turned already, `exp(-i omega t)` times the
            states (or the states themselves for values that do not turn), and the estimate stays in that frame:
            `exp(+i omega t)`, and a horizon's turn, are still to be applied.
        parameters, options: as the public function's arguments.
        kept: what a cache keeps of its keys and of the prior; in the frame only.
        backend: as there.

    Returns:
        The estimate, and the log precision if `options` ask for it.

    Raises:
        ValueError: for a backend that is unknown or does not serve such states.
        RuntimeError: where it is "cpu" and cannot be compiled.
    """
    separable = parameters.noise is None or positions.uniform
    run = backend_for(backend, query, value, separable=separable).run
    estimate, log_precision = run(query, key, value, parameters, positions, options, kept)
    return estimate if log_precision is None else (estimate, log_precision)
