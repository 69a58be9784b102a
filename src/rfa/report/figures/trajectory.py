"""A state, its noisy measurements, and what each says of other times once transported there (the paper's figure 1)."""

from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from rfa.estimation import LinearSDE

from .style import COLOURS, MARKERS, PAGE, letter, styled

_FINER = 8  # steps of the path between two measurements


@styled
def transported_measurements(
    decay: float = 0.06,
    frequency: float = 0.6,
    process_noise: float = 0.05,
    key_noise: float = 0.3,
    length: int = 60,
    duration: float = 16.0,
    targets: int = 5,
    seed: int = 0,
) -> Figure:
    """A damped rotation in the plane: its path and measurements, and every measurement transported to five times.

    Filled points come from the target's past and are what a causal estimate uses, faint ones from its future.

    Args:
        decay: mu, per unit of time.
        frequency: omega, radians per unit of time.
        process_noise: sigma^2, variance per unit of time.
        key_noise: eta^2, variance.
        length: number of measurements.
        duration: units of time that they span.
        targets: number of target times, evenly spread.
        seed: of the random numbers.
    """
    eye = torch.eye(2, dtype=torch.float64)
    turning = torch.tensor([[0.0, -frequency], [frequency, 0.0]], dtype=torch.float64)
    sde = LinearSDE(turning - decay * eye, process_noise / 2 * eye, eye, key_noise / 2 * eye)
    fine = torch.linspace(0, duration, (length - 1) * _FINER + 1, dtype=torch.float64)
    start = torch.tensor([3.0, 0.0], dtype=torch.float64), torch.zeros_like(eye)
    path_states, path_measured = sde.simulate(fine, torch.Generator().manual_seed(seed), initial=start)
    times, states, measured = fine[::_FINER], path_states[::_FINER], path_measured[::_FINER]

    figure, (path, transported) = plt.subplots(1, 2, figsize=(PAGE, 3.2), sharex=True, sharey=True, layout="compressed")
    path.plot(*path_states.T, color="black", linewidth=1, label="state $x(t)$")
    path.plot(*measured.T, "o", color=COLOURS[0], markersize=2.5, label="measurements $z_i$")
    path.set(title="trajectory and measurements", ylabel="second component")

    transported.plot(*path_states.T, color="0.6", linewidth=0.8, zorder=1)
    chosen = torch.linspace(length / targets - 1, length - 1, targets).round().long()
    for place, target in enumerate(chosen.tolist()):
        at = (sde.transition(times[target] - times) @ measured[..., None])[..., 0]
        past = times <= times[target]
        look: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": ""}
        transported.plot(*at[~past].T, **look, markersize=2.2, alpha=0.25, markeredgewidth=0, zorder=2)
        transported.plot(*at[past].T, **look, markersize=2.2, markeredgewidth=0, zorder=3, alpha=0.8)
        label = f"$t_i$ = {times[target].item():.1f}"
        look |= {"markeredgecolor": "black", "markeredgewidth": 0.8}
        transported.plot(*states[target], **look, markersize=6, zorder=4, label=label)
    transported.set_title("transported to $t_i$ (faint: from later times)")
    for axes in (path, transported):
        axes.set_xlabel("first component")
        axes.set_aspect("equal", adjustable="box")
    handles = [*path.get_legend_handles_labels()[0], *transported.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.0)
    letter((path, transported))
    return figure
