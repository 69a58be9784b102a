r"""The one argument list of a fused kernel, from which operator schemas and call structures are made.

A kernel computes, for query i and key j in the common frame, with the E, b and w of `rfa.ops.prior`,

    r  = |q_i|^2 + E^2 |k_j|^2 - 2 E q_i.k_j
    z  = b - c log2(1 + w r)      student_t        z = log2(e) beta_s L, a score in bits
    z  = b - c w r                exponential
    z  = b + c q_i.k_j            dot_product
    out_i = sum_j 2^(z - z_i) E v_j,    z_i = log2 sum_j 2^z

and returns gradients for q, k, v and for every number of the prior.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, get_type_hints

import torch
from torch import Tensor

from rfa.dynamics import rotation_of_heads, time_dtype

from .dense import Phases
from .positions import Positions
from .prior import LagTables, PathOf, SeparablePath

HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
TRITON_CHANNELS = (16, 32, 64, 128)

PhasesOf = Callable[[Tensor, Tensor], Phases]
ScoreKind = Literal["student_t", "exponential", "dot_product"]


class KernelInputs(NamedTuple):
    """Everything that a fused kernel is handed, in the order of its registered operator. Tensors come first.

    Fields:
        query, key, value: `(batch, heads, length, channels)` in float32, bfloat16 or float16.
        key_cos, key_sin, query_cos, query_sin: phases, `(b, heads, length, modes)` in float32; None where the states
            stand in the common frame already.
        tables: of `LagTables`; None along a path.
        key_path, query_path, key_bias: of a `SeparablePath`; None with tables.
        scalars: c, `(1, heads)`, with tables; the scalars of the path, `(6, heads)`, or 7 with the factor of u.
        bound: `(heads,)`: no score of a head is larger.
        key_times, query_times: `(b, length)` in `time_dtype`.
        key_groups, query_groups: `(batch, length)` int32 as in `Positions`; both None or neither.
        key_norm: `|k|^2`, `(batch, heads, keys)`, where it is known.
        tail: of `rfa.ops.prior.certified_tail`, where old keys may be left out; None to visit all. A backend may visit
            more.
        causal: key j takes part where its time is not later than that of query i.
        score_kind: a `ScoreKind`.
        gate: off, w does not depend on the lag: `w = W` along a path.
        rotate_values: values and the estimate turn too.
        decode: no gradient will be asked for, and the states stand in the common frame: the kernel may read a few
            queries' keys where they lie.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_cos: Tensor | None
    key_sin: Tensor | None
    query_cos: Tensor | None
    query_sin: Tensor | None
    tables: Tensor | None
    key_path: Tensor | None
    query_path: Tensor | None
    key_bias: Tensor | None
    scalars: Tensor
    bound: Tensor
    key_times: Tensor
    query_times: Tensor
    key_groups: Tensor | None
    query_groups: Tensor | None
    key_norm: Tensor | None
    tail: Tensor | None
    causal: bool
    score_kind: str
    gate: bool
    rotate_values: bool
    decode: bool

    @property
    def empty(self) -> bool:
        """Whether there is no pair of a query and a key."""
        return 0 in (*self.query.shape[:3], self.key.shape[2])

    @property
    def lags(self) -> int:
        """The number of lags of the tables, which a cache makes for more keys than it holds yet; 0 along a path."""
        return 0 if self.tables is None else self.tables.shape[-1]


