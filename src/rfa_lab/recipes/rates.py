"""The choice of a learning rate: each model tries the rates of its recipe, and the best one serves all its seeds.

Where the best one is at an end of the list, the next rate beyond it is tried too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .recipe import PlannedRun, Recipe

_TRIAL_PART = 3  # a trial has one part of so many of the training
_MAX_BEYOND = 2  # rates at most that are tried beyond each end of the list
_MIN_RATE = 1e-12  # the least rate of a `TrainingSpec`
DIVERGED = "diverged"  # the entry of run.json that says why a trial has no loss, or a run no result


def possible_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """The rates of a recipe and those that may be tried beyond its ends. A single rate stays alone."""
    if len(rates) < 2:
        return tuple(rates)
    ascending = sorted(rates)
    ends = ((ascending[0], ascending[1]), (ascending[-1], ascending[-2]))
    beyond = (end * (end / inner) ** power for end, inner in ends for power in range(1, _MAX_BEYOND + 1))
    rounded = (float(f"{rate:.6g}") for rate in beyond)  # 0.012, not 0.012000000000000002
    outside = (rate for rate in rounded if rate < ascending[0] or rate > ascending[-1])
    return (*rates, *(rate for rate in outside if _MIN_RATE <= rate < 1))


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


def trials_by_run(recipe: Recipe) -> dict[str, dict[float, PlannedRun]]:
    """The trials that each run may need before it can begin, by the run's name and the rate; none with one rate.

    A trial has a third of the training, of the model's run with the largest budget.
    """
    models: dict[str, list[PlannedRun]] = {}
    for run in recipe.runs:
        models.setdefault(_trained_model(run), []).append(run)
    trials: dict[str, dict[float, PlannedRun]] = {}
    for runs in models.values():
        full = max(runs, key=lambda run: run.spec.max_steps or math.inf)
        rates = possible_rates(full.rates) if len(full.rates) > 1 else ()
        of_model = {rate: _trial(full, rate) for rate in rates}
        trials |= {run.name: of_model for run in runs}
    return trials


def _trial(run: PlannedRun, rate: float) -> PlannedRun:
    spec, budget = run.spec, dict[str, Any]()
    if spec.max_steps is not None:
        budget["max_steps"] = max(1, spec.max_steps // _TRIAL_PART)
    else:
        budget["epochs"] = spec.epochs / _TRIAL_PART
    return replace(run, spec=replace(spec, learning_rate=rate, **budget), trial=True)


def _trained_model(run: PlannedRun) -> str:
    """All on which training depends, but for the seed, the rate and the budget, which the trials set."""
    return repr((run.spec.model_config(vocab_size=2).to_dict(), run.spec.one_group))


def trial_loss(record: Mapping[str, Any]) -> float | None:
    """The validation loss of a trial by its run.json: infinite if training diverged, None if it is not finished."""
    if DIVERGED in record:
        return math.inf
    return record["result"]["valid_loss"] if record["finished"] else None


def with_best_rate(run: PlannedRun, losses: Mapping[float, float]) -> PlannedRun:
    """The run with the rate of the least validation loss, the first of equal ones.

    Raises `ValueError` if training diverged with every rate.
    """
    rate = min(losses, key=lambda one: losses[one])
    if math.isinf(losses[rate]):
        raise ValueError(f"rates: training of {run.label} diverged with each of {', '.join(map(str, losses))}")
    return replace(run, spec=replace(run.spec, learning_rate=rate))
