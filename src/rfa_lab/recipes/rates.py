"""The choice of a learning rate: each model tries the rates of its recipe, and the best one serves all its seeds.

Where the best one is at an end of the list, the next rate beyond it is tried too. Text and series share this rule.
"""

import math
from collections.abc import Mapping, Sequence

TRIAL_PART = 3  # a trial has one part of so many of the training
_BEYOND = 2  # rates at most that are tried beyond each end of the list
_LEAST = 1e-12  # the least rate of a `TrainingSpec`


def possible_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """The rates of a recipe and those that may be tried beyond its ends. A single rate stays alone."""
    if len(rates) < 2:
        return tuple(rates)
    ascending = sorted(rates)
    ends = ((ascending[0], ascending[1]), (ascending[-1], ascending[-2]))
    beyond = (end * (end / inner) ** power for end, inner in ends for power in range(1, _BEYOND + 1))
    rounded = (float(f"{rate:.6g}") for rate in beyond)  # 0.012, not 0.012000000000000002
    outside = (rate for rate in rounded if rate < ascending[0] or rate > ascending[-1])
    return (*rates, *(rate for rate in outside if _LEAST <= rate < 1))


def needed_rates(possible: Sequence[float], rates: Sequence[float], losses: Mapping[float, float]) -> tuple[float, ...]:
    """The possible rates that must be tried before one is chosen, as far as the losses of finished trials tell.

    Those of the recipe, and while the best of these is at an end, the next one beyond it. A trial that diverged has an
    infinite loss.
    """
    ascending, wanted = sorted(possible), set(rates) & set(possible)
    while wanted and wanted <= losses.keys():
        best = min((rate for rate in possible if rate in wanted), key=lambda rate: losses[rate])
        least, largest, beyond = ascending.index(min(wanted)), ascending.index(max(wanted)), set[float]()
        if best == min(wanted) or math.isinf(losses[best]):
            beyond |= set(ascending[max(least - 1, 0) : least])
        if best == max(wanted) and math.isfinite(losses[best]):
            beyond |= set(ascending[largest + 1 : largest + 2])
        if not beyond:
            break
        wanted |= beyond
    return tuple(rate for rate in possible if rate in wanted)
