"""The choice of a learning rate: each model tries all rates of its recipe, and the best one serves all its seeds.

A trial has a third of the steps and a schedule of its own. Its seed is the first of the model, and the loss on the
validation split decides. Trials are run folders beside those of the runs.

Runs are of one model if they differ only in their seed, in `max_steps`, or in what changes evaluation alone. So an
entry with a smaller budget has no trials of its own, which would be too short: it takes the rate that the same model
chose at its largest budget.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .recipe import PlannedRun, Recipe

DIVERGED = "diverged"  # the entry of run.json that says why a trial has no loss
_BUDGET = 3  # a trial has one part of so many
_ONLY_EVALUATED = {"window": "flat", "yarn": "rope"}  # they act beyond the training length, and are trained as these


def trials_by_run(recipe: Recipe) -> dict[str, tuple[PlannedRun, ...]]:
    """The trials that a run needs before it can begin, by its name. With at most one rate there are none."""
    if len(recipe.rates) < 2:
        return {run.name: () for run in recipe.runs}
    models: dict[str, list[PlannedRun]] = {}
    for run in recipe.runs:
        models.setdefault(_model(run), []).append(run)
    trials = {}
    for runs in models.values():
        full = max(runs, key=lambda run: run.spec.max_steps or math.inf)
        tried = tuple(_trial(full, rate) for rate in recipe.rates)
        trials.update({run.name: tried for run in runs})
    return trials


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
