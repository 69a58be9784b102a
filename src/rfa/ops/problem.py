"""The problem that every backend is handed (parameters, positions, options), and the checks of its parts.

Each message of a check names the argument, what was given and what was expected.
"""

import math
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from rfa.checks import require
from rfa.dynamics import TimeDependentNoise, covariance, time_dependent_variance

from .positions import Positions, check_given, check_tensor
from .transforms import values_at_hand

Weight = Literal["student_t", "exponential"]
Prior = Literal["lyapunov", "riccati"]
Certified = float | Literal["auto"] | None

_WEIGHTS, _PRIORS = get_args(Weight), get_args(Prior)
_SWITCHES = ("causal", "rotate_values", "gate", "query_noise_in_bias", "log_precision")
_POSITIVE = ("robustness", "inverse_temperature")
_SIGNED = ("frequency", "angular_frequency", "phase")


class Parameters(NamedTuple):
    """The dynamics and noises of each head, each `(heads,)` except the frequency.

    Fields:
        decay: mu, per unit of time.
        frequency: omega, `(heads, modes)`, radians per unit of time.
        process_noise: sigma^2, variance per unit of time.
        key_noise, query_noise, noise_floor: the variances eta^2, gamma^2 and sigma_0^2.
        robustness: nu_s, degrees of freedom per mode.
        inverse_temperature: beta_s.
        horizon: h, units of time; None for none.
        noise: the parts of the process noise beside the white one; None for none.
        source_rate: rho, per unit of time, of posterior routing alone; None for sources that are equally likely.
    """

    decay: Tensor
    frequency: Tensor
    process_noise: Tensor
    key_noise: Tensor
    query_noise: Tensor
    noise_floor: Tensor
    robustness: Tensor
    inverse_temperature: Tensor
    horizon: Tensor | None = None
    noise: TimeDependentNoise | None = None
    source_rate: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Parameters":
        """The same in another dtype, except `noise`: its phases are formed before rounding."""
        return Parameters(*(p.to(dtype) if isinstance(p, Tensor) else p for p in self))  # type: ignore[arg-type]

    def unsqueezed(self, dimensions: int) -> "Parameters":
        """The same with dimensions of size 1 after the heads, to broadcast with lags; not `frequency`."""
        index = (..., *(None,) * dimensions)
        changed: dict[str, Any] = {name: p[index] for name, p in self._asdict().items() if isinstance(p, Tensor)}
        changed["frequency"] = self.frequency
        if self.noise is not None:
            changed["noise"] = TimeDependentNoise(*(p[(slice(None), *index[1:])] for p in self.noise))
        return self._replace(**changed)

    def variance(self, lag: Tensor) -> Tensor:
        """`Sigma(tau)`, the variance of a key after a lag that broadcasts with the parameters."""
        if self.noise is None:
            return covariance(self.decay, self.process_noise, self.key_noise, self.noise_floor, lag)
        accumulated = time_dependent_variance(self.decay, self.process_noise, self.noise, lag)
        none = torch.zeros_like(self.process_noise)
        return accumulated + covariance(self.decay, none, self.key_noise, self.noise_floor, lag)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that are given, by name, those of the noise among them."""
        named = {name: given for name, given in self._asdict().items() if name != "noise" and given is not None}
        return named | ({} if self.noise is None else self.noise._asdict())


class Options(NamedTuple):
    """The choices that select a variant of the operator, as the arguments of `robust_filter_attention`.

    Fields:
        causal, weight, rotate_values, prior, gate, query_noise_in_bias: the arguments of these names.
        log_precision: the log precision is wanted too.
        in_frame: the states stand in the common frame already, and the estimate stays in it.
        dropout: share of the weights that become 0, by the reference only.
        certified: the argument of this name; or "auto", by which a fused backend leaves out what the states' dtype
            could not show, where the prior allows it.
    """

    causal: bool = True
    weight: Weight = "student_t"
    rotate_values: bool = True
    prior: Prior = "lyapunov"
    gate: bool = True
    query_noise_in_bias: bool = False
    log_precision: bool = False
    in_frame: bool = False
    dropout: float = 0.0
    certified: Certified = None


class RiccatiWeights(NamedTuple):
    """`log c_ij = log K_j - |C_i - C_j|`, the weight of a past observation in a steady Kalman filter.

    Fields:
        log_gain: log K, `(b, heads, keys)`.
        cumulative: C, the sum of `log(1 - K_l)` along the keys, `(b, heads, keys)` in `time_dtype`. Within a group it
            is right up to a constant.
        at_queries: C at the queries, `(b, heads, queries)`.
    """

    log_gain: Tensor
    cumulative: Tensor
    at_queries: Tensor


class Problem(NamedTuple):
    """What every backend is handed beside the states: located once, validated, and trusted from there on.

    Fields:
        parameters: the dynamics and noises.
        positions: where keys and queries stand, `(1 or batch, length)`.
        options: the variant.
        riccati: the weights of the Riccati prior where the keys are a part of a sequence; None to derive them from
            `positions`, which then hold all keys.
    """

    parameters: Parameters
    positions: Positions
    options: Options
    riccati: RiccatiWeights | None = None


def validate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Parameters,
    options: Options,
    per_mode: tuple[str, ...] = ("frequency",),
    check_values: bool | None = None,
) -> None:
    """Raise `ValueError` where the arguments of `robust_filter_attention` do not fit together.

    The parameters that `per_mode` names are `(heads, modes)`, all others `(heads,)`. Their values are checked where
    `values_at_hand`.
    """
    _check_options(options)
    if (noise := parameters.noise) is not None:
        require(isinstance(noise, TimeDependentNoise), "noise", noise, "a TimeDependentNoise")
        if options.prior == "riccati":
            raise ValueError("noise: got a TimeDependentNoise with prior='riccati', expected prior='lyapunov'")
    _check_states(query, key, value, options.rotate_values)
    _, heads, _, channels = query.shape
    _check_parameters(parameters, heads, channels // 2, query.device, per_mode)
    if values_at_hand(*parameters.tensors().values(), check=check_values):
        _check_parameter_values(parameters.to(torch.promote_types(query.dtype, torch.float32)))


def _check_options(options: Options) -> None:
    for name, given, choices in (("weight", options.weight, _WEIGHTS), ("prior", options.prior, _PRIORS)):
        if given not in choices:
            raise ValueError(f"{name}: got {given!r}, expected one of {', '.join(map(repr, choices))}")
    for name in _SWITCHES:
        given = getattr(options, name)
        if not isinstance(given, (bool, np.bool_)):
            name = "return_log_precision" if name == "log_precision" else name  # the argument's name
            raise ValueError(f"{name}: got {given!r}, expected True or False")
    check_certified(options.certified, certificate_missing(options.prior, options.causal))
    if options.prior == "riccati" and options.query_noise_in_bias:
        raise ValueError("query_noise_in_bias: got True with prior='riccati', expected prior='lyapunov'")


def certificate_missing(prior: str, causal: bool) -> str | None:
    """Why no keys can be left out, or None: only the Riccati weight of old keys falls without an end."""
    if prior != "riccati":
        return f"prior={prior!r}, expected None, or prior='riccati': it alone bounds the weight of old keys"
    return None if causal else "causal=False, expected None, or causal=True: later keys have no bound"


def check_certified(certified: object, missing: str | None) -> None:
    """Raise `ValueError` for what is no eps, and where no keys can be left out, for the reason given."""
    if certified is None:
        return
    number = isinstance(certified, Real) and not isinstance(certified, (bool, np.bool_))
    if not number or not 0 <= certified < 1:  # type: ignore[operator]
        raise ValueError(f"certified: got {certified!r}, expected None or a number eps with 0 <= eps < 1")
    if missing is not None:
        raise ValueError(f"certified: got {certified!r} with {missing}")


def _check_states(query: Tensor, key: Tensor, value: Tensor, rotate_values: bool) -> None:
    for name, state in (("query", query), ("key", key), ("value", value)):
        if check_tensor(name, state).dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(state.shape)}, expected (batch, heads, length, channels)")
    batch, heads, _, channels = query.shape
    if channels == 0 or channels % 2:
        raise ValueError(f"query: got {channels} channels, expected 2 d: d real and d imaginary parts")
    if rotate_values and value.shape[-1] != channels:
        raise ValueError(
            f"value: got {value.shape[-1]} channels, expected {channels}, the query's, or rotate_values=False: "
            "values turn with the same frequencies"
        )
    length, width = key.shape[2], value.shape[3]
    for name, state, shape in (
        ("query", query, tuple(query.shape)),
        ("key", key, (batch, heads, length, channels)),
        ("value", value, (batch, heads, length, width)),
    ):
        check_given(name, state, "a floating-point dtype", query.device, shape)
        if state.dtype != query.dtype:
            raise ValueError(f"{name}: got dtype {state.dtype}, expected {query.dtype}, the query's")


def _check_parameters(
    parameters: Parameters, heads: int, modes: int, device: torch.device, per_mode: tuple[str, ...]
) -> None:
    shapes = dict.fromkeys(per_mode, (heads, modes))
    if (noise := parameters.noise) is not None:
        check_tensor("amplitude", noise.amplitude)
        parts = noise.amplitude.shape[-1] if noise.amplitude.dim() == 2 else 1
        shapes |= dict.fromkeys(noise._fields, (heads, max(1, parts)))
    for name, given in parameters.tensors().items():
        check_given(name, given, "a floating-point dtype", device, shapes.get(name, (heads,)))


def _check_parameter_values(parameters: Parameters) -> None:
    given = {name: value.detach().to(parameters.decay.dtype) for name, value in parameters.tensors().items()}
    if not given["decay"].numel():
        return
    rows: list[tuple[str, Tensor]] = []  # `(heads,)` each
    for name, value in given.items():
        if name in _SIGNED:
            rows.append((name, value.abs() if value.dim() == 1 else value.abs().amax(-1)))
        else:
            rows += [(name, part) for part in ((value,) if value.dim() == 1 else value.aminmax(dim=-1))]
    stacked = torch.stack([row for _, row in rows])
    least, most = torch.stack(stacked.aminmax(dim=-1)).tolist()  # one synchronisation for all; NaN wins
    for (name, _), low, high in zip(rows, least, most, strict=True):
        if high < math.inf and (low > 0 if name in _POSITIVE else low >= 0):
            continue
        wanted = "numbers" if name in _SIGNED else "and > 0" if name in _POSITIVE else "and >= 0"
        raise ValueError(f"{name}: got {given[name].flatten().tolist()[:8]}, expected finite {wanted}")
