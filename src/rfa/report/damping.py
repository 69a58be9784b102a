"""Which runs are of the sweep over the damping b (the paper's table 2)."""

from collections.abc import Iterable
from typing import Any

from .lacking import Lacking
from .runs import Run

_SWEPT = ("m2-sc-rfa", "m3-sc-rfa")  # as in the paper, whose b = 5 is m3
_SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps", "backend"}


def damping_of(run: Run) -> float | None:
    """The damping b of a run of SC-RFA; None for another model, one that differs in more than b and its size, or in
    how its SDE is trained."""
    spec = run.get("spec") or {}
    model: dict[str, Any] = spec.get("model") or {}
    if spec.get("preset") not in _SWEPT or model.keys() - _SIZES - {"damping"} or spec.get("one_group"):
        return None
    return float(run["config"]["damping"])


def damping_by_label(runs: Iterable[Run]) -> dict[str, float]:
    """The damping b of each label of the sweep, smallest first.

    Raises:
        Lacking: where two labels have one b, or one label has two: a row of the table holds one.
    """
    found: dict[str, float] = {}
    for run in runs:
        label, damping = run["label"], damping_of(run)
        if damping is None:
            continue
        if found.setdefault(label, damping) != damping:
            raise Lacking(f"runs: got b = {found[label]:g} and {damping:g} of label {label}, expected one")
        if twins := [other for other, b in found.items() if b == damping and other != label]:
            raise Lacking(f"runs: got labels {twins[0]} and {label} both of b = {damping:g}, expected one")
    return dict(sorted(found.items(), key=lambda item: item[1]))


def unlike(runs: Iterable[Run]) -> str:
    """In what else than b the sweep's m3 differs from its m2, in a sentence; empty where it has not both."""
    configs = {run["spec"]["preset"]: run["config"] for run in runs if damping_of(run) is not None}
    if len(configs) < len(_SWEPT):
        return ""
    one, other = (configs[preset] for preset in _SWEPT)
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name) and name != "damping")
    return f"b = {other['damping']:g} is {_SWEPT[1]}, which differs in {' and '.join(names)}, too." if names else ""
