"""The tables of replication*.md and the figure of replication.md: `python docs/record/replication_tables.py`.

Both are made from the record in results/.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from rfa.files import write_text_whole
from rfa.forecasting.style import lengths_axis, looks, plain_numbers, save, styled
from rfa_lab.report.figures.curves import draw_reference, draw_series, limits
from rfa_lab.report.layout import Cell, NumberCell, Table, markdown, replace_between
from rfa_lab.report.measurements import (
    TRIGRAM_LABEL,
    copying_gain,
    pairs_of,
    perplexity_series,
    position_losses,
    repeat_distance,
    retrieval_scores,
    seed_noise,
    trigram_of,
)
from rfa_lab.report.runs import Run, by_label, perplexity_by_length
from rfa_lab.report.statistics import interval_cell, mean_and_interval
from rfa_lab.report.tables import difference_cell, gain_cell
from rfa_lab.results import read_planned, read_results

PAGE = Path(__file__).with_name("replication-details.md")
SHORT = Path(__file__).with_name("replication.md")
RECORD = Path(__file__).parents[2] / "results" / "novels-small"
FIGURE = Path(__file__).parents[1] / "figures" / "length.png"
PROTOCOLS = ("blocks", "matched")
DRAWN = {  # the models of the table in docs/record/replication.md, at most six lines a panel with the trigram
    "the paper's models": ("b1-rope", "b2-alibi", "m1-rfa", "m2-sc-rfa", "m3-sc-rfa"),
    "as released, and beyond the paper": (
        "m2-sc-rfa as-released",
        "x2-riccati-alibi",
        "x4-content-riccati no-innovation",
        "c7-rope-alibi-innovation",
        "c4-fox rope",
    ),
}
Groups = dict[str, list[Run]]
PAIRS = (  # what the page's claims compare
    ("m2-sc-rfa", "b1-rope"),
    ("m1-rfa", "b1-rope"),
    ("m3-sc-rfa", "b1-rope"),
    ("m3-sc-rfa", "m2-sc-rfa"),
    ("m1-rfa", "m2-sc-rfa"),
    ("b3-decayed-rope", "b1-rope"),
    ("b4-sc-rope", "b3-decayed-rope"),
    ("b3-decayed-rope", "m1-rfa"),
    ("b4-sc-rope", "b1-rope"),
    ("m2-sc-rfa", "b3-decayed-rope"),
    ("m2-sc-rfa", "b4-sc-rope"),
    ("m2-no-innovation", "b4-sc-rope"),
    ("m2-sc-rfa", "b2-alibi"),
    ("m3-sc-rfa", "b2-alibi"),
    ("b2-alibi", "b1-rope"),
    ("c7-rope-alibi-innovation", "b1-rope"),
    ("c7-rope-alibi-innovation", "b2-alibi"),
    ("m2.1-exponential", "m2-sc-rfa"),
    ("m2.2-flat-prior", "m2-sc-rfa"),
    ("m2.3-no-gate", "m2-sc-rfa"),
    ("m2.4-no-value-rotation", "m2-sc-rfa"),
    ("m2.5-no-rotation", "m2-sc-rfa"),
    ("m2.5-no-rotation", "b2-alibi"),
    ("m2.6-pure-rotation", "m2-sc-rfa"),
    ("m2.6-pure-rotation", "b1-rope"),
    ("b1-rope-as-released", "b1-rope"),
    ("m2-released-bias", "m2-sc-rfa"),
    ("m2-sc-rfa as-released", "m2-sc-rfa"),
    ("m2-sc-rfa as-released", "b1-rope"),
    ("m2-sc-rfa as-released", "b1-rope-as-released"),
    ("m2-sc-rfa as-released", "m2-no-innovation"),
    ("m2-sc-rfa as-released", "b2-alibi"),
    ("m2-no-innovation", "m2-sc-rfa"),
    ("m2-no-innovation", "b1-rope"),
    ("c5-rope-innovation", "b1-rope"),
    ("c6-alibi-innovation", "b2-alibi"),
    ("c7-rope-alibi-innovation no-innovation", "c7-rope-alibi-innovation"),
    ("m2-sc-rfa b=0.5", "m2-sc-rfa"),
    ("m2-sc-rfa b=0.5", "b2-alibi"),
    ("m2-sc-rfa b=0.2", "m2-sc-rfa"),
    ("m2-sc-rfa b=0.005", "m2-sc-rfa"),
    ("m2-sc-rfa b=0.0005", "m2-sc-rfa"),
    ("m2-sc-rfa diffusive", "m2-sc-rfa"),
    ("x1-riccati", "m2-sc-rfa"),
    ("x2-riccati-alibi", "b1-rope"),
    ("x2-riccati-alibi", "b2-alibi"),
    ("x2-riccati-alibi", "x3-rotation-riccati"),
    ("x2-riccati-alibi", "c7-rope-alibi-innovation"),
    ("x2-riccati-alibi no-innovation", "x2-riccati-alibi"),
    ("x2-riccati-alibi no-innovation", "b1-rope"),
    ("x2-riccati-alibi no-innovation", "c7-rope-alibi-innovation no-innovation"),
    ("x4-content-riccati", "c7-rope-alibi-innovation"),
    ("x4-content-riccati", "b1-rope"),
    ("x4-content-riccati no-innovation", "c7-rope-alibi-innovation no-innovation"),
    ("x4-content-riccati no-innovation", "c7-rope-alibi-innovation"),
    ("x4-content-riccati no-innovation", "b1-rope"),
    ("x4-content-riccati no-innovation", "c4-fox rope"),
    ("x4-content-riccati", "c4-fox rope"),
    ("c4-fox rope", "c7-rope-alibi-innovation"),
    ("x4-content-riccati", "c4-fox"),
    ("c4-fox", "c7-rope-alibi-innovation"),
    ("c4-fox rope", "c4-fox"),
    ("c4-fox rope", "b1-rope"),
    ("x2-riccati-alibi", "m2-sc-rfa"),
    ("c2-window", "b1-rope"),
    ("c3-yarn", "b1-rope"),
)


def perplexities(groups: Groups, of: int) -> list[Table]:
    """Test perplexity of every model, with the trigram; by `blocks` also what else is measured of a model."""
    return [_perplexities(groups, of, protocol) for protocol in PROTOCOLS]


def _perplexities(groups: Groups, of: int, protocol: str) -> Table:
    lengths, runs = _lengths(groups), [run for each in groups.values() for run in each]
    trigram, distance = trigram_of(runs), repeat_distance(runs)
    if trigram is None or distance is None:
        raise ValueError("record: got one without a trigram or a repeated passage, expected both")
    blocks = protocol == "blocks"
    more = ("validation", f"repeat {distance}") if blocks else ()

    rows: list[tuple[Cell, ...]] = []
    for label, each in groups.items():
        cells: list[Cell] = [
            interval_cell([perplexity_by_length(run, protocol)[length] for run in each], digits=1) for length in lengths
        ]
        if blocks:
            cells += [
                interval_cell([run["training"]["valid_perplexity"] for run in each], digits=1),
                gain_cell(each, distance),
            ]
        rows.append((label, f"{len(each)}", *cells))
    found = perplexity_by_length(trigram, protocol)
    tail = (NumberCell(trigram["valid_perplexity"], digits=1), NumberCell(0.0, digits=3)) if blocks else ()
    rows.append((TRIGRAM_LABEL, "", *(NumberCell(found[length], digits=1) for length in lengths), *tail))
    copying = copying_gain(runs[0], "repeat", distance)
    if blocks and copying is not None:
        rows.append(("perfect copying", "", *(None for _ in lengths), None, NumberCell(copying, digits=3)))
    caption = f"Test perplexity by `{protocol}`, mean ± half of the 95 % t interval over seeds."
    if blocks:
        caption += (
            f" {len(runs)} of {of} runs are done.\n"
            f"`repeat {distance}` is the gain from a passage that stood {distance} tokens before, in nats a token."
        )
    return Table("perplexities", caption, ("model", "seeds", *map(str, lengths), *more), tuple(rows))


def differences(groups: Groups, lengths: Sequence[int]) -> Table:
    """Differences of log perplexity by `blocks` between the models that the page compares, those that are done."""
    runs = [run for each in groups.values() for run in each]
    noise = {length: seed_noise(runs, length, "blocks") for length in lengths}
    rows: list[tuple[Cell, ...]] = []
    for model, against in PAIRS:
        pairs = pairs_of(groups.get(model, ()), groups.get(against, ()))
        if not pairs:
            continue
        row: list[Cell] = [_short(model), _short(against), f"{len(pairs)}"]
        for length in lengths:
            cell, problem = difference_cell(pairs, length, "blocks", noise[length])
            if problem or cell is None:
                raise ValueError(f"{model} and {against}: {problem}")
            row.append(cell)
        rows.append(tuple(row))
    said = ", ".join(f"{value:.3f} at {length}" for length, value in noise.items())
    caption = (
        "Differences of log perplexity, nats a token, by `blocks`, below 0 where the model is better than what it is\n"
        "against: ± half of the 95 % t interval over the seeds that both have, [95 % interval over books].\n"
        f"Open: an interval holds 0. Within a seed: of one seed, and no more than the noise of seeds, {said}."
    )
    return Table("differences", caption, ("model", "against", "seeds", *map(str, lengths)), tuple(rows))


def _short(label: str) -> str:
    """A label with the number alone of a control or an extension, whose numbers are unique."""
    preset, *suffix = label.split(" ")
    return " ".join([preset.split("-")[0] if preset[0] in "cx" else preset, *suffix])


@styled
def drawing(groups: Groups) -> Figure:
    """Perplexity over context length of the models of the short table, by both protocols, with the trigram's."""
    figure, axes = plt.subplots(2, 2, figsize=(8.5, 6), sharex=True, sharey="row")
    lengths, runs = _lengths(groups), [run for each in groups.values() for run in each]
    trigram = trigram_of(runs)
    for row, (title, labels) in zip(axes, DRAWN.items(), strict=True):
        series = {of: {label: perplexity_series(groups[label], of) for label in labels} for of in PROTOCOLS}
        marks = {of: perplexity_by_length(trigram, of) if trigram else {} for of in PROTOCOLS}
        lines = {of: (lengths, [found[length] for length in lengths]) if found else None for of, found in marks.items()}
        ends = [limits(series[of], lines[of], 0, True) for of in PROTOCOLS]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        for panel, protocol in zip(row, PROTOCOLS, strict=True):
            for label, each in series[protocol].items():
                draw_series(panel, label, each, high, **looks(labels)[label])
            if (line := lines[protocol]) is not None:
                draw_reference(panel, line)
            panel.set(title=f"{title}, {protocol}", ylim=(low, high))
            plain_numbers(panel)
            lengths_axis(panel, lengths, 128)
        row[0].set_ylabel("test perplexity")
        row[1].legend(*row[1].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1, 0.5))
    for panel in axes[0]:
        panel.set_xlabel("")
    return figure


