"""The tables and figures that belong to results, in their order on the page."""

from rfa.checks import needs

needs("matplotlib")

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from rfa_lab.evaluation import MAP_LENGTHS

from .figures import comparison, curves, heads
from .layout import Table
from .measurements import copying_gain, trigram_of, trigram_positions
from .runs import (
    BASELINES,
    MOST_LINES,
    MissingData,
    Run,
    by_label,
    damping_of,
    is_sweep,
    main_labels,
    other_differences,
    perplexity_by_length,
    runs_with_dynamics,
    train_lengths,
)
from .summary import protocols, runs_table, setting
from .tables import (
    attention_table,
    damping_table,
    difference_table,
    models_table,
    passkey_table,
    probe_table,
    published_table,
)

APPENDIX = "-all"  # at the end of the name of a figure of the appendix


class ListedTable(NamedTuple):
    """A table of a report: its name, and a function that makes it or raises `MissingData` with the reason."""

    name: str
    make: Callable[[], Table]


def listed_tables(runs: Sequence[Run]) -> list[ListedTable]:
    """The tables that belong to these results, in their order on the page.

    Results with at least three values of the damping b have table 2. Runs of it whose label is not the preset's name
    appear only there. All other runs are in table 3 if the recipe's name begins with table3 or the text is BabyLM's,
    and otherwise in table 1. The paper's published numbers are in tables of their own, because its training length is
    another.
    """
    if not runs:
        return [_published(name) for name in ("table1", "table2", "table3")]
    found: list[ListedTable] = []
    swept = is_sweep(runs)
    others = [run for run in runs if not swept or damping_of(run) is None or run["label"] == run["preset"]]
    of_models = "table3" if any(map(_is_babylm, runs)) else "table1"
    with_models = any(run["label"] not in BASELINES for run in others) or not swept
    for protocol in protocols(runs):
        makers: dict[str, Callable[[], Table]] = {}
        if with_models:
            makers[of_models] = partial(models_table, of_models, others, protocol)
        if swept:
            makers["table2"] = partial(damping_table, runs, protocol)
        makers["differences"] = partial(difference_table, runs, protocol=protocol)
        found += [_of_protocol(protocol, name, make, runs) for name, make in makers.items()]
    if protocols(runs):
        found += [_published(name) for name in ([of_models] * with_models + ["table2"] * swept)]
    found += [ListedTable(f"probe-{kind}", partial(probe_table, runs, kind)) for kind in ("passkey", "repeat")]
    found.append(ListedTable("probe-accuracy", partial(passkey_table, runs)))
    if any(run.get("attention_summary") for run in runs):
        found.append(ListedTable("attention", partial(attention_table, runs)))
    return [*found, ListedTable("runs", partial(runs_table, runs))]


def _is_babylm(run: Run) -> bool:
    return run["recipe"].startswith("table3") or run["spec"].get("data") == "babylm-2025"


def _published(name: str) -> ListedTable:
    return ListedTable(f"paper-{name}", partial(published_table, name))


def _of_protocol(protocol: str, of: str, make: Callable[[], Table], runs: Sequence[Run]) -> ListedTable:
    """The table of one protocol. Name and caption contain the protocol, and the notes contain the runs' setting."""
    name = f"{of}-{protocol}"

    def named() -> Table:
        table = make()
        caption = f"{table.caption} Protocol {protocol}."
        return replace(table, name=name, caption=caption, notes=(setting(runs), *table.notes))

    return ListedTable(name, named)


class ListedFigure(NamedTuple):
    """A figure of a report. It is drawn from all runs, if any of them has the data for it."""

    name: str  # of its files
    caption: str
    draw: Callable[..., Figure]  # it may raise `MissingData` with the reason
    has: Callable[[Run], object] = bool  # whether a run has the data
    what: str = ""  # name of the data, to name runs without them; empty if not every run is meant to have them


_SEEDS = "mean over seeds; band: 95 % t interval over seeds"
_CHOICE = (
    "At most six lines: the baselines, m2, and the models with the most seeds and the lowest validation perplexity. "
    "The appendix has all models."
)


