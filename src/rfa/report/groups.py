"""Which models are shown together, where there are too many for one panel."""

from collections.abc import Iterable

from .runs import Run

BASELINE = "b1-rope"  # what every group is held against
_PRESETS = {
    "the paper's models": ("b1-rope", "b2-alibi", "b3-decayed-rope", "b4-sc-rope", "m1-rfa", "m2-sc-rfa", "m3-sc-rfa"),
    "the paper's ablations of m2": ("m2.",),
    "Riccati priors, variants of m2": ("x", "m2-"),
    "controls": ("c", "b1-rope-as-released"),
}
_OTHERS = "others"


def by_group(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Labels by group, both in order; a label belongs where its preset does, labels of unknown presets come last."""
    found: dict[str, list[str]] = {group: [] for group in (*_PRESETS, _OTHERS)}
    for label, preset in {run["label"]: run["preset"] for run in runs}.items():
        found[_group(preset)].append(label)
    return {group: labels for group, labels in found.items() if labels}


def _group(preset: str) -> str:
    exact = next((group for group, names in _PRESETS.items() if preset in names), None)
    begins = next((group for group, names in _PRESETS.items() if preset.startswith(names)), _OTHERS)
    return exact or begins
