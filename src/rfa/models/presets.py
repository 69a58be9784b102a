"""The presets: the default, the paper's models (section 3, appendix F.2) and controls, one expression for each."""

from types import MappingProxyType
from typing import Any

from .attention import AttentionConfig, ContentAttentionConfig, DecayRates, FilterAttentionConfig, FrequencyBank
from .configuration import ATTENTION_FIELDS, RFAConfig
from .dot_product import DotProductAttentionConfig

_NO_ROTATION, _PARTITIONED = FrequencyBank(kind="none"), FrequencyBank(kind="partitioned")
_DECAYED = DecayRates(damping=0.05, zero_heads=0)
# fields that several presets share; RoPER is an ablation of m2 and keeps its innovation step
_M2: dict[str, Any] = {"prior": "lyapunov", "innovation": True}
_ROPER: dict[str, Any] = {"frequencies": _PARTITIONED, "rotate_values": True, "innovation": True}

# plain names of presets, and their names in the record
PLAIN_NAMES = MappingProxyType({"sc-rfa": "m2-sc-rfa", "rope": "b1-rope", "alibi": "b2-alibi"})


def _m2(summary: str, **fields: Any) -> tuple[str, AttentionConfig]:
    """The summary and the attention of `m2-sc-rfa` with other fields."""
    return summary, FilterAttentionConfig(**_M2 | fields)


def _dot_product(summary: str, **fields: Any) -> tuple[str, AttentionConfig]:
    """The summary and the attention of a baseline or control."""
    return summary, DotProductAttentionConfig(**fields)


_RFA = FilterAttentionConfig()
_PRESETS: dict[str, tuple[str, AttentionConfig]] = {
    "rfa": ("the default: weights of a Kalman filter, started at ALiBi's slopes; x2 without the innovation step", _RFA),
    "forget-gate": _dot_product(
        "dot product with RoPE, a forget gate and normalised queries and keys",
        prior="forget_gate",
        normalise_states=True,
    ),
    "b1-rope": _dot_product("dot product with RoPE"),
    "b2-alibi": _dot_product("dot product with ALiBi's linear bias", frequencies=_NO_ROTATION, prior="alibi"),
    "b3-decayed-rope": _dot_product("b1 with exponential decay after the softmax", decay=_DECAYED),
    "b4-sc-rope": _dot_product("b3 with the partitioned frequency bank", frequencies=_PARTITIONED, decay=_DECAYED),
    "m1-rfa": _m2(
        "RFA with RoPE's bank in every head",
        frequencies=FrequencyBank(kind="paired_rope"),
        decay=DecayRates(kind="length_scaled"),
    ),
    "m2-sc-rfa": _m2("SC-RFA: frequencies partitioned over heads, light damping"),
    "m3-sc-rfa": _m2(
        "SC-RFA with strong damping, for extrapolation", decay=DecayRates(damping=5.0, zero_heads=0), steady_state=0.5
    ),
    "m2.1-exponential": _m2("m2 with the exponential weight", weight="exponential"),
    "m2.2-flat-prior": _m2("m2 without noise: constant variance", prior="flat"),
    "m2.3-no-gate": _m2("m2 with the residual not divided by its variance", gate=False),
    "m2.4-no-value-rotation": _m2("m2 with values that only decay", rotate_values=False),
    "m2.5-no-rotation": _m2("m2 with all frequencies zero", frequencies=_NO_ROTATION),
    "m2.6-pure-rotation": _dot_product("m2 with dot products, no decay, no noise (RoPER)", **_ROPER),
    "b1-rope-as-released": _dot_product(
        "b1 with the rotary map of the paper's released code", frequencies=FrequencyBank(kind="as_released")
    ),
    "x1-riccati": _m2("m2 with the Riccati prior", prior="riccati", initial_slopes=None),
    "x2-riccati-alibi": _m2("x1 started at ALiBi's slopes", prior="riccati"),
    "x3-rotation-riccati": _dot_product(
        "m2.6 with learned Riccati slopes, started at ALiBi's", **_ROPER, prior="riccati"
    ),
    "x4-content-riccati": _dot_product(
        "c7 with Kalman gains from the content for slopes", prior="content_riccati", innovation=True
    ),
    "x5-content-clock": _m2("x2 on a clock whose speed the tokens set", prior="riccati", clock="content"),
    "x6-content-dynamics": ("m2 whose decay, frequencies and noise each token sets", ContentAttentionConfig()),
    "x7-gated-roper": _dot_product(
        "a forget gate with RoPE and values turned too", prior="forget_gate", rotate_values=True
    ),
    "m2-no-innovation": _m2("m2 that returns the estimate, not the step toward it", innovation=False),
    "m2-released-bias": _m2("m2 with the query's noise in the bias, as released", query_noise_in_bias=True),
    "c1-nope": _dot_product("dot product without positions", frequencies=_NO_ROTATION),
    "c4-fox": _dot_product(
        "dot product with a forget gate (Forgetting Transformer)", frequencies=_NO_ROTATION, prior="forget_gate"
    ),
    "c7-rope-alibi-innovation": _dot_product(
        "b1 with ALiBi's slopes and RFA's innovation step", prior="alibi", innovation=True
    ),
    "c8-fox-clock": _dot_product(
        "b1 with learned slopes on x5's clock, which makes a forget gate of them", prior="riccati", clock="content"
    ),
}
PRESETS: MappingProxyType[str, AttentionConfig] = MappingProxyType(
    {name: _PRESETS[PLAIN_NAMES.get(name, name)][1] for name in ("rfa", *PLAIN_NAMES, *_PRESETS)}
)

_OF_CLASSIFIERS = ("num_labels", "id2label", "label2id", "problem_type", "classifier_dropout")  # transformers' fields


def describe(name: str) -> str:
    """A short description of a preset."""
    return _PRESETS[PLAIN_NAMES.get(name, name)][0]


def preset(name: str, /, **overrides: Any) -> RFAConfig:
    """The configuration of a named model: `rfa` is the default, `sc-rfa` the paper's.

    Args:
        name: one of `PRESETS`.
        overrides: fields of `RFAConfig` that replace the preset's, such as `hidden_size=128`, and fields of its
            attention by their plain names, such as `damping=0.2`. Also transformers' fields of classifiers:
            `num_labels`, `id2label`, `label2id`, `problem_type` and `classifier_dropout`.

    Raises:
        ValueError: for an unknown preset or field, a value of the wrong type, values that do not fit together, or a
            field that has no effect in this preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: got {name!r}, expected one of {', '.join(PRESETS)}")
    known = [*RFAConfig.field_names(), *sorted(ATTENTION_FIELDS)]
    for field in overrides:
        if field not in (*known, *_OF_CLASSIFIERS):
            raise ValueError(f"{field}: not a field of RFAConfig, expected one of {', '.join(known)}")
    config = RFAConfig(**{"attention": PRESETS[name], **overrides})
    for field in sorted(overrides.keys() & config.attention.without_effect()):
        raise ValueError(f"{field}: got {overrides[field]!r}, expected nothing: it has no effect in {name}")
    return config
