"""Measured differences and their answers, from the result files: what docs/record/evidence_record.py writes and draws.

An answer is "holds" or "refuted" where every interval of a difference lies on one side, and "open" where one does not.
A difference of a single seed is "within a seed" or "not tested".
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recall_record import digits_of

from rfa_lab.report.measurements import (
    compare,
    copying_gain,
    pairs_of,
    repeat_distance,
    retrieval_scores,
    seed_noise,
)
from rfa_lab.report.records import accuracy_by_seed, is_learned, tokens_until
from rfa_lab.report.runs import by_label, perplexity_by_length
from rfa_lab.report.statistics import WITHIN_A_SEED, Mean, mean_and_interval, pooled_difference, verdict
from rfa_lab.results import read_record, read_results

ROOT = Path(__file__).parents[2]
RECORDS, BENCHMARKS = ROOT / "results", ROOT / "benchmarks" / "results"
HOLDS, OPEN, REFUTED, NOT_TESTED = "holds", "open", "refuted", "not tested"
_MINUS = "\N{MINUS SIGN}"
PARTS = ("filter", "forecast")  # of a record of series
Labelled = dict[str, list[Any]]
Cells = Sequence[tuple[str, str]]  # column and part


class Answer(NamedTuple):
    """What is known of a claim.

    answer: one of the words above.
    number: the difference with its intervals, as text.
    """

    answer: str
    number: str


class Difference(NamedTuple):
    """A difference to a baseline with the ends of its interval over seeds, None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None


def answer(low: float | None, high: float | None, aim: float = 0.0, below: bool = True) -> str:
    """Whether an interval lies below an aim: "holds", "refuted", or "open" where it contains the aim.

    Args:
        low, high: ends of the interval; None where there is none.
        aim: the number to be compared with.
        below: whether the claim is that the number is below the aim; otherwise above it.
    """
    if low is None or high is None:
        return NOT_TESTED
    if low <= aim <= high:
        return OPEN
    return HOLDS if (high < aim) == below else REFUTED


def signed(value: float, digits: int = 3) -> str:
    """A number with its sign."""
    return f"{value:+.{digits}f}".replace("-", _MINUS)


@functools.cache
def language(record: str) -> Labelled:
    """The runs of a record of language models, by label; none where there is no record."""
    return by_label(read_results(RECORDS / record).runs) if (RECORDS / record / "results").is_dir() else {}


@functools.cache
def series(name: str) -> list[dict[str, Any]]:
    """The results of a record of series."""
    return read_record(RECORDS / f"series-{name}", "series")


@functools.cache
def recall(record: str = "recall") -> list[dict[str, Any]]:
    """The results of a record of recall; none where there is no record."""
    return read_record(RECORDS / record, "recall") if (RECORDS / record).is_dir() else []


def text(model: str, against: str, length: int, protocol: str = "blocks", record: str = "novels-small") -> Answer:
    """Whether a model has the lower perplexity, in nats a token, over seeds and over books (or files of code)."""
    groups = language(record)
    runs = [run for each in groups.values() for run in each]
    pairs = pairs_of(groups.get(model, []), groups.get(against, []))
    if not pairs:
        return Answer(NOT_TESTED, "no result yet")
    found, _ = compare(pairs, length, protocol)
    if found is None or found.over_books is None:
        raise ValueError(f"{model} and {against}: got no interval over books, expected one")
    number = f"{signed(found.value)}{'' if found.half is None else f' ± {found.half:.3f}'}"
    low, high = found.over_books
    number += f" [{signed(low)}, {signed(high)}] nats{_few(len(pairs))}"
    if found.half is None:
        within = verdict(found, seed_noise(runs, length, protocol)) == WITHIN_A_SEED
        return Answer(WITHIN_A_SEED if within else NOT_TESTED, number)
    over_seeds = answer(found.value - found.half, found.value + found.half)
    over_books = answer(low, high)
    return Answer(over_seeds if over_seeds == over_books else OPEN, number)


def losses_by_model(record: str, length: int, protocol: str) -> dict[str, list[float]]:
    """The loss of each seed in nats a token, by model, of the runs with as many steps as RoPE has."""
    groups = language(record)
    steps = groups["b1-rope"][0]["spec"]["max_steps"]
    losses: dict[str, list[float]] = {}
    for label, runs in groups.items():
        scored = [perplexity_by_length(run, protocol) for run in runs if run["spec"]["max_steps"] == steps]
        if known := [math.log(found[length]) for found in scored if length in found]:
            losses[label] = known
    return losses


def pooled(model: str, against: str, length: int, protocol: str, record: str) -> Answer:
    """As `text`, but over seeds by the variance that is pooled over the models of the record."""
    mean, _ = pooled_difference(losses_by_model(record, length, protocol), model, against)
    found, _ = compare(pairs_of(language(record)[model], language(record)[against]), length, protocol)
    over_seeds = interval_of(mean)
    answers = {answer(over_seeds.low, over_seeds.high)}
    if found is not None and found.over_books is not None:
        answers.add(answer(*found.over_books))
    number = f"{signed(mean.value)} ± {mean.half or 0.0:.3f} nats"
    return Answer(answers.pop() if len(answers) == 1 else OPEN, number)


