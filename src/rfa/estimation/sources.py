"""The past or the future of a moment, source by source: what each says of the state there by itself."""

from dataclasses import dataclass

from .information import Measurement, together
from .observations import Grid
from .steps import Parts, Steps


@dataclass(frozen=True)
class Sources:
    """Everything seen on one side of a moment.

    Args:
        alone: what each source says by itself, transported to the moment: rows `(models, j, m, n)`, values `(b, j, m)`.
        moments: which moments the sources stand at, `(j,)`.
    """

    alone: Measurement
    moments: list[int]

    @classmethod
    def none(cls, grid: Grid) -> "Sources":
        """Before anything is seen."""
        return cls(Measurement(*(part[:, :0] for part in grid.whitened)), [])

    def seen(self, grid: Grid, k: int) -> "Sources":
        """What is seen at moment k joins, for all series at once; where one is missing it says nothing."""
        if not bool(grid.present[:, k].any()):
            return self
        new = Measurement(*(part[:, k : k + 1] for part in grid.whitened))
        return Sources(together([self.alone, new]), [*self.moments, k])

    def without(self, k: int) -> "Sources":
        """All but what is seen at moment k."""
        kept = [place for place, moment in enumerate(self.moments) if moment != k]
        if len(kept) == len(self.moments):
            return self
        return Sources(Measurement(*(part[:, kept] for part in self.alone)), [self.moments[place] for place in kept])

    def beside(self, other: "Sources") -> "Sources":
        """Both."""
        return Sources(together([self.alone, other.alone]), [*self.moments, *other.moments])

    def ahead(self, parts: Parts, k: int) -> "Sources":
        """From moment k to k + 1."""
        return Sources(parts.ahead(k, self.alone), self.moments)

    def back(self, steps: Steps, k: int) -> "Sources":
        """From moment k + 1 to k."""
        return Sources(steps.back(k, self.alone), self.moments)
