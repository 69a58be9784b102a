"""The learned dynamics and noises of a layer's heads, in full precision."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rfa.checks import check_choice, check_range, require
from rfa.dynamics import TimeDependentNoise, accumulated_variance, partitioned_frequencies, spectral_decay
from rfa.ops.problem import Prior

from .checks import check_frequencies, check_rates, paired

LayerPrior = Literal[Prior, "flat"]  # a flat one is Lyapunov's with a constant variance
Noise = Literal["constant", "time_dependent"]
ProcessNoiseAs = Literal["rate", "steady_state"]

# Initial values of appendix D.2
ROBUSTNESS, INVERSE_TEMPERATURE, KEY_NOISE, QUERY_NOISE, NOISE_FLOOR = 4.0, 1.0, 1.0, 1.0, 0.01
TEMPERING = 1.0  # transported observations count as independent, as in the paper's consensus
# Of the noise's damped waves: a tenth of the white one each, over tens of units of time
NOISE_SHARE, NOISE_RATE, NOISE_FREQUENCY, NOISE_PHASE = 0.1, 0.1, 0.1, 0.0
NOISE_PARTS = 2
SMALLEST = 1e-6  # where mu = 0, a steady state would leave no process noise at all


def bank(
    heads: int, modes: int, frequency: Tensor | None, decay: Tensor | None
) -> tuple[Float[Tensor, "heads modes"], Float[Tensor, " heads"]]:
    """Initial frequencies and decays: by default SC-RFA's partitioned bank with damping 0.05, two heads without decay.

    Raises:
        ValueError: for frequencies of another shape, or not finite.
    """
    if frequency is None:
        frequency = partitioned_frequencies(heads, modes)
    check_frequencies("frequency", frequency, heads, modes)
    return frequency, spectral_decay(frequency, damping=0.05, zero_heads=2) if decay is None else decay


def process_noise_of_slope(
    slope: Float[Tensor, " heads"], decay: Float[Tensor, " heads"], measurement_noise: float
) -> Float[Tensor, " heads"]:
    """`sigma^2` for which the Riccati prior falls by `slope` a unit of time, which starts a layer as ALiBi.

    With `K = 1 - exp(-slope)`, `x = K r / (1 - K)`: `sigma^2 phi(1) = (x^2 + x r (1 - F^2)) / (x + r)`.
    """
    r = measurement_noise
    x = r * torch.expm1(slope)
    forcing = (x.square() + x * r * -torch.expm1(-2 * decay)) / (x + r)
    return forcing / accumulated_variance(decay, torch.ones_like(decay))


class FullPrecision(nn.Module):
    """A module that changes its device but never to half precision, where phases and variances would be wrong."""

    def _apply(self, fn, recurse=True):
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype.itemsize >= 4 else tensor.to(moved.device)

        return super()._apply(keep_precision, recurse)


def softplus_inverse(value: Tensor) -> Tensor:
    """`x` with `softplus(x) = value`, for `value > 0`."""
    return value + torch.log(-torch.expm1(-value))


class PositiveParameters(FullPrecision):
    """Base of modules whose parameters are positive numbers: each is stored as `raw_<name>` before softplus."""

    def hold(self, name: str, value: Tensor) -> None:
        """A learned number that begins at `value > 0`."""
        self.register_parameter(f"raw_{name}", nn.Parameter(softplus_inverse(value.clamp(min=1e-12))))

    def positive(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All numbers held, by name, at least in float32."""
        dtype = torch.promote_types(dtype, torch.float32)
        raw = {name: value for name, value in self.named_parameters(recurse=False) if name.startswith("raw_")}
        return {name.removeprefix("raw_"): F.softplus(value.to(dtype)) for name, value in raw.items()}


def _rate_of_steady_state(decay: Tensor) -> Tensor:
    """`2 mu`, the noise per unit of time of a steady state of 1; where mu = 0 there is none, and a rate counts as 1."""
    return torch.where(decay > 0, 2 * decay, 1.0)


