"""What is kept, beside its rows, of an evaluation's losses: sums by document, means by position."""

from collections.abc import Sequence

import numpy as np


class LossByDocument:
    """Adds up losses by document and context length: an `observe` of `perplexities` under any one protocol.

    Windows may cross from one document into the next; a loss belongs to the document of its target.

    Args:
        names: of the documents.
        document_of_token: the place among them of each token of the stream.
    """

    def __init__(self, names: Sequence[str], document_of_token: np.ndarray):
        self.names, self.document_of_token = names, document_of_token
        self._totals: dict[int, np.ndarray] = {}

    def __call__(self, length: int, tokens: np.ndarray, losses: np.ndarray) -> None:
        """Add the losses of the tokens at these places."""
        where = self.document_of_token[tokens.ravel()]
        totals = self._totals.setdefault(length, np.zeros((2, len(self.names))))
        totals[0] += np.bincount(where, losses.ravel(), len(self.names))
        totals[1] += np.bincount(where, minlength=len(self.names))

    def totals(self) -> dict[str, dict[str, list[float]]]:
        """`{document: {length: [summed loss in nats, scored targets]}}`, of documents that have any."""
        return {
            name: {
                str(length): [float(losses[place]), int(targets[place])]
                for length, (losses, targets) in self._totals.items()
                if targets[place]
            }
            for place, name in enumerate(self.names)
            if any(targets[place] for _, targets in self._totals.values())
        }


class LossByPosition:
    """Means of losses by their place in the window: an `observe` of `perplexities` under `blocks`.

    Args:
        length: the context length that is observed; others are passed over.
    """

    def __init__(self, length: int):
        self.length = length
        self._sum, self._squares, self.windows = np.zeros(max(length - 1, 0)), np.zeros(max(length - 1, 0)), 0

    def __call__(self, length: int, tokens: np.ndarray, losses: np.ndarray) -> None:
        """Add windows' losses."""
        if length == self.length:
            self._sum += losses.sum(0)
            self._squares += np.square(losses).sum(0)
            self.windows += len(losses)

    def means(self) -> list[float]:
        """Of the positions 1 .. length - 1, in nats."""
        return (self._sum / self.windows).tolist()

    def errors(self) -> list[float] | None:
        """The means' standard errors over windows; None where there is one window only."""
        if self.windows < 2:
            return None
        variance = np.maximum(self._squares / self.windows - np.square(self._sum / self.windows), 0.0)
        return np.sqrt(variance / (self.windows - 1)).tolist()