NAMED = {  # in tables of the text
    "b1": "b1-rope",
    "b2": "b2-alibi",
    "m1": "m1-rfa",
    "m2": "m2-sc-rfa",
    "m3": "m3-sc-rfa",
    "x2": "x2-riccati-alibi",
    "c7": "c7-rope-alibi-innovation",
    "x4 without the innovation step": "x4-content-riccati no-innovation",
    "c4-fox with RoPE": "c4-fox rope",
}
POSITIONS = ((8, 15), (16, 31), (32, 63), (64, 127))


def noise(groups: Groups) -> Table:
    """The noise of a seed by protocol and length."""
    runs, lengths = [run for each in groups.values() for run in each], _lengths(groups)
    rows = [
        (of, *(NumberCell(seed_noise(runs, length, of) or 0.0, digits=3) for length in lengths)) for of in PROTOCOLS
    ]
    return Table("noise", "", ("", *map(str, lengths)), tuple(rows))


def positions(groups: Groups) -> Table:
    """The loss by position less the trigram's on the same tokens, of some models."""
    trigram = trigram_of(run for each in groups.values() for run in each)
    less = np.array(position_losses(trigram or {}))
    rows: list[tuple[Cell, ...]] = []
    for name in ("b1", "b2", "m2", "c7", "x4 without the innovation step", "c4-fox with RoPE"):
        losses = [np.array(position_losses(run)) - less for run in groups[NAMED[name]]]
        means = [[float(of[first - 1 : last].mean()) for of in losses] for first, last in POSITIONS]
        gained = [early - late for early, late in zip(means[1], means[-1], strict=True)]
        rows.append((name, *(interval_cell(each, digits=3, signed=True) for each in [*means, gained])))
    columns = ("", *(f"{first} to {last}" for first, last in POSITIONS), "gained from 16 to 31 on")
    return Table("positions", "", columns, tuple(rows))


