"""The result of a recipe's run, collected from its run folder and its evaluation."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rfa.environment import environment
from rfa_lab.results import RESULT_FORMAT, read_result
from rfa_lab.training import RunFolder
from rfa_lab.training.callbacks import read_metrics

from .rates import losses_of, possible_rates
from .recipe import PlannedRun, Recipe

_POINTS = 64  # maximum number of stored steps of each head's parameters


def result_path(out: Path, run: PlannedRun) -> Path:
    """The path of the result of a run."""
    return out / "results" / f"{run.name}.json"


def make_result(
    recipe: Recipe,
    run: PlannedRun,
    folder: RunFolder,
    record: Mapping[str, Any],
    evaluated: Mapping[str, Any],
    tried: Mapping[float, Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of the result file of a finished run.

    Args:
        recipe: the recipe.
        run: of the recipe.
        folder: the run folder, for `metrics.jsonl`.
        record: content of run.json.
        evaluated: the evaluation from `rfa_lab.evaluation.full_evaluation`.
        tried: content of run.json of the trial of each learning rate.
    """
    evaluated = dict(evaluated)
    parts = [{"environment": made} for made in evaluated.pop("environments", [evaluated.get("environment")])]
    measured, lines = record["result"], read_metrics(folder)
    speed = measured["tokens_per_second"]
    return {
        **evaluated,
        "format": RESULT_FORMAT,
        "recipe": recipe.name,
        "run": run.name,
        "label": run.label,
        "preset": run.spec.preset,
        "seed": run.spec.seed,
        "train_length": run.spec.length,
        **_entry(recipe, run),
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


def versions_of(*made: Mapping[str, Any]) -> list[str]:
    """The versions and commits of rfa in words that made some runs, each once.

    Args:
        made: contents of run.json or of results.
    """
    environments = [one for each in made for one in (each.get("environment", {}), *each.get("resumed", []))]
    named = [f"{one.get('rfa')}{f' {commit}' if (commit := one.get('commit')) else ''}" for one in environments if one]
    return list(dict.fromkeys(named))


def dynamics_over_training(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The parameters of each layer and head over training, at 64 steps at most, with the first and the last step.

    Args:
        lines: of `metrics.jsonl`.

    Returns:
        `steps`, `tokens` and `layers`; all are empty for a model without dynamics. `layers` has for each layer and
        parameter a list over these steps of lists over heads. The parameters are `process_noise` sigma^2, `key_noise`
        eta^2, `query_noise` gamma^2, `robustness` nu_s, `inverse_temperature` beta_s, `decay` mu, `noise_floor`
        sigma_0^2 and the regime's `alpha`. The stationary variance `sigma~^2` is `process_noise / (2 decay)`.
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


def finished_result(recipe: Recipe, run: PlannedRun, out: Path) -> dict[str, Any] | None:
    """The result of a run; None if it has no result yet.

    Raises:
        ValueError: as `read_result`, or if the result is not of this run of the recipe.
    """
    path = result_path(out, run)
    if not path.exists():
        return None
    result, wanted = read_result(path), {"recipe": recipe.name, "run": run.name, **_entry(recipe, run)}
    for name, value in wanted.items():
        if name == "spec":
            value = with_rate_of(result["spec"], value, run.rates)
        same = with_names_only(result[name]) == with_names_only(value) if name == "spec" else result[name] == value
        if not same:
            differs = _difference_in_words(result[name], value)
            raise ValueError(f"result: {path} is of another {name} than {recipe.path} names: {name}{differs}")
    return result


def with_rate_of(found: Mapping[str, Any], wanted: dict[str, Any], rates: Sequence[float]) -> dict[str, Any]:
    """The wanted specification with the learning rate of the one that was found, if it may be chosen from `rates`."""
    rate = found.get("learning_rate")
    return {**wanted, "learning_rate": rate} if rate in possible_rates(rates) else wanted


def with_names_only(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A specification with names instead of paths, because another checkout can have its data in other folders.

    `gutenberg:novels` and a folder `novels` have the same name: a check of the text's fingerprint tells them apart.
    """
    tokenizer = "gpt2" if spec["tokenizer"].startswith("gpt2:") else spec["tokenizer"]
    return {**spec, "data": Path(spec["data"]).name.removeprefix("gutenberg:"), "tokenizer": tokenizer}


def _difference_in_words(found: Any, wanted: Any) -> str:
    """The first difference of two values, in words."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *found]:
            if found.get(key) != wanted.get(key):
                return f".{key}{_difference_in_words(found.get(key), wanted.get(key))}"
    return f": got {found!r}, expected {wanted!r}"


def _entry(recipe: Recipe, run: PlannedRun) -> dict[str, Any]:
    """The recipe's entry of a run. Paths stay as the recipe writes them, so that results can move with the recipe."""
    return {"spec": run.spec.to_dict(), "evaluation": recipe.asked_of(run)}