class LearnedNoise(nn.Module):
    """`TimeDependentNoise` of each head, with amplitudes and rates through softplus, in a module of full precision.

    Args:
        process_noise: `(heads,)`, the initial white part, variance per unit of time; each part starts at a tenth.
        parts: their number. They start at different rates and frequencies, or they would stay alike.
    """

    def __init__(self, process_noise: Float[Tensor, " heads"], parts: int):
        super().__init__()
        number = torch.arange(1, parts + 1, dtype=process_noise.dtype, device=process_noise.device)
        each = torch.ones_like(process_noise)[:, None] * torch.ones_like(number)
        amplitude = (NOISE_SHARE * process_noise[:, None] * each).clamp(min=1e-12)
        self.raw_amplitude = nn.Parameter(softplus_inverse(amplitude))
        self.raw_rate = nn.Parameter(softplus_inverse(NOISE_RATE * each / number))
        self.angular_frequency = nn.Parameter(NOISE_FREQUENCY * each * number)
        self.phase = nn.Parameter(NOISE_PHASE * each)

    def forward(self) -> TimeDependentNoise:
        """The operator's argument `noise`."""
        return TimeDependentNoise(
            F.softplus(self.raw_amplitude), F.softplus(self.raw_rate), self.angular_frequency, self.phase
        )