def interval_of(mean: Mean) -> Difference:
    """A mean with the ends of its interval."""
    half = mean.half
    return Difference(mean.value) if half is None else Difference(mean.value, mean.value - half, mean.value + half)


def _few(seeds: int) -> str:
    """The number of seeds in words, where it is less than three."""
    return {1: ", one seed", 2: ", two seeds"}.get(seeds, "")


def copied(least: float) -> Answer:
    """Whether the model that gains most from a repeated passage gains at least a share of perfect copying."""
    runs = [run for each in language("novels-small").values() for run in each]
    distance = repeat_distance(runs)
    possible = None if distance is None else copying_gain(runs[0], "repeat", distance)
    if distance is None or possible is None:
        raise ValueError("record: got one without a repeated passage, expected one")
    shares = {}
    for label, of in language("novels-small").items():
        scores = retrieval_scores(of, "repeat")
        mean = mean_and_interval(scores.trials[scores.distances.index(distance)])
        if mean.half is not None:
            shares[label] = Mean(mean.value / possible, mean.half / possible)
    label, most = max(shares.items(), key=lambda item: item[1].value)
    number = f"{100 * most.value:.1f} ± {100 * (most.half or 0.0):.1f} % of it (the most: {label}; ± over trials)"
    low, high = (max(one.value + sign * (one.half or 0.0) for one in shares.values()) for sign in (-1, 1))
    return Answer(answer(low, high, least, below=False), number)


def cells_of(results: Sequence[Mapping[str, Any]], parts: Sequence[str], columns: Sequence[str]) -> Cells:
    """The columns and parts of a record that are scored; all columns where none is named."""
    found = [(column, part) for column, scored in results[0]["scores"].items() for part in scored if part in parts]
    return [cell for cell in found if not columns or cell[0] in columns]


def ratio(name: str, model: str, against: str, cells: Cells) -> Difference:
    """The geometric mean, over cells of a record and over seeds, of ratios of squared errors, with its t interval."""
    scores: dict[str, dict[int, float]] = {model: {}, against: {}}
    for one in series(name):
        if one["label"] in scores:
            logs = [math.log(one["scores"][column][part]["mse"]) for column, part in cells]
            scores[one["label"]][one["seed"]] = sum(logs) / len(logs)
    own, other = scores[model], scores[against]
    if len(other) == 1 and not is_learned(series(name), against):
        other = dict.fromkeys(own, next(iter(other.values())))
    mean = mean_and_interval([own[seed] - other[seed] for seed in own if seed in other])
    ends = () if mean.half is None else (math.exp(mean.value - mean.half), math.exp(mean.value + mean.half))
    return Difference(math.exp(mean.value), *ends)


def errors(
    name: str,
    model: str,
    against: str,
    *,
    parts: Sequence[str] = PARTS,
    columns: Sequence[str] = (),
    aim: float = 1.0,
    worst: bool = False,
) -> Answer:
    """Whether a network's squared error over another's is below an aim: in the mean of columns, or in the worst one."""
    cells = cells_of(series(name), parts, columns)
    each = [ratio(name, model, against, [cell]) for cell in cells]
    found = max(each, key=lambda one: one.value) if worst else ratio(name, model, against, cells)
    if found.low is None or found.high is None:
        raise ValueError(f"{model} and {against}: got one seed, expected an interval")
    number = f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
    if len(cells) > 1:
        holding = sum(answer(one.low, one.high, aim) == HOLDS for one in each)
        number += f", the worst of {len(cells)}" if worst else f"; in {holding} of {len(cells)} columns by itself"
    return Answer(answer(found.low, found.high, aim), number)


def recall_of(task: str, model: str, record: str = "recall") -> list[dict[str, Any]]:
    """The results of a model in a task of recall, one a seed."""
    return [one for one in recall(record) if (one["task"], one["label"]) == (task, model)]


def accuracies(task: str, model: str, length: int) -> dict[int, float]:
    """The accuracy in a task at a length, by seed."""
    return accuracy_by_seed(recall_of(task, model), length)


def weighed(task: str, weight: str, against: str, length: int) -> Answer:
    """Whether a weight answers more questions than another where nothing else differs."""
    own, other = (accuracy_by_seed(recall_of(task, label, "robust-weight"), length) for label in (weight, against))
    return of_seeds(own, other, "{:.3f}", below=False)


def weight_difference(task: str, against: str, length: int) -> Difference:
    """The share of right answers with Student's t less that with another weight, where nothing else differs."""
    own, other = (accuracy_by_seed(recall_of(task, label, "robust-weight"), length) for label in ("student-t", against))
    return interval_of(mean_and_interval([own[seed] - other[seed] for seed in sorted(own)]))


