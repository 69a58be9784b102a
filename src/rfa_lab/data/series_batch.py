"""A batch of series to learn from or to be scored on: what simulations, tables and training share."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class SeriesBatch(NamedTuple):
    """Series of equal length. A row without a reading asks for a prediction, such as a forecast.

    Fields:
        times: of the rows, in order.
        values: the readings; NaN where nothing was read.
        targets: what a model should say at each row from the readings up to and including it; NaN: nothing is asked.
        noise: the factor by which each reading's error is too large, where it is known; None elsewhere.
    """

    times: Float[Tensor, "batch rows"]
    values: Float[Tensor, "batch rows channels"]
    targets: Float[Tensor, "batch rows channels"]
    noise: Float[Tensor, "batch rows channels"] | None = None

    def part(self, start: int, stop: int) -> "SeriesBatch":
        """Some of the series."""
        rows = slice(start, stop)
        noise = None if self.noise is None else self.noise[rows]
        return SeriesBatch(self.times[rows], self.values[rows], self.targets[rows], noise)
