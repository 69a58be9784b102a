"""The tables and figures that belong to results, in their order on the page."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from rfa.evaluation import MAP_LENGTHS

from . import figures
from .layout import Table
from .retrieval_tables import accuracy_table, attention_table, probe_table
from .runs import (
    MissingData,
    Run,
    damping_of,
    is_sweep,
    labels_with_dynamics,
    other_differences,
    perplexity_by_length,
    run_with_dynamics,
    train_lengths,
)
from .summary import protocols, runs_table, setting
from .tables import BASELINES, difference_table, published_results, table1, table2, table3


class ListedTable(NamedTuple):
    """A table of a report: its name, and a function that makes it or raises `MissingData` with the reason."""

    name: str
    make: Callable[[], Table]


def listed_tables(runs: Sequence[Run]) -> list[ListedTable]:
    """The tables that belong to these results, in their order on the page.

    Results with at least three values of the damping b have table 2. Runs whose damping the recipe sets appear only
    there. All other runs are in table 3 if the recipe's name begins with table3 or the text is BabyLM's, and otherwise
    in table 1. Without runs the tables show the paper's published numbers.
    """
    published = published_results()
    if not runs:
        papers: dict[str, Callable[..., Table]] = {"table1": table1, "table2": table2, "table3": table3}
        return [_of_protocol("blocks", name, partial(make, runs, published), runs) for name, make in papers.items()]
    found: list[ListedTable] = []
    swept = is_sweep(runs)
    others = [run for run in runs if not swept or damping_of(run) is None or "damping" not in run["spec"]["model"]]
    for protocol in protocols(runs):
        makers: dict[str, Callable[[], Table]] = {}
        if any(run["label"] not in BASELINES for run in others) or not swept:
            of = "table3" if any(map(_is_babylm, runs)) else "table1"
            makers[of] = partial({"table1": table1, "table3": table3}[of], others, published, protocol)
        if swept:
            makers["table2"] = partial(table2, runs, published, protocol=protocol)
        makers["differences"] = partial(difference_table, runs, protocol=protocol)
        found += [_of_protocol(protocol, name, make, runs) for name, make in makers.items()]
    found += [ListedTable(f"probe-{kind}", partial(probe_table, runs, kind)) for kind in ("passkey", "repeat")]
    found.append(ListedTable("probe-accuracy", partial(accuracy_table, runs)))
    if any(run.get("attention_summary") for run in runs):
        found.append(ListedTable("attention", partial(attention_table, runs)))
    return [*found, ListedTable("runs", partial(runs_table, runs))]


def _is_babylm(run: Run) -> bool:
    return run["recipe"].startswith("table3") or run["spec"].get("data") == "babylm-2025"


def _of_protocol(protocol: str, of: str, make: Callable[[], Table], runs: Sequence[Run]) -> ListedTable:
    """The table of one protocol. Name and caption contain the protocol, and the notes contain the runs' setting."""
    name = f"{of}-{protocol}"

    def named() -> Table:
        table = make()
        notes = ((setting(runs),) if runs else ()) + table.notes
        if of != "differences" and protocol != "blocks":
            notes += ("The paper's figures are of the protocol blocks.",)
        return replace(table, name=name, caption=f"{table.caption} Protocol {protocol}.", notes=notes)

    return ListedTable(name, named)


_SEEDS = "mean over seeds; band: lowest to highest seed; each panel has its own scale"


class ListedFigure(NamedTuple):
    """A figure of a report.

    Args:
        name: of its files.
        caption: description of the content.
        draw: draws the figure from all runs, with or without data. It may raise `MissingData` with the reason.
        has: whether a run has data for the figure. The figure is drawn if any run has.
        what: name of these data, used to report runs without them; empty if not every run is meant to have them.
    """

    name: str
    caption: str
    draw: Callable[[Sequence[Run]], Figure]
    has: Callable[[Run], object]
    what: str


def listed_figures(runs: Sequence[Run]) -> list[ListedFigure]:
    """The figures that belong to these results, in their order on the page: measurements first, then the theory."""
    measured = [
        *(drawing for protocol in protocols(runs) for drawing in _evaluated(runs, protocol)),
        ListedFigure(
            "training",
            f"Validation perplexity over training: {_SEEDS}.",
            figures.training_curves,
            lambda run: run["curve"],
            "validations",
        ),
        ListedFigure(
            "position",
            "Loss over the position in the longest window (protocol blocks), means of bins that grow by equal "
            f"factors: {_SEEDS}. {_position_error(runs)}".rstrip(),
            figures.loss_over_position,
            lambda run: (run["by_position"] or {}).get("loss"),
            "losses by position",
        ),
        ListedFigure(
            "retrieval",
            "Retrieval score over the distance of the key: the gain in log likelihood because the key stood before in "
            "the text, in nats per token, with the standard error over trials. A model that does not use tokens at "
            "this distance scores 0.",
            figures.retrieval,
            lambda run: run["passkey"],
            "retrieval probes",
        ),
        *_head_parameters(runs),
        *_maps(runs),
    ]
    return [*measured, *THEORY]


def _of_theory(name: str, caption: str, draw: Callable[[], Figure]) -> ListedFigure:
    return ListedFigure(name, f"{caption} Computed from the closed forms, without any run.", lambda _: draw(), bool, "")