def less(task: str, against: str, length: int) -> Answer:
    """As `weighed`, of Student's t, with the difference alone as its number."""
    found = weight_difference(task, against, length)
    assert found.high is not None  # of five seeds
    number = f"{signed(found.value)} ± {found.high - found.value:.3f}"
    return Answer(answer(found.low, found.high, below=False), number)


def recalled(task: str, model: str, against: str, length: int) -> Answer:
    """Whether a model answers more questions than another; with one seed the shares of right answers alone."""
    own, other = accuracies(task, model, length), accuracies(task, against, length)
    digits = digits_of([own[seed] - other[seed] for seed in own if seed in other])
    found = of_seeds(own, other, f"{{:.{digits}f}}", below=False)
    unlearnt = []
    for label in (model, against):
        reached = [tokens_until(one) for one in recall_of(task, label)]
        if failed := reached.count(None):
            unlearnt.append(f"{label.partition('-')[0]} in {failed} of {len(reached)}")
    return found._replace(number=f"{found.number}; not learnt: {', '.join(unlearnt)}" if unlearnt else found.number)


def learnt(task: str, model: str, against: str) -> Answer:
    """Whether a model needs fewer training tokens than another until 99 % of its answers are right."""
    own, other = (
        {one["seed"]: tokens for one in recall_of(task, label) if (tokens := tokens_until(one)) is not None}
        for label in (model, against)
    )
    return of_seeds(own, other, "{:,.0f}", below=True)


def of_seeds(own: Mapping[int, float], other: Mapping[int, float], form: str, below: bool) -> Answer:
    """Whether a model's numbers, by seed, are below or above another's: the t interval of their paired difference."""
    seeds = sorted(own.keys() & other.keys())
    if not seeds:
        return Answer(NOT_TESTED, "no result yet")
    means = [sum(each[seed] for seed in seeds) / len(seeds) for each in (own, other)]
    number = f"{form.format(means[0])} against {form.format(means[1])}"
    found = mean_and_interval([own[seed] - other[seed] for seed in seeds])
    if found.half is None:
        return Answer(NOT_TESTED, f"{number}{_few(len(seeds))}")
    number += f", difference ± {form.format(found.half)}{_few(len(seeds))}"
    return Answer(answer(found.value - found.half, found.value + found.half, below=below), number)


def tuned_ratios(peers: Sequence[str], kinds: Sequence[str] = ()) -> dict[str, Difference]:
    """The error of `robust_estimate` over the best peer's, by the kind of errors: means over seeds with intervals.

    Args:
        peers: names of filters; the one with the least error over all seeds is the best.
        kinds: of the errors; all by default.
    """
    lines = json.loads((BENCHMARKS / "filtering.json").read_text("utf-8"))["tracker"]
    found: dict[str, Difference] = {}
    for kind in dict.fromkeys(line["noise"] for line in lines):
        of = {line["estimator"]: line["errors"] for line in lines if line["noise"] == kind}
        best = min(peers, key=lambda name: sum(error**2 for error in of[name]))
        if not kinds or kind in kinds:
            ratios = [mine / its for mine, its in zip(of["rfa"], of[best], strict=True)]
            found[kind] = interval_of(mean_and_interval(ratios))
    return found


def tuned_seeds() -> int:
    """The number of seeds of these ratios."""
    return len(json.loads((BENCHMARKS / "filtering.json").read_text("utf-8"))["tracker"][0]["errors"])


def filters(aim: float, peers: Sequence[str], kinds: Sequence[str] = ()) -> Answer:
    """Whether the error of `robust_estimate` over the best peer's is below an aim, in the worst kind of errors.

    The arguments but `aim` are those of `tuned_ratios`.
    """
    found = tuned_ratios(peers, kinds)
    kind, most = max(found.items(), key=lambda item: item[1].value)
    assert most.low is not None
    assert most.high is not None  # of 20 seeds
    number = f"{most.value:.3f} ± {(most.high - most.low) / 2:.3f}"
    number += f", the worst of {len(found)} ({kind})" if len(found) > 1 else ""
    return Answer(answer(most.low, most.high, aim), number)


def cost(aim: float, file: str) -> Answer:
    """Whether a training step of m2 at the paper's size takes less than so many times that of `b1-rope`.

    The file of timings is in benchmarks/results.
    """
    lines = map(json.loads, (BENCHMARKS / file).read_text("utf-8").splitlines())
    wanted = ("step", "m2-sc-rfa", "b1-rope")
    steps = [line for line in lines if (line["benchmark"], line["preset"], line.get("peer")) == wanted]
    largest = max(steps, key=lambda line: line["batch"])
    mean = mean_and_interval(largest["ratios"])
    half = mean.half or 0.0
    number = f"{mean.value:.2f} ± {half:.2f} times RoPE's ({len(largest['ratios'])} rounds of one process)"
    return Answer(answer(mean.value - half, mean.value + half, aim), number)