def growth(groups: Groups) -> Table:
    """The change of perplexity from the training length to the longest, in percent with the ends of its interval."""
    first, last = _lengths(groups)[0], _lengths(groups)[-1]
    rows: list[tuple[Cell, ...]] = []
    for name, label in {**NAMED, "c2, RoPE that looks back no further than in training": "c2-window"}.items():
        cells: list[Cell] = []
        for protocol in PROTOCOLS:
            found = [perplexity_by_length(run, protocol) for run in groups[label]]
            mean = mean_and_interval([math.log(each[last] / each[first]) for each in found])
            ends = None if mean.half is None else (mean.value - mean.half, mean.value + mean.half)
            percent = [100 * math.expm1(value) for value in (mean.value, *(ends or ()))]
            interval = None if ends is None else (percent[1], percent[2])
            cells.append(NumberCell(percent[0], interval=interval, digits=1, signed=True))
        rows.append((name, str(len(groups[label])), *cells))
    return Table("growth", "", ("", "seeds", *(f"{of}, %" for of in PROTOCOLS)), tuple(rows))


def repeats(groups: Groups) -> Table:
    """The gain from a repeated passage by its distance in training lengths, of some models."""
    names = ("b1", "b2", "m2", "x2", "c7", "x4 without the innovation step", "c4-fox with RoPE")
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        scores = retrieval_scores(groups[NAMED[name]], "repeat")
        rows.append((name, *(interval_cell(trials, digits=3) for trials in scores.trials)))
    trained, run = groups["b1-rope"][0]["train_length"], groups["b1-rope"][0]
    gains = [copying_gain(run, "repeat", distance) for distance in scores.distances]
    rows.append(("perfect copying", *(None if gain is None else NumberCell(gain) for gain in gains)))
    columns = ("", *(str(Fraction(distance, trained)) for distance in scores.distances))
    return Table("repeats", "", columns, tuple(rows))