THEORY = (
    _of_theory(
        "theory-trajectory",
        "A simulated latent trajectory, its noisy measurements, and all of them transported to each of five times "
        "(the paper's fig. 1).",
        figures.transported_measurements,
    ),
    _of_theory(
        "theory-transport",
        "The transport between two times as a product of what each time needs alone.",
        figures.transport_factorization,
    ),
    _of_theory(
        "theory-rotate",
        "Rotate, aggregate, rotate back: attention in one frame.",
        figures.rotate_aggregate_counter_rotate,
    ),
    _of_theory(
        "theory-regimes",
        "Bias and gate in the diffusive and the integrative regime.",
        figures.diffusive_and_integrative,
    ),
    _of_theory("theory-decay", "Bias and gate over the decay.", figures.bias_and_gate_over_decay),
    _of_theory(
        "theory-spectra",
        "Eigenvalues of RFA's and SC-RFA's dynamics by head, at b = 1 and with decay in every head.",
        figures.eigenvalue_spectra,
    ),
    _of_theory(
        "theory-time-scales", "How SC-RFA's heads part the time scales among them.", figures.temporal_scale_separation
    ),
)


def _evaluated(runs: Sequence[Run], protocol: str) -> list[ListedFigure]:
    """The figures of perplexities by one protocol."""

    def drawing(name: str, caption: str, draw: Callable[..., Figure]) -> ListedFigure:
        def has(run: Run) -> object:
            return perplexity_by_length(run, protocol)

        return ListedFigure(
            f"{name}-{protocol}", caption, partial(draw, protocol=protocol), has, f"evaluations by {protocol}"
        )

    by = f"protocol {protocol}"
    found = [
        drawing("length", f"Test perplexity over context length, {by}: {_SEEDS}.", figures.perplexity_over_length),
        drawing(
            "differences",
            f"Differences of log perplexity to b1-rope at the training length and at the longest, {by}; intervals: "
            "nominal 95 % bootstrap over books, too narrow where books or authors are few, and silent about other "
            "seeds; grey: single seeds.",
            figures.differences,
        ),
    ]
    if is_sweep(runs):
        also = other_differences(runs)
        caption = f"Test perplexity over context length by damping b, {by}; baselines in grey. {also}".rstrip()
        found.append(drawing("damping", caption, figures.damping_sweep))
    return found


def _head_parameters(runs: Sequence[Run]) -> list[ListedFigure]:
    """Parameters of each head over training: of the paper's two models, and of models that start diffusive."""
    found = []
    for label in labels_with_dynamics(runs):
        paper, kinds = label in ("m1-rfa", "m2-sc-rfa"), {}
        if paper:
            kinds["noises"] = ("Measurement and process noises", figures.noises_over_training)
            kinds["robustness"] = ("Robustness and inverse temperature", figures.robustness_over_training)
        run = run_with_dynamics(runs, label)
        if paper or (run["config"]["prior"] == "lyapunov" and _starts_diffusive(run)):
            kinds["regime"] = ("The regime's alpha", figures.regimes_over_training)
        for name, (words, draw) in kinds.items():
            caption = f"{words} of each head over training: {label}, its first seed."
            of = partial(_has_label, label)
            found.append(ListedFigure(f"{name}-{label.replace(' ', '-')}", caption, partial(draw, label=label), of, ""))
    return found


def _position_error(runs: Sequence[Run]) -> str:
    """A sentence with the standard error of a single position's mean. All models share the tokens and most of it."""
    errors = [np.median(run["by_position"]["stderr"]) for run in runs if (run["by_position"] or {}).get("stderr")]
    if not errors:
        return ""
    return (
        f"At a single position the standard error over windows is {np.median(errors):.2g} nats, much the same for all."
    )


def _starts_diffusive(run: Run) -> bool:
    """Whether any head starts with a negative alpha. Heads without decay have no alpha."""
    first = [layer["alpha"][0] for layer in run["dynamics"]["layers"].values()]
    return any(alpha is not None and alpha < 0 for heads in first for alpha in heads)


def _block_lengths(runs: Sequence[Run]) -> str:
    """The number of neighbouring tokens in one block of a map, in words."""
    mapped = [run for run in runs if _has_entry("maps", run)]
    return " or ".join(sorted({str(-(-MAP_LENGTHS * run["train_length"] // run["maps"].shape[-1])) for run in mapped}))


def _has_label(label: str, run: Run) -> bool:
    return run["label"] == label


def _maps(runs: Sequence[Run]) -> list[ListedFigure]:
    """Attention maps of the last layer: in blocks over the whole window, and by single tokens at its end."""
    what = (
        "what reaches the estimate: the softmax weight times the decay (the paper's figures leave the decay out). "
        f"Last layer, a window of {MAP_LENGTHS} training lengths"
    )
    kinds = (
        (
            "attention",
            "maps",
            figures.attention_maps,
            f"in blocks of {_block_lengths(runs)} tokens, which hide shorter periods",
        ),
        ("attention-near", "near", figures.near_attention, "its end, by single tokens"),
    )
    return [
        ListedFigure(
            name,
            f"Where each head looks, {what}, {words}.",
            partial(_draw_first_seeds, entry, draw),
            partial(_has_entry, entry),
            "",
        )
        for name, entry, draw, words in kinds
        if any(_has_entry(entry, run) for run in runs)
    ]


def _has_entry(entry: str, run: Run) -> bool:
    return run.get(entry) is not None


def _draw_first_seeds(entry: str, draw: Callable[..., Figure], runs: Sequence[Run]) -> Figure:
    """A figure of the first run of each label that has maps."""
    mapped = [run for run in runs if _has_entry(entry, run)]
    lengths = train_lengths(mapped)
    if len(lengths) > 1:
        raise MissingData(f"runs: got maps of training lengths {lengths}, expected one")
    first: dict[str, np.ndarray] = {}
    for run in mapped:
        first.setdefault(run["label"], run[entry])
    return draw(first, lengths[0])
