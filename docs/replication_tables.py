"""The tables of docs/replication-details.md and the figure of docs/replication.md: `python docs/replication_tables.py`.

Both are made from the record in results/.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from rfa.files import write_text_whole
from rfa.report.figures import COLOURS, save
from rfa.report.layout import Cell, NumberCell, Table, markdown, replace_between
from rfa.report.runs import Run, by_label, perplexity_by_length
from rfa.report.statistics import compare, mean_and_error, pairs_of
from rfa.results import read_planned, read_results

PAGE = Path(__file__).with_name("replication-details.md")
RECORD = Path(__file__).parents[1] / "results" / "novels-small"
FIGURE = PAGE.with_name("figures") / "length.png"
PROTOCOLS = ("blocks", "matched")
DRAWN = (  # the models of the table in docs/replication.md
    "b1-rope",
    "b2-alibi",
    "m1-rfa",
    "m2-sc-rfa",
    "m2-sc-rfa as-released",
    "m3-sc-rfa",
    "x2-riccati-alibi",
    "x4-content-riccati no-innovation",
    "c7-rope-alibi-innovation",
    "c4-fox rope",
)
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
    ("c2-window", "b1-rope"),
    ("c3-yarn", "b1-rope"),
)


def perplexities(groups: Groups, of: int) -> Table:
    """Test perplexity by both protocols, and validation perplexity at the end of training, of every model."""

    def reader(protocol: str, length: int) -> Callable[[Run], float]:
        return lambda run: perplexity_by_length(run, protocol)[length]

    read = {
        **{f"{name} {length}": reader(name, length) for name in PROTOCOLS for length in _lengths(groups)},
        "validation": lambda run: run["training"]["valid_perplexity"],
    }
    rows: list[tuple[Cell, ...]] = []
    for label, runs in groups.items():
        means = (mean_and_error([value(run) for run in runs]) for value in read.values())
        rows.append((label, f"{len(runs)}", *(NumberCell(mean.value, mean.error, digits=1) for mean in means)))
    done = sum(map(len, groups.values()))
    caption = f"Test perplexity, mean ± standard error over seeds; {done} of {of} runs are done."
    return Table("perplexities", caption, ("model", "seeds", *read), tuple(rows))


def differences(groups: Groups, lengths: Sequence[int]) -> Table:
    """Differences of log perplexity by `blocks` between the models that the page compares, those that are done."""
    rows: list[tuple[Cell, ...]] = []
    for model, against in PAIRS:
        pairs = pairs_of(groups.get(model, ()), groups.get(against, ()))
        if not pairs:
            continue
        row: list[Cell] = [model, against, f"{len(pairs)}"]
        for length in lengths:
            found, problem = compare(pairs, length, "blocks")
            if problem or found is None or found.low is None or found.high is None:
                raise ValueError(f"{model} and {against}: {problem}")
            row.append(NumberCell(found.value, found.error, (found.low, found.high), digits=3, signed=True))
        rows.append(tuple(row))
    caption = (
        "Differences of log perplexity, nats a token, by `blocks`, below 0 where the model is better than what it is\n"
        "against: ± standard error over the seeds that both have, [95 % interval over books]."
    )
    return Table("differences", caption, ("model", "against", "seeds", *map(str, lengths)), tuple(rows))


def draw(groups: Groups, path: Path) -> None:
    """Perplexity over context length of the models of the short table, by both protocols, mean over seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    lengths = _lengths(groups)
    for panel, protocol in zip(axes, PROTOCOLS, strict=True):
        for index, label in enumerate(DRAWN):
            means = [
                mean_and_error([perplexity_by_length(run, protocol)[length] for run in groups[label]]).value
                for length in lengths
            ]
            look = {"color": COLOURS[index % 5], "linestyle": ("-", "--")[index // 5], "marker": "os"[index // 5]}
            panel.plot(lengths, means, **look, markersize=4, linewidth=1.4, label=label)
        panel.set(title=protocol, xlabel="context length (tokens)", xscale="log", yscale="log")
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.minorticks_off()
        ticks = [65, 75, 90, 110, 140]
        panel.set_yticks(ticks, [str(tick) for tick in ticks])
        panel.grid(alpha=0.25, linewidth=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="test perplexity")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center")
    save(figure, path)


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
    for tables in ([perplexities(groups, len(names))], [differences(groups, part) for part in parts]):
        name = tables[0].name
        begin, end = f"<!-- {name}: docs/replication_tables.py -->", f"<!-- end of {name} -->"
        text = "\n".join(markdown(table, table.caption) for table in tables)
        page = replace_between(page, begin, end, f"\n{text}\n")
    return page


def _lengths(groups: Groups) -> list[int]:
    return sorted(perplexity_by_length(next(iter(groups.values()))[0], "blocks"))


if __name__ == "__main__":
    write_text_whole(PAGE, written(PAGE.read_text(encoding="utf-8")))
    draw(by_label(read_results(RECORD).runs), FIGURE)
