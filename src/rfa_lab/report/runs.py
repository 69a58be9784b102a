"""Result files of runs: grouped by label, by family and by damping."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


class MissingData(ValueError):
    """Results lack the data of a table or figure.

    A report prints the message instead of the table or figure. Any other exception is a bug.
    """


# One result file: run, label, preset, seed, train_length, curve (steps with tokens and valid_loss), dynamics, and
# evaluations: protocol -> rows (length, loss, perplexity, targets, stderr), books (book -> length -> [sum, targets]).
Run = Mapping[str, Any]


def by_label(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each label, sorted by seed. Labels keep the order of their first runs.

    Raises `MissingData` for two runs of the same label and seed. Their mean would count one seed twice.
    """
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        seeds = groups.setdefault(run["label"], {})
        if run["seed"] in seeds:
            named = f"{seeds[run['seed']]['run']}, {run['run']}"
            raise MissingData(f"runs: got {named} both of label {run['label']} and seed {run['seed']}, expected one")
        seeds[run["seed"]] = run
    return {label: [seeds[seed] for seed in sorted(seeds)] for label, seeds in groups.items()}


def train_lengths(runs: Iterable[Run]) -> list[int]:
    """The different training lengths of runs, in tokens, ascending."""
    return sorted({run["train_length"] for run in runs})


def shared_train_length(runs: Iterable[Run]) -> int | None:
    """The training length of all runs, in tokens; None if they differ."""
    lengths = train_lengths(runs)
    return lengths[0] if len(lengths) == 1 else None


def runs_with_dynamics(runs: Iterable[Run]) -> dict[str, Run]:
    """Of each label the run with the lowest seed that has the parameters of its heads over training."""
    learned = [run for run in runs if (run.get("dynamics") or {}).get("steps")]
    return {label: of[0] for label, of in by_label(learned).items()}


def perplexity_by_length(run: Run, protocol: str) -> dict[int, float]:
    """Perplexities of one run by context length; empty if the run was not evaluated by this protocol."""
    evaluation = (run.get("evaluations") or {}).get(protocol) or {}
    return {int(row["length"]): float(row["perplexity"]) for row in evaluation.get("rows") or ()}


MOST_LINES = 6  # in one panel
BASELINES = ("b1-rope", "b2-alibi")
_ALWAYS = ("rfa", *BASELINES, "m2-sc-rfa")


def main_labels(runs: Sequence[Run], most: int = MOST_LINES) -> list[str]:
    """The labels that stand in the main figures: all of them, or the most important ones if there are too many.

    These are the default, the two baselines and the paper's m2, then the models with the most seeds, and of those the
    ones with the lowest validation perplexity. The test split has no part in the choice.
    """
    groups = by_label(runs)

    def rank(label: str) -> tuple[bool, int, float]:
        found = [run.get("training", {}).get("valid_perplexity") for run in groups[label]]
        known = [value for value in found if value is not None]
        return label not in _ALWAYS, -len(groups[label]), float(np.mean(known)) if known else math.inf

    chosen = sorted(groups, key=rank)[:most]
    return [label for label in groups if label in chosen]


BASELINE = "b1-rope"  # every group is compared with it
_PRESETS = {
    "the paper's models": (
        *("rope", "alibi", "sc-rfa"),
        *("b1-rope", "b2-alibi", "b3-decayed-rope", "b4-sc-rope", "m1-rfa", "m2-sc-rfa", "m3-sc-rfa"),
    ),
    "the paper's ablations of m2": ("m2.",),
    "Riccati priors, variants of m2": ("rfa", "x", "m2-"),
    "controls": ("c", "forget-gate", "b1-rope-as-released", "x7-gated-roper"),  # x7 is a forget gate with turned values
    "controls of series": ("c9-rotation-fox", "c10-rotation-learned"),
}
_OTHERS = "others"


def by_group(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Labels by group, both in order. The preset decides the group; labels of unknown presets come last."""
    found: dict[str, list[str]] = {group: [] for group in (*_PRESETS, _OTHERS)}
    for label, preset in {run["label"]: run["preset"] for run in runs}.items():
        found[_group(preset)].append(label)
    return {group: labels for group, labels in found.items() if labels}


def _group(preset: str) -> str:
    exact = next((group for group, names in _PRESETS.items() if preset in names), None)
    begins = next((group for group, names in _PRESETS.items() if preset.startswith(names)), _OTHERS)
    return exact or begins


_M2, _M3 = ("m2-sc-rfa", "sc-rfa"), "m3-sc-rfa"  # the paper's sweep of the damping has m3 at b = 5
_LEAST_SWEEP = 3  # values of b; m2 and m3 alone are no sweep
_SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps", "backend"}


def damping_of(run: Run) -> float | None:
    """The damping b of a run of SC-RFA.

    None for another model, and for one that differs in more than b and its size or trains its SDE in another way.
    """
    spec = run.get("spec") or {}
    model: dict[str, Any] = spec.get("model") or {}
    options = {name: value for name, value in model.items() if name not in (*_SIZES, "damping")}
    if spec.get("preset") not in (*_M2, _M3) or options or spec.get("one_group"):
        return None
    return float(run["config"]["damping"])


def is_sweep(runs: Sequence[Run]) -> bool:
    """Whether the runs have at least three values of the damping b, which is enough for a table and a figure."""
    return len({damping_of(run) for run in runs} - {None}) >= _LEAST_SWEEP


def damping_by_label(runs: Iterable[Run]) -> dict[str, float]:
    """The damping b of each label of the sweep, smallest first.

    Raises `MissingData` if two labels have the same b, or one label two. A row of the table has one of each.
    """
    found: dict[str, float] = {}
    for run in runs:
        label, damping = run["label"], damping_of(run)
        if damping is None:
            continue
        if found.setdefault(label, damping) != damping:
            raise MissingData(f"runs: got b = {found[label]:g} and {damping:g} of label {label}, expected one")
        if twins := [other for other, b in found.items() if b == damping and other != label]:
            raise MissingData(f"runs: got labels {twins[0]} and {label} both of b = {damping:g}, expected one")
    return dict(sorted(found.items(), key=lambda item: item[1]))


def other_differences(runs: Iterable[Run]) -> str:
    """A sentence on how m3 of the sweep differs from m2 besides b; empty if one of them is missing."""
    configs = {run["spec"]["preset"]: run["config"] for run in runs if damping_of(run) is not None}
    one, other = next((configs[preset] for preset in _M2 if preset in configs), None), configs.get(_M3)
    if one is None or other is None:
        return ""
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name) and name != "damping")
    return f"b = {other['damping']:g} is {_M3}, which differs in {' and '.join(names)}, too." if names else ""
