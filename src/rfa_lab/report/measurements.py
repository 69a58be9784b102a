"""What was measured of a model over length, position, training or distance, combined over seeds; and the trigram's."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .runs import MissingData, Run, by_label, perplexity_by_length, shared_train_length
from .statistics import t_quantile


class SeedBand(NamedTuple):
    """One label's measurements over x: the mean over seeds and the ends of its t interval, NaN for a single seed.

    `missing` lists seeds without any measurement.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int
    missing: list[int]


class Retrieval(NamedTuple):
    """Scores in nats per token over the distance in tokens, by trial: `trials` has the means over seeds.

    `possible` is what perfect copying would gain; None where the files do not say it.
    """

    distances: list[int]
    trials: list[list[float]]
    possible: list[float | None]


def training_series(runs: Sequence[Run]) -> SeedBand:
    """Validation perplexity over training tokens, at the points that all measured seeds have."""
    curves = {
        run["seed"]: {point["tokens"]: _exp(point["valid_loss"]) for point in run.get("curve") or ()} for run in runs
    }
    return _series(curves)


def perplexity_series(runs: Sequence[Run], protocol: str, noise: Mapping[int, float | None] | None = None) -> SeedBand:
    """Test perplexity over context length, at the lengths that all evaluated seeds have.

    Args:
        runs: of one label.
        protocol: of the evaluation.
        noise: by context length, the noise of seeds in nats from `seed_noise`: the band of a single seed.
    """
    found = _series({run["seed"]: perplexity_by_length(run, protocol) for run in runs})
    if found.seeds != 1 or noise is None:
        return found
    widths = [math.exp(noise.get(int(length)) or 0.0) for length in found.x]
    low, high = ([mean * width**sign for mean, width in zip(found.mean, widths, strict=True)] for sign in (-1, 1))
    return found._replace(low=low, high=high)


def position_series(runs: Sequence[Run], less: Sequence[float] = ()) -> SeedBand:
    """Loss in nats over the position in the window, smoothed by `log_bins`.

    Args:
        runs: of one label.
        less: losses of the same positions that are subtracted, such as the trigram's.
    """

    def curve(run: Run) -> dict[float, float]:
        losses = position_losses(run)
        return log_bins(np.subtract(losses, less).tolist() if less and losses else losses)

    return _series({run["seed"]: curve(run) for run in runs})


def log_bins(losses: Sequence[float], per_octave: int = 2) -> dict[float, float]:
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


def retrieval_scores(runs: Sequence[Run], kind: str) -> Retrieval:
    """Retrieval scores of one label, at the distances that all probed seeds have: means over seeds of each trial.

    Raises:
        MissingData: if seeds have different numbers of trials.
    """
    probed = [run["passkey"][kind]["rows"] for run in runs if (run.get("passkey") or {}).get(kind)]
    scores = [{row["distance"]: row["scores"] for row in rows} for rows in probed]
    distances = sorted(set.intersection(*map(set, scores))) if scores else []
    averaged, possible = [], []
    for distance in distances:
        trials = [each[distance] for each in scores]
        if len({len(each) for each in trials}) > 1:
            raise MissingData(
                f"{kind}: got {[len(each) for each in trials]} trials at {distance}, expected equally many"
            )
        averaged.append(np.mean(trials, axis=0).tolist())
        gains = [gain for run in runs if (gain := copying_gain(run, kind, distance)) is not None]
        possible.append(float(np.mean(gains)) if gains else None)
    return Retrieval(distances, averaged, possible)


def copying_gain(run: Run, kind: str, distance: int) -> float | None:
    """What perfect copying would gain in a probe, in nats per token: the loss of all tokens that could be copied.

    Of a repeated passage the first token cannot be copied, because nothing announces it. The loss is the model's own
    without the first copy. A file that does not hold it has the trigram's loss on the same tokens in its place. None if
    there is neither.
    """
    for probes in (run.get("passkey"), (run.get("trigram") or {}).get("passkey")):
        rows = ((probes or {}).get(kind) or {}).get("rows") or ()
        losses = next((row.get("loss_by_token") for row in rows if row["distance"] == distance), None)
        if losses:
            return sum(losses[kind == "repeat" :]) / len(losses)
    return None


def repeat_distance(runs: Sequence[Run]) -> int | None:
    """The distance of a repeated passage that stands in tables: half the training length, or the next below it.

    None for runs of several training lengths or without such a probe.
    """
    trained = shared_train_length(runs)
    probes = [(run.get("passkey") or {}).get("repeat") or {} for run in runs]
    within = {row["distance"] for probe in probes for row in probe.get("rows", ())}
    return max((each for each in within if trained is not None and 2 * each <= trained), default=None)


def trigram_of(runs: Iterable[Run]) -> Mapping[str, Any] | None:
    """The trigram that was trained on the tokens of these runs; None if there is none."""
    return next((run["trigram"] for run in runs if run.get("trigram")), None)


def trigram_positions(runs: Sequence[Run]) -> list[float]:
    """The trigram's losses by position, if the runs have theirs at the same positions; otherwise none."""
    known = position_losses(trigram_of(runs) or {})
    lengths = {len(losses) for run in runs if (losses := position_losses(run))}
    return known if lengths == {len(known)} else []


TRIGRAM_LABEL = "trigram"
MOST_LINES = 6  # in one panel
_ALWAYS = ("b1-rope", "b2-alibi", "m2-sc-rfa")


def main_labels(runs: Sequence[Run], most: int = MOST_LINES) -> list[str]:
    """The labels that stand in the main figures: all of them, or the most important ones if there are too many.

    These are the two baselines and the paper's m2, then the models with the most seeds, and of those the ones with the
    lowest validation perplexity. The test split has no part in the choice.

    Args:
        runs: result files.
        most: number of labels.
    """
    groups = by_label(runs)

    def rank(label: str) -> tuple[bool, int, float]:
        found = [run.get("training", {}).get("valid_perplexity") for run in groups[label]]
        known = [value for value in found if value is not None]
        return label not in _ALWAYS, -len(groups[label]), float(np.mean(known)) if known else math.inf

    chosen = sorted(groups, key=rank)[:most]
    return [label for label in groups if label in chosen]


def position_losses(result: Mapping[str, Any]) -> list[float]:
    """Losses at the positions 1, 2, ... of the longest window, of a run or of the trigram; empty if it has none."""
    return (result.get("by_position") or {}).get("loss") or []


def _series(curves: Mapping[int, Mapping[Any, float]]) -> SeedBand:
    measured = {seed: curve for seed, curve in curves.items() if curve}
    missing = sorted(curves.keys() - measured.keys())
    if not measured:
        return SeedBand([], [], [], [], 0, missing)
    x = sorted(set.intersection(*(set(curve) for curve in measured.values())))
    values = np.array([[curve[point] for point in x] for curve in measured.values()])
    mean = values.mean(0)
    half = np.full(mean.shape, np.nan)
    if len(values) > 1:
        half = t_quantile(len(values)) * values.std(0, ddof=1) / math.sqrt(len(values))
    low, high = ((mean + sign * half).tolist() for sign in (-1, 1))
    return SeedBand(list(map(float, x)), mean.tolist(), low, high, len(measured), missing)


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))
