"""What a report holds: the list of its tables and figures, and which of the paper's tables belongs to the results."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from .figures import damping_sweep, loss_over_position, perplexity_over_length, training_curves
from .layout import Table
from .published import published_results
from .runs import Run, perplexity_by_length
from .summary import accuracy_table, probe_table, protocols, runs_table
from .tables import BASELINES, difference_table, table1, table2, table3

_SWEPT = re.compile(r"b=(\S+)")


class Drawing(NamedTuple):
    """A figure of a report.

    Args:
        name: of its files.
        caption: what it shows.
        draw: of all runs, those that have nothing to show among them; may raise `ValueError` with a reason.
        has: whether a run has anything to show; the figure is drawn where one has.
        what: that is, in words, for the runs that lack it.
    """

    name: str
    caption: str
    draw: Callable[[Sequence[Run]], Figure]
    has: Callable[[Run], object]
    what: str


class Tabling(NamedTuple):
    """A table of a report: its name, and what makes it, or raises `ValueError` with a reason."""

    name: str
    make: Callable[[], Table]


DRAWINGS = (
    Drawing(
        "training",
        "Validation perplexity over training: mean over seeds; band: lowest to highest seed.",
        training_curves,
        lambda run: run["curve"],
        "validations",
    ),
    Drawing(
        "position",
        "Loss over the position in the longest window (protocol blocks), means of bins that grow by equal factors: "
        "mean over seeds; band: lowest to highest seed.",
        loss_over_position,
        lambda run: (run["by_position"] or {}).get("loss"),
        "losses by position",
    ),
)


def drawings(runs: Sequence[Run]) -> list[Drawing]:
    """The figures that belong to these results, in their order on the page."""
    found: list[Drawing] = []
    for protocol in protocols(runs):
        caption = f"Test perplexity over context length, protocol {protocol}: mean over seeds; band: lowest to highest."
        draw = partial(perplexity_over_length, protocol=protocol)
        found.append(_evaluated(f"length-{protocol}", caption, draw, protocol))
    if any(map(_is_swept, runs)):
        for protocol in protocols(runs):
            caption = f"Test perplexity over context length by damping b, protocol {protocol}; baselines in grey."
            found.append(_evaluated(f"damping-{protocol}", caption, partial(_sweep_figure, protocol), protocol))
    return [*found, *DRAWINGS]


def tablings(runs: Sequence[Run]) -> list[Tabling]:
    """The tables that belong to these results, in their order on the page.

    A label that ends in `b=NUMBER` is of a damping sweep and stands in table 2; all others stand in table 3 where the
    recipe's name begins with table3 or the text is BabyLM's, else in table 1.
    """
    published = published_results()
    found: list[Tabling] = []
    swept, others = [run for run in runs if _is_swept(run)], [run for run in runs if not _is_swept(run)]
    for protocol in protocols(runs):
        makers: dict[str, Callable[[], Table]] = {}
        if any(run["label"] not in BASELINES for run in others) or not swept:
            of = "table3" if any(map(_is_babylm, runs)) else "table1"
            makers[of] = partial({"table1": table1, "table3": table3}[of], others, published, protocol)
        if swept:
            makers["table2"] = partial(_sweep_table, runs, published, protocol)
        makers["differences"] = partial(difference_table, runs, protocol=protocol)
        found += [_by(protocol, name, make) for name, make in makers.items()]
    found += [Tabling(f"probe-{kind}", partial(probe_table, runs, kind)) for kind in ("passkey", "repeat")]
    found.append(Tabling("probe-accuracy", partial(accuracy_table, runs)))
    return [*found, Tabling("runs", partial(runs_table, runs))]


def damping_by_label(runs: Sequence[Run]) -> dict[str, float]:
    """The damping b of each label of a sweep, which ends in `b=NUMBER`.

    Raises:
        ValueError: where two labels are of one b: a row holds one.
    """
    found: dict[str, float] = {}
    for label, damping in ((run["label"], _damping(run)) for run in runs):
        twin = next((other for other, b in found.items() if b == damping and other != label), None)
        if twin is not None:
            raise ValueError(f"runs: got the labels {twin} and {label} both of b = {damping:g}, expected one")
        if damping is not None:
            found[label] = damping
    return found


def _damping(run: Run) -> float | None:
    match = _SWEPT.fullmatch(run["label"].removeprefix(run["preset"]).strip())
    try:
        return float(match[1]) if match else None
    except ValueError:
        return None


def _is_swept(run: Run) -> bool:
    return _damping(run) is not None


def _is_babylm(run: Run) -> bool:
    return run["recipe"].startswith("table3") or run["spec"].get("data") == "babylm-2025"


def _evaluated(name: str, caption: str, draw: Callable[[Sequence[Run]], Figure], protocol: str) -> Drawing:
    return Drawing(name, caption, draw, lambda run: perplexity_by_length(run, protocol), f"evaluations by {protocol}")


def _sweep_figure(protocol: str, runs: Sequence[Run]) -> Figure:
    damping = damping_by_label(runs)
    return damping_sweep([run for run in runs if run["label"] in {*damping, *BASELINES}], damping, protocol)


def _sweep_table(runs: Sequence[Run], published: Mapping[str, Any], protocol: str) -> Table:
    return table2(runs, published, damping_by_label(runs), protocol)


def _by(protocol: str, of: str, make: Callable[[], Table]) -> Tabling:
    """The table of a protocol: so named, and saying so."""
    name = f"{of}-{protocol}"

    def named() -> Table:
        table = make()
        aside = ("The paper's figures are of the protocol blocks.",) * (of != "differences" and protocol != "blocks")
        caption = f"{table.caption} Protocol {protocol}."
        return replace(table, name=name, caption=caption, notes=(*table.notes, *aside))

    return Tabling(name, named)
