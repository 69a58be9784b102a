"""Bias and gate of a lag: the diffusive and the integrative regime, and what the decay rate does to both."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from rfa.dynamics import bias, gate

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
