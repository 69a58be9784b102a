"""The figures that belong to results, in their order on the page."""

from rfa.checks import needs

needs("matplotlib")

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from rfa_lab.evaluation import MAP_LENGTHS

from . import figures
from .measurements import MOST_LINES, copying_gain, main_labels, trigram_of, trigram_positions
from .page import APPENDIX
from .runs import (
    MissingData,
    Run,
    by_label,
    is_sweep,
    labels_with_dynamics,
    other_differences,
    perplexity_by_length,
    run_with_dynamics,
    train_lengths,
)
from .summary import protocols

_SEEDS = "mean over seeds; band: 95 % t interval over seeds"
_CHOICE = (
    "At most six lines: the baselines, m2, and the models with the most seeds and the lowest validation perplexity. "
    "The appendix has all models."
)


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
    draw: Callable[..., Figure]
    has: Callable[[Run], object]
    what: str


def listed_figures(runs: Sequence[Run]) -> list[ListedFigure]:
    """The figures that belong to these results, in their order on the page.

    Measurements come first, then the theory, and at the end an appendix of all models if these are too many for one
    panel. The names of its figures end with `APPENDIX`.
    """
    of_lines = [
        *(_over_length(runs, protocol) for protocol in protocols(runs)),
        ListedFigure(
            "training",
            f"Validation perplexity over training: {_SEEDS}. The first half does not set the scale.",
            figures.training_curves,
            lambda run: run["curve"],
            "validations",
        ),
        ListedFigure(
            "position",
            "Loss over the position in the longest window (protocol blocks), means of bins that grow by equal "
            f"factors{_less_trigram(runs)}: {_SEEDS}. The first seven positions are left out. "
            f"{_position_error(runs)}".rstrip(),
            figures.loss_over_position,
            lambda run: (run["by_position"] or {}).get("loss"),
            "losses by position",
        ),
        ListedFigure(
            "retrieval",
            "Retrieval over the distance of the key: the gain in log likelihood because the key stood before in "
            f"the text{_share(runs)}, with 95 % t intervals over trials. A model that does not use tokens at "
            "this distance scores 0.",
            figures.retrieval,
            lambda run: run["passkey"],
            "retrieval probes",
        ),
    ]
    many = len(by_label(runs)) > len(main_labels(runs, MOST_LINES - (trigram_of(runs) is not None)))
    main = [each._replace(caption=f"{each.caption} {_CHOICE}") for each in of_lines] if many else of_lines
    compared = [figure for protocol in protocols(runs) for figure in _compared(runs, protocol)]
    appendix = [
        each._replace(name=each.name + APPENDIX, draw=partial(each.draw, appendix=True)) for each in of_lines if many
    ]
    lengths = len(protocols(runs))
    measured = [*main[:lengths], *compared, *main[lengths:], *_head_parameters(runs), *_maps(runs)]
    return [*measured, *THEORY, *appendix]


def _less_trigram(runs: Sequence[Run]) -> str:
    return ", less that of the trigram on the same tokens" if trigram_positions(runs) else ""


def _share(runs: Sequence[Run]) -> str:
    """What the scores are divided by, in words."""
    rows = ((run, kind, row) for run in runs for kind, of in (run["passkey"] or {}).items() for row in of["rows"])
    known = [copying_gain(run, kind, row["distance"]) is not None for run, kind, row in rows]
    return ", as a share of what perfect copying would gain" if known and all(known) else ", in nats per token"


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


def _of_evaluation(name: str, protocol: str, caption: str, draw: Callable[..., Figure]) -> ListedFigure:
    """A figure of perplexities by one protocol."""

    def has(run: Run) -> object:
        return perplexity_by_length(run, protocol)

    what = f"evaluations by {protocol}"
    return ListedFigure(f"{name}-{protocol}", caption, partial(draw, protocol=protocol), has, what)


def _over_length(runs: Sequence[Run], protocol: str) -> ListedFigure:
    caption = (
        f"Test perplexity over context length, protocol {protocol}: {_SEEDS}; of one seed the noise of seeds. "
        "A line far above the others is cut off, and the legend says how far it goes."
    )
    return _of_evaluation("length", protocol, caption, figures.perplexity_over_length)


def _compared(runs: Sequence[Run], protocol: str) -> list[ListedFigure]:
    """Differences to the baseline, and the sweep of the damping."""
    caption = (
        "Differences of log perplexity to b1-rope at the training length and at the longest, protocol "
        f"{protocol}. Full points: several seeds, with dark 95 % t intervals over seeds; open points: one seed. Broad "
        "light bars: nominal 95 % bootstrap over books, too narrow where books or authors are few. Grey band: the "
        "noise of a single seed. A number at the edge is a point beyond it."
    )
    found = [_of_evaluation("differences", protocol, caption, figures.differences)]
    if is_sweep(runs):
        words = f"Test perplexity over context length by damping b, protocol {protocol}; bands as "
        words += f"before. {other_differences(runs)}"
        found.append(_of_evaluation("damping", protocol, words.rstrip(), figures.damping_sweep))
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
    """A sentence with the noise over windows of the loss at a position. All models share the tokens and most of it."""
    errors = [np.median(run["by_position"]["stderr"]) for run in runs if (run["by_position"] or {}).get("stderr")]
    if not errors:
        return ""
    return (
        "At a single position half of the 95 % interval of a loss over windows is "
        f"{1.96 * np.median(errors):.2g} nats, much the same for all."
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
    alone = "the paper's figures leave the decay out"
    both = any(_has_entry("undecayed", run) for run in runs)
    paper = f"rows before decay: the softmax weight alone; {alone}" if both else alone
    what = (
        f"what reaches the estimate: the softmax weight times the decay ({paper}). "
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


_UNDECAYED = {"maps": "undecayed", "near": "undecayed_near"}


def _draw_first_seeds(entry: str, draw: Callable[..., Figure], runs: Sequence[Run]) -> Figure:
    """A figure of the first run of each label that has maps."""
    mapped = [run for run in runs if _has_entry(entry, run)]
    lengths = train_lengths(mapped)
    if len(lengths) > 1:
        raise MissingData(f"runs: got maps of training lengths {lengths}, expected one")
    first: dict[str, np.ndarray] = {}
    for run in mapped:
        if run["label"] not in first:
            first[run["label"]] = run[entry]
            if (before := run.get(_UNDECAYED[entry])) is not None:
                first[f"{run['label']}\n{figures.BEFORE_DECAY}"] = before
    return draw(first, lengths[0])
