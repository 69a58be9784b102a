"""Result files of runs: grouped by label, by family and by damping, and combined over seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class MissingData(ValueError):
    """Results lack the data of a table or figure.

    A report prints the message instead of the table or figure. Any other exception is a bug.
    """


# One result file: run, label, preset, seed, train_length, curve (steps with tokens and valid_loss), dynamics, and
# evaluations: protocol -> rows (length, loss, perplexity, targets, stderr), books (book -> length -> [sum, targets]).
Run = Mapping[str, Any]


class SeedBand(NamedTuple):
    """One label's measurements over x: mean, lowest and highest over seeds. `missing` lists seeds without any."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int
    missing: list[int]


class Retrieval(NamedTuple):
    """Scores in nats per token over the distance in tokens: the mean over seeds and trials, and its standard error.

    The standard error is over trials, with seeds averaged first.
    """

    distances: list[float]
    mean: list[float]
    error: list[float]


def by_label(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each label, sorted by seed. Labels keep the order of their first runs.

    Raises:
        MissingData: if two runs have the same label and seed. Their mean would count one seed twice.
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


def labels_with_dynamics(runs: Iterable[Run]) -> list[str]:
    """Labels with a run that has the parameters of its heads over training."""
    return list(dict.fromkeys(run["label"] for run in runs if _has_dynamics(run)))


def run_with_dynamics(runs: Iterable[Run], label: str) -> Run:
    """The run with the lowest seed of a label that has the parameters of its heads over training.

    Raises:
        MissingData: if there is no such run.
    """
    found = [run for run in runs if run["label"] == label and _has_dynamics(run)]
    if not found:
        raise MissingData(f"runs: got none of {label} with its parameters over training, expected at least one")
    return min(found, key=lambda run: run["seed"])


def training_series(runs: Sequence[Run]) -> SeedBand:
    """Validation perplexity over training tokens, at the points that all measured seeds have."""
    curves = {
        run["seed"]: {point["tokens"]: _exp(point["valid_loss"]) for point in run.get("curve") or ()} for run in runs
    }
    return _series(curves)


def perplexity_series(runs: Sequence[Run], protocol: str) -> SeedBand:
    """Test perplexity over context length, at the lengths that all evaluated seeds have."""
    return _series({run["seed"]: perplexity_by_length(run, protocol) for run in runs})


def position_series(runs: Sequence[Run]) -> SeedBand:
    """Loss in nats over the position in the window, smoothed by `log_bins`."""
    return _series({run["seed"]: log_bins((run.get("by_position") or {}).get("loss") or ()) for run in runs})


def log_bins(losses: Sequence[float], per_octave: int = 4) -> dict[float, float]:
    """Means over bins of positions, by the geometric middle of each bin. The bins' widths grow by equal factors.

    Args:
        losses: of the positions 1, 2, ...; each bin has at least one position.
        per_octave: number of bins from a position to its double.
    """
    if not len(losses):
        return {}
    end = len(losses) + 1
    edges = 2.0 ** (np.arange(math.ceil(per_octave * math.log2(end)) + 1) / per_octave)
    starts = [int(edge) for edge in dict.fromkeys(edges.round()) if edge < end]
    parts = zip(starts, [*starts[1:], end], strict=True)
    return {math.sqrt(start * (stop - 1)): float(np.mean(losses[start - 1 : stop - 1])) for start, stop in parts}


def perplexity_by_length(run: Run, protocol: str) -> dict[int, float]:
    """Perplexities of one run by context length; empty if the run was not evaluated by this protocol."""
    evaluation = (run.get("evaluations") or {}).get(protocol) or {}
    return {int(row["length"]): float(row["perplexity"]) for row in evaluation.get("rows") or ()}


def retrieval_scores(runs: Sequence[Run], kind: str) -> Retrieval:
    """Retrieval scores of one label, at the distances that all probed seeds have.

    Raises:
        MissingData: if seeds have different numbers of trials.
    """
    probed = [run["passkey"][kind]["rows"] for run in runs if (run.get("passkey") or {}).get(kind)]
    scores = [{row["distance"]: row["scores"] for row in rows} for rows in probed]
    distances = sorted(set.intersection(*map(set, scores))) if scores else []
    mean, error = [], []
    for distance in distances:
        trials = [each[distance] for each in scores]
        if len({len(each) for each in trials}) > 1:
            raise MissingData(
                f"{kind}: got {[len(each) for each in trials]} trials at {distance}, expected equally many"
            )
        averaged = np.mean(trials, axis=0)
        mean.append(float(averaged.mean()))
        error.append(float(averaged.std(ddof=1) / len(averaged) ** 0.5))
    return Retrieval(list(map(float, distances)), mean, error)


def _has_dynamics(run: Run) -> bool:
    return bool((run.get("dynamics") or {}).get("steps"))


def _series(curves: Mapping[int, Mapping[Any, float]]) -> SeedBand:
    measured = {seed: curve for seed, curve in curves.items() if curve}
    missing = sorted(curves.keys() - measured.keys())
    if not measured:
        return SeedBand([], [], [], [], 0, missing)
    x = sorted(set.intersection(*(set(curve) for curve in measured.values())))
    values = np.array([[curve[point] for point in x] for curve in measured.values()])
    bands = values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()
    return SeedBand(list(map(float, x)), *bands, len(measured), missing)


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))


BASELINE = "b1-rope"  # every group is compared with it
_PRESETS = {
    "the paper's models": ("b1-rope", "b2-alibi", "b3-decayed-rope", "b4-sc-rope", "m1-rfa", "m2-sc-rfa", "m3-sc-rfa"),
    "the paper's ablations of m2": ("m2.",),
    "Riccati priors, variants of m2": ("x", "m2-"),
    "controls": ("c", "b1-rope-as-released"),
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


_SWEPT = ("m2-sc-rfa", "m3-sc-rfa")  # the paper's sweep of the damping has m3 at b = 5
_LEAST_SWEEP = 3  # values of b; m2 and m3 alone are no sweep
_SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps", "backend"}


def damping_of(run: Run) -> float | None:
    """The damping b of a run of SC-RFA.

    None for another model, and for one that differs in more than b and its size or trains its SDE in another way.
    """
    spec = run.get("spec") or {}
    model: dict[str, Any] = spec.get("model") or {}
    if spec.get("preset") not in _SWEPT or model.keys() - _SIZES - {"damping"} or spec.get("one_group"):
        return None
    return float(run["config"]["damping"])


def is_sweep(runs: Sequence[Run]) -> bool:
    """Whether the runs have at least three values of the damping b, which is enough for a table and a figure."""
    return len({damping_of(run) for run in runs} - {None}) >= _LEAST_SWEEP


def damping_by_label(runs: Iterable[Run]) -> dict[str, float]:
    """The damping b of each label of the sweep, smallest first.

    Raises:
        MissingData: if two labels have the same b, or one label has two values. A row of the table has one of each.
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
    if len(configs) < len(_SWEPT):
        return ""
    one, other = (configs[preset] for preset in _SWEPT)
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name) and name != "damping")
    return f"b = {other['damping']:g} is {_SWEPT[1]}, which differs in {' and '.join(names)}, too." if names else ""
