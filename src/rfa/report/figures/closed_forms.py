"""The closed forms of the dynamics: bias and gate by regime, eigenvalues and time scales by head."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from rfa.dynamics import bias, decay_kernel, gate, partitioned_frequencies, rope_frequencies, rotation, spectral_decay

from .style import PAGE, letter, shades, styled

DECAYS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)


@styled
def diffusive_and_integrative(
    decay: float = 0.02,
    low: Sequence[float] = (0.05, 0.1, 0.2, 0.4),
    high: float = 1.0,
    noise_floor: float = 0.01,
    query_noise: float = 0.1,
    longest: float = 150.0,
) -> Figure:
    """Bias and gate over the lag: diffusive heads in the upper row, integrative ones in the lower (appendix C.2).

    Args:
        decay: mu > 0, per unit of time.
        low: the smaller of the two variances, one curve each: eta^2 in the upper row, sigma~^2 in the lower.
        high: the larger one: sigma~^2 in the upper row, eta^2 in the lower.
        noise_floor, query_noise: sigma_0^2 and gamma^2, variances.
        longest: the last lag, in units of time.
    """
    figure, panels = plt.subplots(2, 2, figsize=(PAGE, 3.7), sharex=True, sharey="col")
    lag = torch.linspace(0, longest, 301, dtype=torch.float64)
    mu, floor, gamma2 = _numbers(decay, noise_floor, query_noise)
    names = ("diffusive", r"\eta^2"), ("integrative", r"\tilde{\sigma}^2")
    fixed = (r"\tilde{\sigma}^2", r"\eta^2")
    for row, (regime, symbol) in enumerate(names):
        for value, colour in zip(low, shades(len(low)), strict=True):
            eta2, steady = _numbers(value, high) if regime == "diffusive" else _numbers(high, value)
            parameters = mu, 2 * mu * steady, eta2, floor
            panels[row, 0].plot(lag, bias(*parameters, lag), color=colour, label=f"${symbol}$ = {value:g}")
            panels[row, 1].plot(lag, gate(*parameters, gamma2, lag), color=colour)
        kind = rf"{regime}, $\alpha {'<>'[row]} 0$:"
        level = f"(${fixed[row]}$ = {high:g})"
        panels[row, 0].set(ylabel=r"bias $B_\tau$ (nats)", title=f"{kind} bias {level}")
        panels[row, 1].set(ylabel=r"gate $\tilde{P}_\tau$ (1/variance)", title=f"{kind} gate {level}")
        panels[row, 0].legend(loc=("upper right", "lower right")[row], ncols=row + 1)
    for axes in panels[1]:
        axes.set_xlabel(r"lag $\tau$ (units of time)")
    letter(panels.ravel())
    return figure


@styled
def bias_and_gate_over_decay(
    decays: Sequence[float] = DECAYS,
    process_noise: float = 0.02,
    key_noise: float = 0.05,
    noise_floor: float = 0.01,
    query_noise: float = 0.1,
    longest: float = 200.0,
) -> Figure:
    """Bias and gate over the lag by decay rate, from Brownian (mu = 0) to quickly settled (appendix C.2).

    Args:
        decays: mu >= 0, per unit of time, one curve each.
        process_noise: sigma^2, variance per unit of time, the same for all.
        key_noise, noise_floor, query_noise: eta^2, sigma_0^2 and gamma^2, variances.
        longest: the last lag, in units of time.
    """
    figure, panels = plt.subplots(1, 2, figsize=(PAGE, 2.4))
    lag = torch.linspace(0, longest, 401, dtype=torch.float64)
    sigma2, eta2, floor, gamma2 = _numbers(process_noise, key_noise, noise_floor, query_noise)
    for decay, colour in zip(decays, shades(len(decays)), strict=True):
        (mu,) = _numbers(decay)
        name = f"$\\mu$ = {decay:g}" + (" (Brownian)" if decay == 0 else "")
        panels[0].plot(lag, bias(mu, sigma2, eta2, floor, lag), color=colour, label=name)
        panels[1].plot(lag, gate(mu, sigma2, eta2, floor, gamma2, lag), color=colour)
    panels[0].set(ylabel=r"bias $B_\tau$ (nats)", title="bias")
    panels[1].set(ylabel=r"gate $\tilde{P}_\tau$ (1/variance)", title="gate")
    for axes in panels:
        axes.set_xlabel(r"lag $\tau$ (units of time)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center")
    letter(panels)
    return figure


def _numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


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