class HeadDynamics(PositiveParameters):
    """Decay, frequencies, noises and robustness of each head, stored through softplus where they are positive.

    Calling it gives the operator's keyword arguments. Frequencies and decays are fixed buffers unless learned;
    learned frequencies keep their conjugate pairs, learned decays start at no less than 1e-6.

    Args:
        frequency: `(heads, modes)`, radians per unit of time.
        decay: `(heads,)`, per unit of time.
        steady_state: initial `sigma~^2`, so that `sigma^2 = 2 mu steady_state`.
        prior: "flat" has no noise parameters: `Sigma = Sigma + gamma^2 = 1`.
        slopes: initial slopes of the Riccati prior, instead of the steady state.
        uses_query_noise: off where gamma^2 is not used, so that every parameter has a gradient.
        robust: off for Gaussian weights, which have no robustness and no inverse temperature.
        tempered: on where precision determines the step: `tempering()` gives its exponent, which starts at 1.
        noise: "time_dependent" adds damped waves to the process noise (appendix E.5).
        noise_parts: their number; without effect where the noise is constant.
        horizon: time added to each lag, or None.
        source_rate: `(heads,)`, initial `rho > 0` of the sources of posterior routing; None for equally likely ones.
        learn_frequencies, learn_decay, learn_horizon, learn_noise_floor: make parameters of them.
        process_noise_as: what is learned of the process noise: "rate", sigma^2 itself, as in the released code; or
            "steady_state", sigma~^2 as in algorithm 1. A head with mu = 0 has none and keeps its rate.

    Raises:
        ValueError: for a shape that is wrong, a number out of range, or options that do not fit together.
    """

    def __init__(
        self,
        frequency: Float[Tensor, "heads modes"],
        decay: Float[Tensor, " heads"],
        *,
        steady_state: float = 0.1,
        prior: LayerPrior = "lyapunov",
        slopes: Float[Tensor, " heads"] | None = None,
        uses_query_noise: bool = True,
        robust: bool = True,
        tempered: bool = False,
        noise: Noise = "constant",
        noise_parts: int = NOISE_PARTS,
        horizon: float | None = None,
        source_rate: Float[Tensor, " heads"] | None = None,
        learn_frequencies: bool = False,
        learn_decay: bool = False,
        learn_horizon: bool = False,
        learn_noise_floor: bool = False,
        process_noise_as: ProcessNoiseAs = "rate",
    ):
        super().__init__()
        require(frequency.dim() == 2, "frequency", tuple(frequency.shape), "shape (heads, modes)")
        heads, modes = frequency.shape
        check_frequencies("frequency", frequency, heads, modes)
        if learn_frequencies:
            require(paired(frequency), "learn_frequencies", True, "frequency in conjugate pairs (w, -w) with it")
        check_rates("decay", decay, heads)
        check_choice("prior", prior, LayerPrior)
        require(slopes is None or prior == "riccati", "slopes", slopes, "prior='riccati' with them")
        check_choice("noise", noise, Noise)
        check_range("noise_parts", noise_parts, 1, 1000)
        require(0 <= steady_state < math.inf, "steady_state", steady_state, "a finite number >= 0")
        require(horizon is None or 0 <= horizon < math.inf, "horizon", horizon, "None or a number >= 0")
        require(horizon is not None or not learn_horizon, "learn_horizon", learn_horizon, "a horizon to start from")
        require(noise == "constant" or prior == "lyapunov", "noise", noise, "prior='lyapunov' with it")
        check_choice("process_noise_as", process_noise_as, ProcessNoiseAs)
        noisy = prior != "flat"
        require(noisy or not learn_noise_floor, "learn_noise_floor", True, "a prior other than 'flat' with it")
        require(noisy or process_noise_as == "rate", "process_noise_as", process_noise_as, "'rate' with prior='flat'")
        process_noise = torch.where(decay > 0, 2 * decay * steady_state, SMALLEST)
        if slopes is not None:
            check_rates("slopes", slopes, heads)
            process_noise = process_noise_of_slope(slopes, decay, KEY_NOISE + NOISE_FLOOR)
        if learn_frequencies:  # the positive half; the rest follows by conjugation
            self.raw_frequency = nn.Parameter(frequency[:, ::2].clone())
        else:
            self.register_buffer("frequency", frequency)
        each = torch.ones_like(decay)
        decay = decay.clamp(min=SMALLEST) if learn_decay else decay
        self._hold("decay", decay, learn_decay)
        if process_noise_as == "steady_state":
            self.hold("steady_state", process_noise / _rate_of_steady_state(decay))
        else:
            self._hold("process_noise", process_noise if noisy else 0 * each, noisy)
        self._hold("key_noise", KEY_NOISE * each if noisy else 0 * each, noisy)
        self._hold("query_noise", QUERY_NOISE * each if noisy else 0 * each, noisy and uses_query_noise)
        self._hold("noise_floor", NOISE_FLOOR * each if noisy else each, learn_noise_floor)
        if robust:
            self.hold("robustness", ROBUSTNESS * each)
            self.hold("inverse_temperature", INVERSE_TEMPERATURE * each)
        if horizon is not None:
            self._hold("horizon", horizon * each, learn_horizon)
        if source_rate is not None:
            check_rates("source_rate", source_rate, heads)
            self.hold("source_rate", source_rate)
        if tempered:
            self.hold("tempering", TEMPERING * each)
        if noise == "time_dependent":
            self.noise = LearnedNoise(process_noise, noise_parts)

    def _hold(self, name: str, value: Tensor, learned: bool) -> None:
        """A fixed value under its own name, a learned one through softplus as `raw_...`: loading cannot mix them."""
        if learned:
            self.hold(name, value)
        else:
            self.register_buffer(name, value)

    def forward(self) -> dict[str, Any]:
        """The operator's keyword arguments, all per head."""
        raw = dict(self.named_parameters(recurse=False))
        half, _ = raw.pop("raw_frequency", None), raw.pop("raw_tempering", None)
        values: dict[str, Any] = {name.removeprefix("raw_"): F.softplus(value) for name, value in raw.items()}
        values |= dict(self.named_buffers())
        if half is not None:
            values["frequency"] = torch.stack([half, -half], dim=-1).flatten(-2)
        if "steady_state" in values:
            values["process_noise"] = values.pop("steady_state") * _rate_of_steady_state(values["decay"])
        return values | {name: part() for name, part in self.named_children()}

    def tempering(self) -> Float[Tensor, " heads"]:
        """The exponent p > 0 of the precision in a step that it determines (appendix E.2)."""
        raw = dict(self.named_parameters(recurse=False))  # `get_parameter` refuses what `torch.func` puts there
        return F.softplus(raw["raw_tempering"])
