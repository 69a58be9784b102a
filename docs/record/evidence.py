"""Every number and figure of README.md and of the two pages of evidence: `python docs/record/evidence.py`.

They come from result files alone. The six rows are the answers for users; `evidence_record.py` has all claims.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import evidence_record
from evidence_answers import (
    PARTS,
    Answer,
    cells_of,
    errors,
    filters,
    less,
    losses_by_model,
    pooled,
    ratio,
    recall_of,
    series,
    tuned_ratios,
    tuned_seeds,
)
from evidence_figures import FIGURES

from rfa.files import write_text_whole
from rfa.forecasting.style import save
from rfa_lab.report.layout import replace_between
from rfa_lab.report.statistics import pooled_difference, pooled_spreads

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "evidence.md")
_BEGIN, _END = "<!-- answers: docs/record/evidence.py -->", "<!-- end of answers -->"
_RFA, _GATE = "x2-riccati-alibi no-innovation", "c4-fox rope-normalised"


class Row(NamedTuple):
    """A claim for users: its words, what is told of the number, seeds, whether it was asked before, and the answer."""

    claim: str
    number: str
    seeds: Callable[[], int]
    asked: str
    of: Callable[[], Answer]


def _on_text(claim: str, asked: str, model: str, against: str, length: int, protocol: str, record: str) -> Row:
    """A row of `pooled`. Its seeds are those that each of the two models has at least."""

    def seeds() -> int:
        models = losses_by_model(record, length, protocol)
        return min(len(models[label]) for label in (model, against))

    return Row(claim, "{}", seeds, asked, partial(pooled, model, against, length, protocol, record))


ROWS = (
    Row(
        "`robust_estimate`, not tuned, has at most 1.05 times the error of the best tuned filter",
        "{} times (the worst of nine)",
        tuned_seeds,
        "before",
        partial(filters, 1.05, ("WoLF", "variational")),
    ),
    _on_text(
        "`rfa` predicts code better than `forget-gate`, the best baseline so far, within the trained length",
        "before *",
        _RFA,
        _GATE,
        256,
        "matched",
        "context",
    ),
    _on_text("The same at eight times the trained length", "before *", _RFA, _GATE, 2048, "matched", "context"),
    _on_text(
        "The paper's model, `sc-rfa`, predicts novels better than `rope` within the trained length",
        "before",
        "m2-sc-rfa",
        "b1-rope",
        128,
        "blocks",
        "novels-small",
    ),
    Row(
        "On irregular series `rfa` is better than a forget gate whose values are rotated",
        "{} times its squared error",
        lambda: sum(one["label"] == "x2 no innovation" for one in series("oscillator")),
        "after",
        partial(errors, "oscillator", "x2 no innovation", "c9"),
    ),
    Row(
        "In recall among readings with heavy-tailed errors Student's t is a better weight than an exponential",
        "{} of the answers",
        lambda: len(recall_of("heavy tails", "student-t", "robust-weight")),
        "before",
        partial(less, "heavy tails", "exponential", 48),
    ),
)


def table() -> str:
    """The six rows in Markdown."""
    lines = ["| claim | difference | seeds | asked | answer |", "| --- | --- | --- | --- | --- |"]
    for row in ROWS:
        found = row.of()
        number = row.number.format(found.number.partition(";")[0].partition(",")[0])
        lines.append(f"| {row.claim} | {number} | {row.seeds()} | {row.asked} | {found.answer} |")
    return "\n".join(lines)


def sentences() -> dict[str, list[str]]:
    """What the text of each page says beside the rows, word for word, by the page's name."""
    near, far = (losses_by_model("context", length, "matched") for length in (256, 2048))
    plain, clock = "c4-fox rope", "x5-content-clock no-innovation"
    normalised, _ = pooled_difference(near, plain, _GATE)
    lead, _ = pooled_difference(near, plain, _RFA)
    left, _ = pooled_difference(near, _GATE, _RFA)
    faster, freedom = pooled_difference(far, _RFA, clock)
    beside = ratio("oscillator", "x2 no innovation", "RoPE and ALiBi", cells_of(series("oscillator"), PARTS, ()))
    others = [each.value for each in tuned_ratios(("WoLF", "variational")).values()]
    better = [100 * (1 - value) for value in others if value < 1]
    gaussian = tuned_ratios(("Kalman",), ("Gaussian",))["Gaussian"]
    spread = {pooled_spreads(near)[_RFA].freedom, freedom}
    novels = pooled_spreads(losses_by_model("novels-small", 128, "blocks"))["b1-rope"].freedom
    return {
        "README.md": [
            f"it beats RoPE with ALiBi's slopes by {100 * (1 - beside.value):.0f} %",
            f"by {min(better):.0f} to {max(better):.0f} %, and level for the ninth",
        ],
        "evidence.md": [
            f"With Gaussian errors it is {100 * (gaussian.value - 1):.1f} % worse than the Kalman filter.",
            f"The forget gate gains {normalised.value:.3f} nats from them.",
            f"Of the lead of `rfa` of {lead.value:.3f} nats, {left.value:.3f} are left.",
            f"By the pooled variance it is {faster.value:.3f} ± {faster.half:.3f} nats better",
            f"`rfa` has {beside.value:.2f} times the squared error.",
            f"({min(spread):.0f} or {max(spread):.0f} degrees of freedom on code, {novels:.0f} on novels)",
            f"the interval ends {(left.value - (left.half or 0.0)):.3f} nats from none",
        ],
    }


def written(page: str) -> str:
    """A page with the rows between its marks. Raises `ValueError` for a page without them."""
    return replace_between(page, _BEGIN, _END, f"\n{table()}\n")


if __name__ == "__main__":
    said = sentences()
    for page in PAGES:
        text = written(page.read_text(encoding="utf-8"))
        write_text_whole(page, text)
        for sentence in said[page.name]:
            if sentence not in text:
                print(f"{page}: must say: {sentence}")
    evidence_record.write()
    for name, draw in FIGURES.items():
        save(draw(), ROOT / "docs" / "figures" / f"{name}.png")
