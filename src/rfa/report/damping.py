"""Which runs are of the sweep over the damping b (the paper's table 2)."""

from collections.abc import Iterable
from typing import Any

from rfa.models import PRESETS, RFAConfig

from .lacking import Lacking
from .runs import Run

_SWEPT = ("m2-sc-rfa", "m3-sc-rfa")  # as in the paper, whose b = 5 is m3
_SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps", "backend"}


def damping_of(run: Run) -> float | None:
    """The damping b of a run of SC-RFA; None for another model, or one that differs in more than b and its size."""
    spec = run.get("spec") or {}
    model: dict[str, Any] = spec.get("model") or {}
    if spec.get("preset") not in _SWEPT or model.keys() - _SIZES - {"damping"}:
        return None
    return float({"damping": RFAConfig.damping, **PRESETS[spec["preset"]], **model}["damping"])


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
    """In what else than b the sweep's m3 differs from its m2, in a sentence; empty where it is not among the runs."""
    if all(damping_of(run) is None or run["spec"]["preset"] != "m3-sc-rfa" for run in runs):
        return ""
    names = sorted(PRESETS["m3-sc-rfa"].keys() - PRESETS["m2-sc-rfa"].keys() - {"damping"})
    return f"b = {PRESETS['m3-sc-rfa']['damping']:g} is m3-sc-rfa, which differs in {' and '.join(names)}, too."