_KINDS: dict[object, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", str: "str"}
_HINTS = get_type_hints(KernelInputs)
_LEARNED = ("query", "key", "value", "tables", "key_path", "query_path", "key_bias", "scalars")

SCHEMA = ", ".join(f"{_KINDS[_HINTS[name]]} {name}" for name in KernelInputs._fields)  # of a registered operator
GRADIENT_SCHEMA = ", ".join("Tensor" for _ in _LEARNED)  # of its backward pass
TENSORS = sum(_KINDS[kind].startswith("Tensor") for kind in _HINTS.values())  # so many fields come first
PRIOR = slice(KernelInputs._fields.index("tables"), KernelInputs._fields.index("bound"))  # what is learned of it


def gradients_by_field(gradients: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The results of a backward pass in the order of `KernelInputs`: None where a field has no gradient."""
    named = dict(zip(_LEARNED, gradients, strict=True))
    return tuple(named.get(name) for name in KernelInputs._fields)


def kernel_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Phases, Phases] | None,
    prior: LagTables | SeparablePath,
    positions: Positions,
    *,
    causal: bool,
    score_kind: ScoreKind,
    gate: bool = True,
    rotate_values: bool = False,
    key_norm: Tensor | None = None,
    tail: Tensor | None = None,
    decode: bool = False,
) -> KernelInputs:
    """The argument list, filled; see the fields of `KernelInputs`."""
    dtype = time_dtype(query.device)
    groups = positions.query_groups
    if groups is None and positions.key_groups is not None:
        groups = query.new_zeros(positions.key_groups.shape[0], positions.query_times.shape[-1], dtype=torch.int32)
    numbers: dict[str, Any]
    if isinstance(prior, LagTables):
        path = {"key_path": None, "query_path": None, "key_bias": None}
        numbers = {"tables": prior.tables, **path, "scalars": prior.coefficient[None], "bound": prior.bound}
    else:
        numbers = {"tables": None, **prior._asdict()}
    (key_cos, key_sin), (query_cos, query_sin) = ((None, None),) * 2 if rotation is None else rotation
    return KernelInputs(
        query=query,
        key=key,
        value=value,
        key_cos=key_cos,
        key_sin=key_sin,
        query_cos=query_cos,
        query_sin=query_sin,
        **numbers,
        key_times=_constant(positions.key_times, dtype),
        query_times=_constant(positions.query_times, dtype),
        key_groups=positions.key_groups,
        query_groups=groups,
        key_norm=key_norm,
        tail=tail,
        causal=causal,
        score_kind=score_kind,
        gate=gate,
        rotate_values=rotate_values,
        decode=decode,
    )


def _constant(times: Tensor, dtype: torch.dtype) -> Tensor:
    """Times in a dtype, without a gradient."""
    return times if times.dtype == dtype and not times.requires_grad else times.detach().to(dtype)


def torch_phases(frequency: Tensor, times: Tensor) -> Phases:
    """Cosine and sine of `frequency * times`, `(b, heads, length, modes)` in float32."""
    cos, sin = (part.to(torch.float32) for part in rotation_of_heads(frequency, times))
    return cos, sin


def rotation_tables(frequency: Tensor, positions: Positions, phases: PhasesOf = torch_phases) -> tuple[Phases, Phases]:
    """The phases at keys and queries, by which a kernel turns states into the common frame and the estimate out of it.

    Each is `(b, heads, length, modes)` in float32.
    """
    at_keys, at_queries = positions.times_of_heads()
    cos, sin = phases(frequency, at_keys)
    if at_queries is at_keys or positions.uniform:
        first = at_keys.shape[-1] - at_queries.shape[-1]
        return (cos, sin), (cos[..., first:, :], sin[..., first:, :])
    return (cos, sin), phases(frequency, at_queries)


class Kernel(NamedTuple):
    """A fused implementation.

    Fields:
        attention: the inputs to the estimate `(batch, heads, queries, value channels)` and to `log2 sum_j 2^z`, float64
            `(batch, heads, queries)`, -inf where no key is seen.
        phases: `(frequency, times)` to cosine and sine; times `(b, 1 or heads, length)`.
        path: the path of a problem; None for `separable_path`.
        tables: whether it reads lag tables; otherwise it takes uniform times as any others.
        leaves_out: whether it reads `tail`, and leaves out old keys by it.
    """

    attention: Callable[[KernelInputs], tuple[Tensor, Tensor]]
    phases: PhasesOf = torch_phases
    path: PathOf | None = None
    tables: bool = True
    leaves_out: bool = False
