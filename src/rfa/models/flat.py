"""The fields of attention by flat names, which overrides, recipes and result files use.

For example, for every kind of attention the flat name `damping` is the field `damping` of its `decay`.
"""

from collections.abc import Mapping
from typing import Any, get_args

from rfa.checks import require
from rfa.nn.filter_attention import Aggregation
from rfa.ops.problem import Weight

from .attention import (
    AttentionConfig,
    CheckedFields,
    ContentAttentionConfig,
    FilterAttentionConfig,
    RoutingAttentionConfig,
    hints,
    is_part,
)
from .dot_product import PRIORS, DotProductAttentionConfig

KINDS: dict[str, type[AttentionConfig]] = {
    kind.kind: kind
    for kind in (FilterAttentionConfig, RoutingAttentionConfig, DotProductAttentionConfig, ContentAttentionConfig)
}
# the valid values of the flat names that select a kind
_CHOICES = {
    "score": (*get_args(Weight), DotProductAttentionConfig.kind),
    "aggregation": get_args(Aggregation),
    "dynamics": ("head", ContentAttentionConfig.kind),
}


def flatten(part: CheckedFields) -> dict[str, Any]:
    """All fields by their flat names. For attention the names that select its kind are added."""
    flat = dict(part.chosen_by) if isinstance(part, AttentionConfig) else {}
    for name in hints(type(part)):
        value = getattr(part, name)
        flat |= flatten(value) if isinstance(value, CheckedFields) else {part.flat_name(name): value}
    return flat


# Values of flat names that a file does not have: flat files are of a time when m2 was the default. So they are neutral
# too for the names that a kind of attention does not have. The last kind's values count.
_M2 = FilterAttentionConfig(prior="lyapunov", innovation=True)
_OF_KINDS = (DotProductAttentionConfig(), RoutingAttentionConfig(), _M2)
DEFAULTS = {"dynamics": "head", **{name: value for each in _OF_KINDS for name, value in flatten(each).items()}}
FLAT_NAMES = frozenset(DEFAULTS)


def change(attention: AttentionConfig | None, changes: Mapping[str, Any]) -> AttentionConfig:
    """An attention with other values of some fields. The values can select another kind of attention.

    Args:
        attention: the attention to change; None for the defaults of the kind that the changes select.
        changes: new values by flat names.

    Raises:
        ValueError: for a name that the kind does not have, or values that do not fit together.
    """
    start = _kind({**DEFAULTS, **changes})() if attention is None else attention
    flat = {**DEFAULTS, **flatten(start), **changes}
    kind = _kind(flat)
    if isinstance(attention, DotProductAttentionConfig) and kind is FilterAttentionConfig:
        flat = {**flat, "initial_slopes": _start_of_dot_products(attention.prior), **changes}
    served = flatten(kind()).keys()
    for name in (name for name in changes if name not in served):
        expected = f"nothing: it has no effect in {kind.kind} attention, which takes {', '.join(sorted(served))}"
        require(False, name, changes[name], expected)
    return from_flat(flat)


def read_attention(given: object) -> AttentionConfig:
    """The attention of a nested configuration in a file.

    Raises:
        ValueError: for an unknown kind or field, or values that do not fit together.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"attention: got {given!r:.80}, expected an object with kind and its fields")
    fields = dict(given)
    kind = fields.pop("kind", None)
    known = isinstance(kind, str) and kind in KINDS
    require(known, "attention.kind", kind, f"one of {', '.join(map(repr, KINDS))}")
    return KINDS[str(kind)].from_dict(fields, "attention")


def from_flat(flat: Mapping[str, Any]) -> AttentionConfig:
    """The attention of a flat record or file, which may have names that its kind does not have, with neutral values.

    Raises:
        ValueError: for values that do not fit together, or another value for a name that the kind does not have.
    """
    flat = {**DEFAULTS, **flat}
    kind = _kind(flat)
    neutral = dict(DEFAULTS)
    if kind is DotProductAttentionConfig:  # it has no steady state, and starts some slopes itself
        start = None if flat["initial_slopes"] is None else _start_of_dot_products(flat["prior"])
        neutral |= {"steady_state": flat["steady_state"], "initial_slopes": start}
    for name in sorted(FLAT_NAMES - flatten(kind()).keys()):
        require(flat[name] == neutral[name], name, flat[name], f"{neutral[name]!r} for {kind.kind} attention")
    return _build(kind, flat)


def _start_of_dot_products(prior: object) -> str | None:
    """The value of a filter's `initial_slopes` that corresponds to dot products with this prior."""
    return "alibi" if isinstance(prior, str) and prior in PRIORS and PRIORS[prior].is_riccati else None


def _kind(flat: Mapping[str, Any]) -> type[AttentionConfig]:
    """The kind of attention that the values of `score`, `aggregation` and `dynamics` select."""
    for name, choices in _CHOICES.items():
        require(flat[name] in choices, name, flat[name], f"one of {', '.join(map(repr, choices))}")
    if flat["dynamics"] == "content":
        return ContentAttentionConfig
    if flat["score"] == "dot_product":
        return DotProductAttentionConfig
    return RoutingAttentionConfig if flat["aggregation"] == "routing" else FilterAttentionConfig


def _build(kind: type[Any], flat: Mapping[str, Any]) -> Any:
    return kind(
        **{
            name: _build(type_, flat) if is_part(type_) else flat[kind.flat_name(name)]
            for name, type_ in hints(kind).items()
        }
    )