def listed_figures(runs: Sequence[Run]) -> list[ListedFigure]:
    """The figures that belong to these results, in their order on the page.

    At the end is an appendix of all models if these are too many for one panel. The names of its figures end with
    `APPENDIX`.
    """
    over_length = [_over_length(protocol) for protocol in protocols(runs)]
    over_others = _over_others(runs)
    compared = [figure for protocol in protocols(runs) for figure in _compared(runs, protocol)]
    appendix: list[ListedFigure] = []
    if len(by_label(runs)) > len(main_labels(runs, MOST_LINES - (trigram_of(runs) is not None))):
        for each in (*over_length, *over_others):
            appendix.append(each._replace(name=each.name + APPENDIX, draw=partial(each.draw, appendix=True)))
        over_length, over_others = (
            [each._replace(caption=f"{each.caption} {_CHOICE}") for each in of] for of in (over_length, over_others)
        )
    return [*over_length, *compared, *over_others, *_head_parameters(runs), *_maps(runs), *appendix]


def _over_length(protocol: str) -> ListedFigure:
    caption = (
        f"Test perplexity over context length, protocol {protocol}: {_SEEDS}; of one seed the noise of seeds. "
        "A line far above the others is cut off, and the legend says how far it goes."
    )
    return _of_evaluation("length", protocol, caption, curves.perplexity_over_length)


def _of_evaluation(name: str, protocol: str, caption: str, draw: Callable[..., Figure]) -> ListedFigure:
    """A figure of perplexities by one protocol."""

    def has(run: Run) -> object:
        return perplexity_by_length(run, protocol)

    what = f"evaluations by {protocol}"
    return ListedFigure(f"{name}-{protocol}", caption, partial(draw, protocol=protocol), has, what)


def _compared(runs: Sequence[Run], protocol: str) -> list[ListedFigure]:
    """Differences to the baseline, and the sweep of the damping."""
    caption = (
        "Differences of log perplexity to b1-rope at the training length and at the longest, protocol "
        f"{protocol}. Full points: several seeds, with dark 95 % t intervals over seeds; open points: one seed. Broad "
        "light bars: nominal 95 % bootstrap over books, too narrow where books or authors are few. Grey band: the "
        "noise of a single seed. A number at the edge is a point beyond it."
    )
    found = [_of_evaluation("differences", protocol, caption, comparison.differences)]
    if is_sweep(runs):
        words = f"Test perplexity over context length by damping b, protocol {protocol}; bands as "
        words += f"before. {other_differences(runs)}"
        found.append(_of_evaluation("damping", protocol, words.rstrip(), curves.damping_sweep))
    return found


def _over_others(runs: Sequence[Run]) -> list[ListedFigure]:
    """Figures over training, position and distance."""
    less = ", less that of the trigram on the same tokens" if trigram_positions(runs) else ""
    return [
        ListedFigure(
            "training",
            f"Validation perplexity over training: {_SEEDS}. The first half does not set the scale.",
            curves.training_curves,
            lambda run: run["curve"],
            "validations",
        ),
        ListedFigure(
            "position",
            "Loss over the position in the longest window (protocol blocks), means of bins that grow by equal "
            f"factors{less}: {_SEEDS}. The first seven positions are left out. {_position_error(runs)}".rstrip(),
            curves.loss_over_position,
            lambda run: (run["by_position"] or {}).get("loss"),
            "losses by position",
        ),
        ListedFigure(
            "retrieval",
            "Retrieval over the distance of the key: the gain in log likelihood because the key stood before in "
            f"the text{_share(runs)}, with 95 % t intervals over trials. A model that does not use tokens at "
            "this distance scores 0.",
            comparison.retrieval,
            lambda run: run["passkey"],
            "retrieval probes",
        ),
    ]


