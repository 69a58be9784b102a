"""What was measured of models: bands over seeds, the noise of seeds, paired differences, and distant tokens."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .runs import MissingData, Run, by_label, perplexity_by_length, shared_train_length
from .statistics import NORMAL_QUANTILE, Difference, LossByBook, mean_and_interval, paired_difference


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

    def curve(run: Run) -> dict[int, float]:
        return {point["tokens"]: math.exp(min(point["valid_loss"], 700.0)) for point in run.get("curve") or ()}

    return _series({run["seed"]: curve(run) for run in runs})


def perplexity_series(runs: Sequence[Run], protocol: str, noise: Mapping[int, float | None] | None = None) -> SeedBand:
    """Test perplexity of one label over context length, at the lengths that all evaluated seeds have.

    `noise` is that of `noise_by_length`: the band of a single seed.
    """
    found = _series({run["seed"]: perplexity_by_length(run, protocol) for run in runs})
    if found.seeds != 1 or noise is None:
        return found
    widths = [math.exp(noise.get(int(length)) or 0.0) for length in found.x]
    low, high = ([mean * width**sign for mean, width in zip(found.mean, widths, strict=True)] for sign in (-1, 1))
    return found._replace(low=low, high=high)


def position_series(runs: Sequence[Run], less: Sequence[float] = ()) -> SeedBand:
    """Loss of one label in nats over the position in the window, smoothed by `log_bins`.

    `less` are losses of the same positions that are subtracted, such as the trigram's.
    """

    def curve(run: Run) -> dict[float, float]:
        losses = position_losses(run)
        return log_bins(np.subtract(losses, less).tolist() if less and losses else losses)

    return _series({run["seed"]: curve(run) for run in runs})


def log_bins(losses: Sequence[float]) -> dict[float, float]:
    """Means over bins of the positions 1, 2, ... by the geometric middle of each bin, two bins from one to its double.

    Each bin has at least one position.
    """
    if not len(losses):
        return {}
    end = len(losses) + 1
    edges = 2.0 ** (np.arange(math.ceil(2 * math.log2(end)) + 1) / 2)
    starts = [int(edge) for edge in dict.fromkeys(edges.round()) if edge < end]
    parts = zip(starts, [*starts[1:], end], strict=True)
    return {math.sqrt(start * (stop - 1)): float(np.mean(losses[start - 1 : stop - 1])) for start, stop in parts}


def position_losses(result: Mapping[str, Any]) -> list[float]:
    """Losses at the positions 1, 2, ... of the longest window, of a run or of the trigram; empty if it has none."""
    return (result.get("by_position") or {}).get("loss") or []


def _series(curves: Mapping[int, Mapping[Any, float]]) -> SeedBand:
    """The band of curves by seed, at the x that all seeds with a curve have."""
    measured = {seed: curve for seed, curve in curves.items() if curve}
    missing = sorted(curves.keys() - measured.keys())
    if not measured:
        return SeedBand([], [], [], [], 0, missing)
    x = sorted(set.intersection(*(set(curve) for curve in measured.values())))
    means = [mean_and_interval([curve[point] for curve in measured.values()]) for point in x]
    halves = [math.nan if mean.half is None else mean.half for mean in means]
    low, high = ([mean.value + sign * half for mean, half in zip(means, halves, strict=True)] for sign in (-1, 1))
    return SeedBand(list(map(float, x)), [mean.value for mean in means], low, high, len(measured), missing)


_MEASURED = 3  # seeds of a model whose noise is measured


def seed_noise(runs: Sequence[Run], length: int, protocol: str) -> float | None:
    """How far a difference of two models of one seed each may lie from 0 by the seed alone, in nats.

    It is the normal quantile of 95 % times the root of the median, over all pairs of models with at least three seeds,
    of the variance over seeds of their difference. The median leaves out a model that fails. It is also a little low:
    the median of the variance of three values is 0.69 of its mean. Half of the pairs are noisier. None with fewer than
    two models of three seeds.
    """
    losses = {
        label: {
            run["seed"]: math.log(found[length])
            for run in of
            if length in (found := perplexity_by_length(run, protocol))
        }
        for label, of in by_label(runs).items()
    }
    variances = []
    for one, other in itertools.combinations(losses.values(), 2):
        shared = sorted(one.keys() & other.keys())
        if len(shared) >= _MEASURED:
            variances.append(np.var([one[seed] - other[seed] for seed in shared], ddof=1))
    if not variances:
        return None
    return float(NORMAL_QUANTILE * math.sqrt(np.median(variances)))


def noise_by_length(runs: Sequence[Run], protocol: str) -> dict[int, float | None]:
    """`seed_noise` at every context length of a protocol, shortest first."""
    return {length: seed_noise(runs, length, protocol) for length in lengths_of(runs, protocol)}


def lengths_of(runs: Iterable[Run], protocol: str) -> list[int]:
    """The context lengths at which any run was evaluated by a protocol, ascending."""
    return sorted({length for run in runs for length in perplexity_by_length(run, protocol)})


RunPairs = Sequence[tuple[Run, Run]]


def pairs_of(runs: Sequence[Run], baseline: Sequence[Run]) -> RunPairs:
    """Pairs of a run of one label and the baseline's run of the same seed."""
    against = {run["seed"]: run for run in baseline}
    return [(run, against[run["seed"]]) for run in runs if run["seed"] in against]


