"""The lag tables by one kernel, and by one more their gradients: the same in PyTorch is some sixty small kernels."""

from typing import Any

import torch
from torch import Tensor

from rfa.ops.dense import least_effective_variance
from rfa.ops.prior import UNIT, LagTables, log_gains_of_lags
from rfa.ops.prior import lag_tables as torch_lag_tables
from rfa.ops.problem import Options, Parameters
from rfa.ops.transforms import operator, refuse_forward_mode, transformable

_BLOCK = 128  # lags of a program
_NAMES = tuple(name for name in Parameters._fields if name not in ("frequency", "noise", "source_rate"))
_OPTIONAL = ("horizon", "log_gain", "log_rest")
_PARAMETERS = (*_NAMES, "log_gain", "log_rest")  # in the order of the kernels
_GIVEN = len(_PARAMETERS)
_SCHEMA = ", ".join(f"Tensor{'?' if name in _OPTIONAL else ''} {name}" for name in _PARAMETERS)
_SCHEMA += ", SymInt lags, float scale, float least, bool student_t, bool gate, bool in_bias"


def lag_tables(parameters: Parameters, options: Options, length: int) -> LagTables:
    """`rfa.ops.prior.lag_tables`; the kernels know constant white noise and two lags or more."""
    if parameters.noise is not None or length < 2:
        return torch_lag_tables(parameters, options, length)
    gains: tuple[Tensor | None, Tensor | None] = (None, None)
    if options.prior == "riccati":
        gains = log_gains_of_lags(parameters)
    student_t = options.weight == "student_t"
    tables, coefficient = _differentiable(
        *(getattr(parameters, name) for name in _NAMES),
        *gains,
        length,
        parameters.frequency.shape[-1] * (UNIT if student_t else 1.0),
        least_effective_variance(options.weight, torch.float32),
        student_t,
        options.gate,
        options.query_noise_in_bias,
    )
    return LagTables(tables, coefficient, tables[1].detach().amax(-1))


def _arguments(given: tuple[Any, ...]) -> tuple[dict[str, Any], list[Any], tuple[int, int, int]]:
    """The compile-time choices, the parameters and numbers of the kernels, and heads, lags and blocks."""
    named = {name: None if p is None else p.contiguous() for name, p in zip(_PARAMETERS, given[:_GIVEN], strict=True)}
    lags, scale, least, student_t, gate, in_bias = given[_GIVEN:]
    chosen = {"STUDENT_T": student_t, "GATE": gate, "IN_BIAS": in_bias, "RICCATI": named["log_gain"] is not None}
    chosen |= {"HORIZON": named["horizon"] is not None, "BLOCK": _BLOCK}
    sizes = given[0].shape[0], lags, -(-lags // _BLOCK)
    return chosen, [list(named.values()), [*sizes, scale, least]], sizes


@operator("triton_lag_tables", f"({_SCHEMA}) -> (Tensor, Tensor)", "cuda", "cpu")
def triton_lag_tables(*given: Any) -> tuple[Tensor, Tensor]:
    """Tables `(3, heads, lags)` and c `(heads,)`, in float32."""
    from .kernels.lag_tables import lag_tables_kernel

    refuse_forward_mode("triton")
    chosen, (parameters, numbers), (heads, lags, blocks) = _arguments(given)
    tables, coefficient = _tables_of(given[0], lags)
    with torch.cuda.device_of(tables):
        lag_tables_kernel[(heads * blocks,)](*parameters, tables, coefficient, *numbers, **chosen)
    return tables, coefficient


def _tables_of(decay: Tensor, lags: int) -> tuple[Tensor, Tensor]:
    heads = decay.shape[0]
    return decay.new_empty(3, heads, lags, dtype=torch.float32), decay.new_empty(heads, dtype=torch.float32)


@torch.library.register_fake("rfa::triton_lag_tables")
def _(*given):
    return _tables_of(given[0], given[_GIVEN])


@operator(
    "triton_lag_tables_backward", f"(Tensor grad_tables, Tensor grad_coefficient, {_SCHEMA}) -> Tensor", "cuda", "cpu"
)
def triton_lag_tables_backward(grad_tables: Tensor, grad_coefficient: Tensor, *given: Any) -> Tensor:
    """The gradients of all parameters, `(10, heads)` in float64."""
    from .kernels.lag_tables import lag_tables_gradient_kernel

    chosen, (parameters, numbers), (heads, _, blocks) = _arguments(given)
    gradient = grad_tables.new_empty(blocks, _GIVEN, heads, dtype=torch.float64)
    incoming = grad_tables.contiguous(), grad_coefficient.contiguous()
    with torch.cuda.device_of(gradient):
        lag_tables_gradient_kernel[(heads * blocks,)](*parameters, *incoming, gradient, *numbers, **chosen)
    return gradient.sum(0)


@torch.library.register_fake("rfa::triton_lag_tables_backward")
def _(grad_tables, grad_coefficient, *given):
    return grad_tables.new_empty(_GIVEN, given[0].shape[0], dtype=torch.float64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_GIVEN])
    ctx.options = inputs[_GIVEN:]


def _backward(ctx: Any, grad_tables: Tensor, grad_coefficient: Tensor) -> tuple[Tensor | None, ...]:
    parameters = ctx.saved_tensors
    gradients = _once(grad_tables, grad_coefficient, *parameters, *ctx.options)
    if all(p is None or p.dtype == parameters[0].dtype for p in parameters):
        gradients = gradients.to(parameters[0].dtype)
    rows = zip(gradients, parameters, strict=True)
    return (*(None if p is None else row.to(p.dtype) for row, p in rows), *(None,) * len(ctx.options))


_differentiable = transformable("triton", triton_lag_tables, (0,) * _GIVEN, (1, 0), _save, _backward)
_once = transformable("triton", triton_lag_tables_backward, (1, 0, *(0,) * _GIVEN), (1,))
