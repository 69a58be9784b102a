"""The choice of a learning rate: each model tries the rates of its recipe, and the best one serves all its seeds.

A trial has a third of the steps and a schedule of its own. Its seed is the first of the model, and the loss on the
validation split decides. Trials are run folders beside those of the runs.

Where the least or the largest rate of the list is the best, a better one may lie beyond it. So the next rate is tried
too. Its ratio to that end is that of the end to its neighbour. At most two are tried beyond each end, all below 1.
Where training diverges with all rates, lower ones are tried.

Runs are of one model if they differ only in their seed, in `max_steps`, or in what changes evaluation alone. So an
entry with a smaller budget has no trials of its own, which would be too short: it takes the rate that the same model
chose at its largest budget.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .recipe import PlannedRun, Recipe

DIVERGED = "diverged"  # the entry of run.json that says why a trial has no loss, or a run no result
_BUDGET = 3  # a trial has one part of so many
_BEYOND = 2  # rates at most that are tried beyond each end of the list
_LEAST = 1e-12  # the least rate of a `TrainingSpec`
_ONLY_EVALUATED = {"window": "flat", "yarn": "rope"}  # they act beyond the training length, and are trained as these


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


def trials_by_run(recipe: Recipe) -> dict[str, tuple[PlannedRun, ...]]:
    """The trials that a run may need before it can begin, by its name: one of each of `possible_rates`.

    `needed_trials` says which of them it does need. With at most one rate there are none. The rates are those of the
    model's run with the largest budget.
    """
    models: dict[str, list[PlannedRun]] = {}
    for run in recipe.runs:
        models.setdefault(_model(run), []).append(run)
    trials = {}
    for runs in models.values():
        full = max(runs, key=lambda run: run.spec.max_steps or math.inf)
        tried = tuple(_trial(full, rate) for rate in possible_rates(full.rates)) if len(full.rates) > 1 else ()
        trials.update({run.name: tried for run in runs})
    return trials


def needed_trials(
    trials: Sequence[PlannedRun], rates: Sequence[float], losses: Mapping[float, float]
) -> tuple[PlannedRun, ...]:
    """The trials that must be finished before the rate is chosen, as far as these losses tell.

    Args:
        trials: of a run, by `trials_by_run`.
        rates: of the recipe.
        losses: of the trials that are finished, by learning rate.
    """
    by_rate = {trial.spec.learning_rate: trial for trial in trials}
    possible, wanted = sorted(by_rate), set(rates) & by_rate.keys()
    while wanted and wanted <= losses.keys():
        best = min((rate for rate in by_rate if rate in wanted), key=lambda rate: losses[rate])
        least, largest, beyond = possible.index(min(wanted)), possible.index(max(wanted)), set[float]()
        if best == min(wanted) or math.isinf(losses[best]):
            beyond |= set(possible[max(least - 1, 0) : least])
        if best == max(wanted) and math.isfinite(losses[best]):
            beyond |= set(possible[largest + 1 : largest + 2])
        if not beyond:
            break
        wanted |= beyond
    return tuple(trial for rate, trial in by_rate.items() if rate in wanted)


def _trial(run: PlannedRun, rate: float) -> PlannedRun:
    spec = replace(run.spec, learning_rate=rate)
    if spec.max_steps is not None:
        spec = replace(spec, max_steps=max(1, spec.max_steps // _BUDGET))
    else:
        spec = replace(spec, epochs=spec.epochs / _BUDGET)
    return replace(run, spec=spec, trial=True)


def _model(run: PlannedRun) -> str:
    """All on which training depends, but for the seed, the rate and the budget, which the trials set."""
    config = run.spec.model_config(vocab_size=2).to_dict()
    attention = dict(config["attention"])
    frequencies = dict(attention.get("frequencies", {}))
    for options, name in ((attention, "prior"), (frequencies, "kind")):
        if options.get(name) in _ONLY_EVALUATED:
            options[name] = _ONLY_EVALUATED[options[name]]
    return repr(({**config, "attention": {**attention, "frequencies": frequencies}}, run.spec.one_group))


def trial_loss(record: Mapping[str, Any]) -> float | None:
    """The validation loss of a trial from its run.json: infinite if training diverged, None if it is not finished."""
    if DIVERGED in record:
        return math.inf
    return record["result"]["valid_loss"] if record["finished"] else None


def losses_of(tried: Mapping[float, Mapping[str, Any]]) -> dict[float, float]:
    """The validation losses of finished trials from their records, by learning rate."""
    losses = {rate: trial_loss(record) for rate, record in tried.items()}
    return {rate: loss for rate, loss in losses.items() if loss is not None}


def with_best_rate(run: PlannedRun, losses: Mapping[float, float]) -> PlannedRun:
    """The run with the rate of the least validation loss, the first of equal ones. Without trials it stays as it is.

    Raises:
        ValueError: if training diverged with every rate.
    """
    if not losses:
        return run
    rate = min(losses, key=lambda one: losses[one])
    if math.isinf(losses[rate]):
        raise ValueError(f"rates: training of {run.label} diverged with each of {', '.join(map(str, losses))}")
    return replace(run, spec=replace(run.spec, learning_rate=rate))