def short(groups: Groups) -> Table:
    """The models of the figure at the training length and the longest, by both protocols, and the repeated passage."""
    tables = dict(zip(PROTOCOLS, perplexities(groups, 0), strict=True))
    ends = [str(length) for length in (_lengths(groups)[0], _lengths(groups)[-1])]
    rows = []
    for label in (*(label for of in DRAWN.values() for label in of), TRIGRAM_LABEL, "perfect copying"):
        cells: list[Cell] = [label]
        for table in tables.values():
            found = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}.get(label, {})
            cells += [found.get(end) for end in ends]
        blocks = {row[0]: row for row in tables["blocks"].rows}
        rows.append((*cells, blocks[label][-1]))
    columns = ("model", *(f"{protocol} {end}" for protocol in PROTOCOLS for end in ends), "repeat")
    return Table("short", "", columns, tuple(rows))


def written_short(page: str, record: Path = RECORD) -> str:
    """The short page with its table, between its marks. Raises `ValueError` for a page without them."""
    text = markdown(short(by_label(read_results(record).runs)), "").strip()
    marks = "<!-- short: docs/record/replication_tables.py -->", "<!-- end of short -->"
    return replace_between(page, *marks, f"\n{text}\n")


def written(page: str, record: Path = RECORD) -> str:
    """The page with the record's tables, each between its marks.

    Raises:
        ValueError: for a page without the marks, or a pair of models that the record does not plan.
    """
    groups, planned = by_label(read_results(record).runs), read_planned(record)
    names = planned["runs"] if planned else []
    for label in {label for pair in PAIRS for label in pair}:
        if f"{label.replace(' ', '-')}-seed0" not in names:
            raise ValueError(f"{label}: expected a model of {record}")
    lengths = _lengths(groups)
    parts = (lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :])  # all in one table make lines too long to read
    of_text = [[make(groups)] for make in (noise, positions, growth, repeats)]
    of_record = [perplexities(groups, len(names)), [differences(groups, part) for part in parts]]
    for tables in (*of_record, *of_text):
        name = tables[0].name
        begin, end = f"<!-- {name}: docs/record/replication_tables.py -->", f"<!-- end of {name} -->"
        text = "\n".join(markdown(table, table.caption).lstrip() for table in tables)
        page = replace_between(page, begin, end, f"\n{text}\n")
    return page


def _lengths(groups: Groups) -> list[int]:
    return sorted(perplexity_by_length(next(iter(groups.values()))[0], "blocks"))


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
    write_text_whole(SHORT, written_short(SHORT.read_text(encoding="utf-8")))
    save(drawing(by_label(read_results(RECORD).runs)), FIGURE)