def compare(pairs: RunPairs, length: int, protocol: str) -> tuple[Difference | None, str]:
    """`paired_difference` of pairs of runs at one context length, on the books that all runs have, and a remark."""
    sides = [[_books(pair[side], protocol, length) for pair in pairs] for side in (0, 1)]
    every = [each for side in sides for each in side]
    common, known = set.intersection(*map(set, every)), set.union(*map(set, every))
    if not common:
        return None, "no book in common" if known else "no losses by book"
    try:
        found = paired_difference(*([{book: each[book] for book in common} for each in side] for side in sides))
    except ValueError as error:
        return None, str(error)
    if known - common:
        return found, f"without {', '.join(sorted(known - common))}, not in every run"
    return found, "one book, no interval" if found.over_books is None else ""


def _books(run: Run, protocol: str, length: int) -> LossByBook:
    books = ((run.get("evaluations") or {}).get(protocol) or {}).get("books") or {}
    return {book: tuple(of[str(length)]) for book, of in books.items() if str(length) in of}


def retrieval_scores(runs: Sequence[Run], kind: str) -> Retrieval:
    """Retrieval scores of one label, at the distances that all probed seeds have: means over seeds of each trial.

    Raises `MissingData` if seeds have different numbers of trials.
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
        gains = copying_gains(runs, kind, distance)
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


def copying_gains(runs: Iterable[Run], kind: str, distance: int) -> list[float]:
    """`copying_gain` of the runs for which it is known."""
    return [gain for run in runs if (gain := copying_gain(run, kind, distance)) is not None]


def repeat_distance(runs: Sequence[Run]) -> int | None:
    """The distance of a repeated passage that stands in tables: half the training length, or the next below it.

    None for runs of several training lengths or without such a probe.
    """
    trained = shared_train_length(runs)
    probes = [(run.get("passkey") or {}).get("repeat") or {} for run in runs]
    within = {row["distance"] for probe in probes for row in probe.get("rows", ())}
    return max((each for each in within if trained is not None and 2 * each <= trained), default=None)


TRIGRAM_LABEL = "trigram"


def trigram_of(runs: Iterable[Run]) -> Mapping[str, Any] | None:
    """The trigram that was trained on the tokens of these runs; None if there is none."""
    return next((run["trigram"] for run in runs if run.get("trigram")), None)


def trigram_positions(runs: Sequence[Run]) -> list[float]:
    """The trigram's losses by position, if the runs have theirs at the same positions; otherwise none."""
    known = position_losses(trigram_of(runs) or {})
    lengths = {len(losses) for run in runs if (losses := position_losses(run))}
    return known if lengths == {len(known)} else []
