"""The figures of docs/evidence.md, one for each of its rows, from result files."""

from collections.abc import Callable, Mapping
from functools import partial

import matplotlib.pyplot as plt
from evidence_answers import (
    PARTS,
    Difference,
    cells_of,
    interval_of,
    losses_by_model,
    ratio,
    series,
    tuned_ratios,
    weight_difference,
)
from matplotlib.figure import Figure

from rfa.forecasting.style import COLOURS, MUTED, PAGE, lengths_axis, looks, styled
from rfa_lab.report.statistics import pooled_difference, pooled_mean

_RFA = "x2-riccati-alibi no-innovation"
# names for readers, and the labels of the record on code
ON_CODE = {
    "rope": "b1-rope",
    "rope, normalised": "b1-rope normalised",
    "alibi": "b2-alibi",
    "alibi, normalised": "b2-alibi normalised",
    "forget gate, not normalised": "c4-fox rope",
    "forget-gate": "c4-fox rope-normalised",
    "sc-rfa": "m2-sc-rfa",
    "sc-rfa as released": "m2-sc-rfa as-released",
    "rfa, exponential weight": f"{_RFA}-exponential",
    "content clock": "x5-content-clock no-innovation",
}
OVER_LENGTH = ("rope", "alibi", "forget-gate", "sc-rfa")
ON_NOVELS = {
    "alibi": "b2-alibi",
    "forget gate, not normalised": "c4-fox rope",
    "sc-rfa": "m2-sc-rfa",
    "sc-rfa as released": "m2-sc-rfa as-released",
    "rfa, innovation step": "x2-riccati-alibi",
}
OF_SERIES = {
    "RoPE": "RoPE",
    "ALiBi": "ALiBi",
    "RoPE and ALiBi": "RoPE and ALiBi",
    "forget gate": "forget gate with RoPE",
    "forget gate, values turned": "c9",
    "sc-rfa": "m2",
}


def _points(found: Mapping[str, Difference], label: str, line: float = 0.0, aim: float | None = None) -> Figure:
    """A line a name: a point with its interval, beside the place of no difference."""
    figure, axes = plt.subplots(figsize=(0.8 * PAGE, 0.6 + 0.22 * len(found)))
    axes.axvline(line, color="black", linewidth=0.8)
    if aim is not None:
        axes.axvline(aim, color=MUTED, linewidth=0.8, linestyle="--")
    for place, each in enumerate(found.values()):
        if each.low is not None and each.high is not None:
            axes.plot([each.low, each.high], [place, place], color=COLOURS[0])
        axes.plot(each.value, place, marker="o", color=COLOURS[0])
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel(label)
    return figure


@styled
def of_filters() -> Figure:
    """The error of the robust filter over that of the best tuned filter, by the kind of errors."""
    return _points(tuned_ratios(("WoLF", "variational")), "error / that of the best tuned filter", line=1.0, aim=1.05)


@styled
def on_text(record: str, protocol: str, length: int, named: Mapping[str, str], base: str, said: str) -> Figure:
    """The loss of each model less that of one, with intervals of the pooled variance."""
    models = losses_by_model(record, length, protocol)
    known = {name: label for name, label in named.items() if label in models}
    found = {name: interval_of(pooled_difference(models, label, base)[0]) for name, label in known.items()}
    return _points(found, f"nats a token, less those of {said}")


@styled
def over_length() -> Figure:
    """The loss of five models on the same code over the length of their context."""
    figure, axes = plt.subplots(figsize=(0.8 * PAGE, 2.7))
    lengths = (256, 512, 1024, 2048)
    by_length = {length: losses_by_model("context", length, "matched") for length in lengths}
    named = {"rfa": _RFA, **{name: ON_CODE[name] for name in OVER_LENGTH}}
    for name, look in looks(list(named)).items():
        means = [pooled_mean(by_length[length], named[name]) for length in lengths]
        axes.plot(lengths, [mean.value for mean in means], label=name, **look)
        low, high = ([mean.value + sign * (mean.half or 0.0) for mean in means] for sign in (-1, 1))
        axes.fill_between(lengths, low, high, color=look["color"], alpha=0.2, linewidth=0)
    lengths_axis(axes, list(lengths), 256)
    axes.set(xlabel="tokens of context", ylabel="nats a token")
    axes.legend()
    return figure


@styled
def of_series() -> Figure:
    """The squared error of networks over that of the network with `rfa`, on an oscillator, all columns."""
    cells = cells_of(series("oscillator"), PARTS, ())
    found = {name: ratio("oscillator", label, "x2 no innovation", cells) for name, label in OF_SERIES.items()}
    return _points(found, "squared error / that of rfa", line=1.0)


@styled
def of_robust_weight() -> Figure:
    """The share of right answers with Student's t less that with an exponential weight, by setting and length."""
    settings = ("corrupted in the test", "corrupted", "heavy tails", "stale keys")
    found = {
        f"{setting}, {length} tokens": weight_difference(setting, "exponential", length)
        for setting in settings
        for length in (48, 192, 384)
    }
    return _points(found, "share of right answers, less that with an exponential weight")


FIGURES: dict[str, Callable[[], Figure]] = {
    "evidence-filters": of_filters,
    "evidence-code": partial(on_text, "context", "matched", 256, ON_CODE, _RFA, "rfa"),
    "evidence-length": over_length,
    "evidence-novels": partial(on_text, "novels-small", "blocks", 128, ON_NOVELS, "b1-rope", "rope"),
    "evidence-series": of_series,
    "evidence-robust": of_robust_weight,
}
