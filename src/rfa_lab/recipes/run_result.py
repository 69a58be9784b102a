"""The result of a recipe's run, collected from its run folder and its evaluation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rfa.environment import environment
from rfa_lab.results import RESULT_FORMAT
from rfa_lab.training import RunFolder
from rfa_lab.training.callbacks import read_metrics

from .rates import TRIAL_PART, needed_rates, possible_rates
from .recipe import PlannedRun, Recipe
from .runner import versions_of

DIVERGED = "diverged"  # the entry of run.json that says why a trial has no loss, or a run no result
_ONLY_EVALUATED = {"window": "flat", "yarn": "rope"}  # they act beyond the training length, and are trained as these

# The trials of learning rates


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
    """The trials of `needed_rates`: those that must be finished before the rate of a run is chosen."""
    by_rate = {trial.spec.learning_rate: trial for trial in trials}
    return tuple(by_rate[rate] for rate in needed_rates(tuple(by_rate), rates, losses))


def _trial(run: PlannedRun, rate: float) -> PlannedRun:
    spec = replace(run.spec, learning_rate=rate)
    if spec.max_steps is not None:
        spec = replace(spec, max_steps=max(1, spec.max_steps // TRIAL_PART))
    else:
        spec = replace(spec, epochs=spec.epochs / TRIAL_PART)
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
    """The validation loss of a trial by its run.json: infinite if training diverged, None if it is not finished."""
    if DIVERGED in record:
        return math.inf
    return record["result"]["valid_loss"] if record["finished"] else None


def losses_of(tried: Mapping[float, Mapping[str, Any]]) -> dict[float, float]:
    """The validation losses of finished trials from their records, by learning rate."""
    return {rate: loss for rate, record in tried.items() if (loss := trial_loss(record)) is not None}


def with_best_rate(run: PlannedRun, losses: Mapping[float, float]) -> PlannedRun:
    """The run with the rate of the least validation loss, the first of equal ones.

    Raises `ValueError` if training diverged with every rate.
    """
    rate = min(losses, key=lambda one: losses[one])
    if math.isinf(losses[rate]):
        raise ValueError(f"rates: training of {run.label} diverged with each of {', '.join(map(str, losses))}")
    return replace(run, spec=replace(run.spec, learning_rate=rate))


_POINTS = 64  # maximum number of stored steps of each head's parameters


def make_result(
    recipe: Recipe,
    run: PlannedRun,
    folder: RunFolder,
    record: Mapping[str, Any],
    evaluated: Mapping[str, Any],
    tried: Mapping[float, Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of a finished run's result file, from its record, its evaluation and its trials by learning rate."""
    evaluated = dict(evaluated)
    parts = [{"environment": made} for made in evaluated.pop("environments", [evaluated.get("environment")])]
    measured, lines = record["result"], read_metrics(folder)
    speed = measured["tokens_per_second"]
    return {
        **evaluated,
        "format": RESULT_FORMAT,
        **recipe.entry_of(run),
        "label": run.label,
        "preset": run.spec.preset,
        "seed": run.spec.seed,
        "train_length": run.spec.length,
        "learning_rate": run.spec.learning_rate,
        "trials": {str(rate): loss if math.isfinite(loss) else None for rate, loss in losses_of(tried).items()},
        "versions": versions_of(*tried.values(), record, *parts, {"environment": environment()}),
        "training": {
            "valid_perplexity": measured["valid_perplexity"],
            "tokens": measured["tokens"],
            "tokens_per_second": speed,
            "parameters": measured["parameters"],
            "steps": record["steps"],
            **({"best_step": measured["best_step"]} if "best_step" in measured else {}),
            "seconds": round(measured["tokens"] / speed, 1) if speed else None,
        },
        "config": record["config"],
        "environment": record["environment"],
        "resumed": record.get("resumed", []),
        "evaluation_environment": evaluated.get("environment"),
        "data": {**record["data"], "corpus": Path(record["data"]["corpus"]).name},
        "curve": [
            {name: line[name] for name in ("step", "tokens", "valid_loss")} for line in lines if "valid_loss" in line
        ],
        "dynamics": dynamics_over_training(lines),
    }


def dynamics_over_training(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The parameters of each layer and head over training, from the lines of `metrics.jsonl`.

    There are 64 steps at most, with the first and the last one. `layers` has for each layer and parameter a list over
    `steps` of lists over heads. All is empty for a model without dynamics. The parameters are `process_noise` sigma^2,
    `key_noise` eta^2, `query_noise` gamma^2, `robustness` nu_s, `inverse_temperature` beta_s, `decay` mu,
    `noise_floor` sigma_0^2 and the regime's `alpha`. The stationary variance is `process_noise / (2 decay)`.
    """
    by_step = {line["step"]: line for line in lines if line.get("dynamics")}
    steps = sorted(by_step)
    last = len(steps) - 1
    if last >= _POINTS:
        steps = [steps[round(index * last / (_POINTS - 1))] for index in range(_POINTS)]
    if not steps:
        return {"steps": [], "tokens": [], "layers": {}}
    first = by_step[steps[0]]["dynamics"]
    return {
        "steps": steps,
        "tokens": [by_step[step]["tokens"] for step in steps],
        "layers": {
            layer: {name: [by_step[step]["dynamics"][layer][name] for step in steps] for name in parameters}
            for layer, parameters in first.items()
        },
    }