def _position_error(runs: Sequence[Run]) -> str:
    """A sentence with the noise over windows of the loss at a position. All models share the tokens and most of it."""
    errors = [np.median(run["by_position"]["stderr"]) for run in runs if (run["by_position"] or {}).get("stderr")]
    if not errors:
        return ""
    return (
        "At a single position half of the 95 % interval of a loss over windows is "
        f"{1.96 * np.median(errors):.2g} nats, much the same for all."
    )


def _share(runs: Sequence[Run]) -> str:
    """What the scores are divided by, in words."""
    rows = ((run, kind, row) for run in runs for kind, of in (run["passkey"] or {}).items() for row in of["rows"])
    known = [copying_gain(run, kind, row["distance"]) is not None for run, kind, row in rows]
    return ", as a share of what perfect copying would gain" if known and all(known) else ", in nats per token"


def _head_parameters(runs: Sequence[Run]) -> list[ListedFigure]:
    """Parameters of each head over training: of the paper's two models, and of models that start diffusive."""
    found = []
    for label, run in runs_with_dynamics(runs).items():
        paper, kinds = label in ("m1-rfa", "m2-sc-rfa"), {}
        if paper:
            kinds["noises"] = ("Measurement and process noises", heads.noises_over_training)
            kinds["robustness"] = ("Robustness and inverse temperature", heads.robustness_over_training)
        if paper or (run["config"]["prior"] == "lyapunov" and _starts_diffusive(run)):
            kinds["regime"] = ("The regime's alpha", heads.regimes_over_training)
        for name, (words, draw) in kinds.items():
            caption = f"{words} of each head over training: {label}, its first seed."
            named = f"{name}-{label.replace(' ', '-')}"
            found.append(ListedFigure(named, caption, _without_runs(partial(draw, run))))
    return found


def _without_runs(draw: Callable[[], Figure]) -> Callable[..., Figure]:
    return lambda runs: draw()


def _starts_diffusive(run: Run) -> bool:
    """Whether any head starts with a negative alpha. Heads without decay have no alpha."""
    first = [layer["alpha"][0] for layer in run["dynamics"]["layers"].values()]
    return any(alpha is not None and alpha < 0 for of_heads in first for alpha in of_heads)


def _maps(runs: Sequence[Run]) -> list[ListedFigure]:
    """Attention maps of the last layer: in blocks over the whole window, and by single tokens at its end."""
    blocks = {-(-MAP_LENGTHS * run["train_length"] // run["maps"].shape[-1]) for run in _mapped(runs, "maps")}
    alone = "the paper's figures leave the decay out"
    both = _mapped(runs, "undecayed")
    paper = f"rows before decay: the softmax weight alone; {alone}" if both else alone
    what = (
        f"what reaches the estimate: the softmax weight times the decay ({paper}). "
        f"Last layer, a window of {MAP_LENGTHS} training lengths"
    )
    far = f"in blocks of {' or '.join(sorted(map(str, blocks)))} tokens, which hide shorter periods"
    kinds = (
        ("attention", "maps", "undecayed", heads.attention_maps, far),
        ("attention-near", "near", "undecayed_near", heads.near_attention, "its end, by single tokens"),
    )
    return [
        ListedFigure(name, f"Where each head looks, {what}, {words}.", partial(_draw_first_seeds, entry, before, draw))
        for name, entry, before, draw, words in kinds
        if _mapped(runs, entry)
    ]


def _mapped(runs: Sequence[Run], entry: str) -> list[Run]:
    return [run for run in runs if run.get(entry) is not None]


def _draw_first_seeds(entry: str, before: str, draw: Callable[..., Figure], runs: Sequence[Run]) -> Figure:
    """A figure of the first run of each label that has maps, those before decay in a row of their own."""
    mapped = _mapped(runs, entry)
    lengths = train_lengths(mapped)
    if len(lengths) > 1:
        raise MissingData(f"runs: got maps of training lengths {lengths}, expected one")
    first: dict[str, np.ndarray] = {}
    for run in mapped:
        if run["label"] not in first:
            first[run["label"]] = run[entry]
            if run.get(before) is not None:
                first[f"{run['label']}\n{heads.BEFORE_DECAY}"] = run[before]
    return draw(first, lengths[0])
