"""The operator's checks: each message names the argument, what was given and what was expected."""

import math
from typing import get_args

import torch
from torch import Tensor

from rfa.dynamics import TimeDependentNoise

from .inputs import Options, Parameters, Prior, Weight, by_segment, times_dtype
from .transforms import readable

_POSITIVE = ("robustness", "inverse_temperature")
_SIGNED = ("frequency", "periodic_frequency", "periodic_phase")


def validate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Parameters,
    options: Options,
    times: Tensor | None,
    query_times: Tensor | None,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    per_mode: tuple[str, ...] = ("frequency",),
) -> None:
    """Raise `ValueError` where the arguments of `robust_filter_attention` do not fit together.

    The parameters that `per_mode` names are `(heads, modes)`, all others `(heads,)`.
    """
    _check_options(options)
    _check_noise(parameters.noise, options)
    _check_states(query, key, value, options.rotate_values)
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    _check_parameters(parameters, heads, channels // 2, query.device, per_mode)
    if readable(*parameters.tensors().values()):
        _check_parameter_values(parameters.to(torch.promote_types(query.dtype, torch.float32)))
    validate_positions(batch, queries, keys, query.device, times, query_times, key_mask, segment_ids)


def validate_positions(
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
    times: Tensor | None,
    query_times: Tensor | None,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
) -> None:
    """Raise `ValueError` where times, mask and segments do not fit queries and keys of these numbers."""
    _check_times("times", times, batch, keys, device)
    _check_times("query_times", query_times, batch, queries, device)
    check_flags("key_mask", key_mask, batch, keys, device, integer=False)
    check_flags("segment_ids", segment_ids, batch, keys, device, integer=True)
    if queries > keys and (query_times is None or segment_ids is not None):
        raise ValueError(
            f"query_times: got {queries} queries for {keys} keys, expected query_times without segment_ids: "
            "by default the queries stand at the last times"
        )
    if times is not None and readable(times, query_times, key_mask, segment_ids):
        _check_increasing(times.to(times_dtype(times, query_times)), key_mask, segment_ids)
    if query_times is not None and readable(query_times) and not bool(query_times.isfinite().all()):
        raise ValueError("query_times: got NaN or infinite values, expected finite numbers")


def _check_options(options: Options) -> None:
    for name, given, choices in (
        ("weight", options.weight, get_args(Weight)),
        ("prior", options.prior, get_args(Prior)),
    ):
        if given not in choices:
            raise ValueError(f"{name}: got {given!r}, expected one of {', '.join(map(repr, choices))}")
    if options.prior == "riccati" and options.query_noise_in_bias:
        raise ValueError("query_noise_in_bias: got True with prior='riccati', expected prior='lyapunov'")


def _check_noise(noise: object, options: Options) -> None:
    if noise is None:
        return
    if not isinstance(noise, TimeDependentNoise):
        raise ValueError(f"noise: got {type(noise).__name__}, expected a TimeDependentNoise")
    if options.prior == "riccati":
        raise ValueError("noise: got a TimeDependentNoise with prior='riccati', expected prior='lyapunov'")


def _check_states(query: Tensor, key: Tensor, value: Tensor, rotate_values: bool) -> None:
    for name, state in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, state)
        if state.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(state.shape)}, expected (batch, heads, length, channels)")
        if not state.is_floating_point():
            raise ValueError(f"{name}: got dtype {state.dtype}, expected a floating-point dtype")
        if state.dtype != query.dtype:
            raise ValueError(f"{name}: got dtype {state.dtype}, expected {query.dtype}, the query's")
        _check_device(name, state, query.device)
        if state.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"{name}: got batch and heads {tuple(state.shape[:2])}, expected {tuple(query.shape[:2])}, the query's"
            )
    channels = query.shape[-1]
    if channels == 0 or channels % 2:
        raise ValueError(f"query: got {channels} channels, expected 2 d: d real and d imaginary parts")
    if key.shape[-1] != channels:
        raise ValueError(f"key: got {key.shape[-1]} channels, expected {channels}, the query's")
    if value.shape[2] != key.shape[2]:
        raise ValueError(f"value: got length {value.shape[2]}, expected {key.shape[2]}, the key's")
    if rotate_values and value.shape[-1] != channels:
        raise ValueError(
            f"value: got {value.shape[-1]} channels, expected {channels}, the query's, or rotate_values=False: "
            "values turn with the same frequencies"
        )


def _check_parameters(
    parameters: Parameters, heads: int, modes: int, device: torch.device, per_mode: tuple[str, ...]
) -> None:
    for name, given in parameters.tensors().items():
        expected = (heads, modes) if name in per_mode else (heads,)
        _check_tensor(name, given)
        if tuple(given.shape) != expected:
            raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected {expected}")
        if not given.is_floating_point():
            raise ValueError(f"{name}: got dtype {given.dtype}, expected a floating-point dtype")
        _check_device(name, given, device)


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


def _check_tensor(name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise ValueError(f"{name}: got {type(given).__name__}, expected a tensor")


def _check_device(name: str, given: Tensor | None, device: torch.device) -> None:
    if given is not None and given.device != device:
        raise ValueError(f"{name}: got device {given.device}, expected {device}, the query's")


def _check_times(name: str, given: Tensor | None, batch: int, length: int, device: torch.device) -> None:
    if given is None:
        return
    _check_tensor(name, given)
    _check_device(name, given, device)
    if given.dtype == torch.bool or given.is_complex():
        raise ValueError(f"{name}: got dtype {given.dtype}, expected real numbers")
    if tuple(given.shape) not in ((length,), (batch, length)):
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected {(length,)} or {(batch, length)}")


def check_flags(name: str, given: Tensor | None, batch: int, length: int, device: torch.device, integer: bool) -> None:
    """Raise `ValueError` unless `given` is None or `(batch, length)`, of integers or of booleans."""
    if given is None:
        return
    _check_tensor(name, given)
    is_integer = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    if (not is_integer) if integer else given.dtype != torch.bool:
        raise ValueError(f"{name}: got dtype {given.dtype}, expected {'an integer dtype' if integer else 'torch.bool'}")
    if tuple(given.shape) != (batch, length):
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected (batch, keys) = {(batch, length)}")
    _check_device(name, given, device)


def _check_increasing(times: Tensor, key_mask: Tensor | None, segment_ids: Tensor | None) -> None:
    """Times increase strictly among the keys of a segment that take part; padding may carry any time."""
    times = torch.atleast_2d(times.detach())
    if not bool(times.isfinite().all()):
        raise ValueError("times: got NaN or infinite values, expected finite numbers")
    times, follows, _ = by_segment(times, key_mask, segment_ids)
    wrong = follows[:, 1:] & (times[:, 1:] <= times[:, :-1])
    if bool(wrong.any()):
        row, at = wrong.nonzero()[0].tolist()
        pair = times[row, at : at + 2].tolist()
        raise ValueError(
            f"times: got {pair[0]!r} followed by {pair[1]!r} (batch row {row}), "
            "expected strictly increasing times within a segment"
        )
