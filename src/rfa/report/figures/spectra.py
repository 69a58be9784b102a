"""The modes of a layer: eigenvalues of RFA and SC-RFA, and the time scales that spectral coupling spreads."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from rfa.dynamics import decay_kernel, partitioned_frequencies, rope_frequencies, rotation, spectral_decay

from .style import PAGE, letter, shades, styled


@styled
def eigenvalue_spectra(heads: int = 8, modes: int = 32, damping: float = 1.0) -> Figure:
    """Eigenvalues `-mu_h + i omega_hk`: every head with RoPE's bank (RFA), and a band a head (SC-RFA).

    Both have the same decays, those of SC-RFA. Axes are logarithmic but around zero.

    Args:
        heads, modes: as `rfa.dynamics.partitioned_frequencies`.
        damping: b.
    """
    figure, panels = plt.subplots(1, 2, figsize=(PAGE, 3.4), sharex=True, sharey=True)
    bands = partitioned_frequencies(heads, modes)
    decay = spectral_decay(bands, damping)
    slowest = bands.abs().min().item()
    for axes, title, bank in (
        (panels[0], "RFA: one bank for all heads", rope_frequencies(heads, modes)),
        (panels[1], rf"SC-RFA: a band a head, $\mu_h = b\,\omega_{{h,\max}}$, $b$ = {damping:g}", bands),
    ):
        for head, colour in enumerate(shades(heads)):
            look = {"color": colour, "marker": "_", "markersize": 8, "markeredgewidth": 0.6, "linestyle": ""}
            axes.plot(-decay[head].expand(modes), bank[head], label=f"head {head}", **look)
        axes.axhline(0, color="0.3", linewidth=0.6, zorder=0)
        axes.set_xscale("symlog", linthresh=decay.min().item())
        axes.set_yscale("symlog", linthresh=slowest)
        axes.set_yticks([sign * 10.0**power for sign in (-1, 1) for power in (-4, -2, 0)] + [0])
        axes.set(xlabel=r"real part $-\mu_h$ (1/time)", title=title)
    panels[0].set_ylabel(r"imaginary part $\omega_{hk}$ (radians/time)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center")
    letter(panels)
    return figure


@styled
def temporal_scale_separation(heads: int = 8, modes: int = 32, damping: float = 0.05, shown: int = 4) -> Figure:
    """What is left of a state over the lag, by head, and how its fastest mode rings (SC-RFA).

    Args:
        heads, modes, damping: as `eigenvalue_spectra`.
        shown: heads in the second panel, evenly from the slowest to the fastest.
    """
    figure, (left, ringing) = plt.subplots(1, 2, figsize=(PAGE, 2.7), width_ratios=(1, 1))
    bands = partitioned_frequencies(heads, modes)
    decay, fastest = spectral_decay(bands, damping).double(), bands.amax(dim=-1, keepdim=True)
    longest = 5 / decay.min().item()
    lag = torch.logspace(-1, torch.tensor(longest).log10().item(), 4000, dtype=torch.float64)
    kept = decay_kernel(decay[:, None], lag)
    cosine = rotation(fastest, lag)[0][..., 0]
    colours = shades(heads)
    for head in range(heads):
        left.plot(lag, kept[head], color=colours[head], label=f"head {head}")
    rows = [round(index * (heads - 1) / max(shown - 1, 1)) for index in range(shown)]
    for place, head in enumerate(rows):
        ringing.axhline(2.4 * place, color="0.8", linewidth=0.5, zorder=0)
        ringing.plot(lag, 2.4 * place + kept[head] * cosine[head], color=colours[head], linewidth=0.8)
    ringing.set_yticks([2.4 * place for place in range(shown)], [f"head {head}" for head in rows])
    ringing.grid(visible=False, axis="y")
    ringing.set(title=r"fastest mode, $e^{-\mu_h\tau}\cos\,\omega_{h,\max}\tau$")
    left.set(ylabel=r"share left $e^{-\mu_h\tau}$", title=f"decay by head, $b$ = {damping:g}", ylim=(0, 1.02))
    for axes in (left, ringing):
        axes.set_xscale("log")
        axes.set_xlabel(r"lag $\tau$ (tokens)")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center")
    letter((left, ringing))
    return figure
