"""The presets: the models of the paper (section 3, appendix F.2) and further controls, one expression for each."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .attention import AttentionConfig, ContentAttentionConfig, DecayRates, FilterAttentionConfig, FrequencyBank
from .configuration import RFAConfig
from .dot_product import DotProductAttentionConfig
from .flat import FLAT_NAMES

_NO_ROTATION, _PARTITIONED = FrequencyBank(kind="none"), FrequencyBank(kind="partitioned")
_DECAYED = DecayRates(damping=0.05, zero_heads=0)
_M2 = FilterAttentionConfig()
_X2 = replace(_M2, prior="riccati", initial_slopes="alibi")
# an ablation of m2: it keeps m2's innovation step
_ROPER = DotProductAttentionConfig(frequencies=_PARTITIONED, rotate_values=True, innovation=True)

_GATED_ROPER = DotProductAttentionConfig(prior="forget_gate", rotate_values=True)

# plain names of presets, and their names in the record
PLAIN_NAMES = MappingProxyType(
    {
        "rope": "b1-rope",
        "alibi": "b2-alibi",
        "sc-rfa": "m2-sc-rfa",
        "riccati": "x2-riccati-alibi",
    }
)

_OF_RECORD: dict[str, AttentionConfig] = {
    "b1-rope": DotProductAttentionConfig(),
    "b2-alibi": DotProductAttentionConfig(frequencies=_NO_ROTATION, prior="alibi"),
    "b3-decayed-rope": DotProductAttentionConfig(decay=_DECAYED),
    "b4-sc-rope": DotProductAttentionConfig(frequencies=_PARTITIONED, decay=_DECAYED),
    "m1-rfa": replace(_M2, frequencies=FrequencyBank(kind="paired_rope"), decay=DecayRates(kind="length_scaled")),
    "m2-sc-rfa": _M2,
    "m3-sc-rfa": replace(_M2, decay=DecayRates(damping=5.0, zero_heads=0), steady_state=0.5),
    "m2.1-exponential": replace(_M2, score="exponential"),
    "m2.2-flat-prior": replace(_M2, prior="flat"),
    "m2.3-no-gate": replace(_M2, gate=False),
    "m2.4-no-value-rotation": replace(_M2, rotate_values=False),
    "m2.5-no-rotation": replace(_M2, frequencies=_NO_ROTATION),
    "m2.6-pure-rotation": _ROPER,
    "b1-rope-as-released": DotProductAttentionConfig(frequencies=FrequencyBank(kind="as_released")),
    "x1-riccati": replace(_M2, prior="riccati"),
    "x2-riccati-alibi": _X2,
    "x3-rotation-riccati": replace(_ROPER, prior="riccati"),
    "x4-content-riccati": DotProductAttentionConfig(prior="content_riccati", innovation=True),
    "x5-content-clock": replace(_X2, clock="content"),
    "x6-content-dynamics": ContentAttentionConfig(),
    "x7-gated-roper": _GATED_ROPER,
    "m2-no-innovation": replace(_M2, innovation=False),
    "m2-released-bias": replace(_M2, query_noise_in_bias=True),
    "c1-nope": DotProductAttentionConfig(frequencies=_NO_ROTATION),
    "c2-window": DotProductAttentionConfig(prior="window"),
    "c3-yarn": DotProductAttentionConfig(frequencies=FrequencyBank(kind="yarn")),
    "c4-fox": DotProductAttentionConfig(frequencies=_NO_ROTATION, prior="forget_gate"),
    "c5-rope-innovation": DotProductAttentionConfig(innovation=True),
    "c6-alibi-innovation": DotProductAttentionConfig(frequencies=_NO_ROTATION, prior="alibi", innovation=True),
    "c7-rope-alibi-innovation": DotProductAttentionConfig(prior="alibi", innovation=True),
    "c8-fox-clock": DotProductAttentionConfig(prior="riccati", clock="content"),
    "c9-rotation-fox": _GATED_ROPER,
    "c10-rotation-learned": DotProductAttentionConfig(prior="riccati", rotate_values=True, learn_frequencies=True),
    "c12-kerple": DotProductAttentionConfig(frequencies=_NO_ROTATION, prior="kerple"),
}
PRESETS: MappingProxyType[str, AttentionConfig] = MappingProxyType(
    {plain: _OF_RECORD[name] for plain, name in PLAIN_NAMES.items()}
    | {"forget-gate": DotProductAttentionConfig(prior="forget_gate", normalise_states=True)}
    | _OF_RECORD
)

_SUMMARIES = {
    "forget-gate": "dot product with RoPE, a forget gate and normalised queries and keys",
    "b1-rope": "dot product with RoPE",
    "b2-alibi": "dot product with ALiBi's linear bias",
    "b3-decayed-rope": "b1 with exponential decay after the softmax",
    "b4-sc-rope": "b3 with the partitioned frequency bank",
    "m1-rfa": "RFA with RoPE's bank in every head",
    "m2-sc-rfa": "SC-RFA: frequencies partitioned over heads, light damping",
    "m3-sc-rfa": "SC-RFA with strong damping, for extrapolation",
    "m2.1-exponential": "m2 with the exponential weight",
    "m2.2-flat-prior": "m2 without noise: constant variance",
    "m2.3-no-gate": "m2 with the residual not divided by its variance",
    "m2.4-no-value-rotation": "m2 with values that only decay",
    "m2.5-no-rotation": "m2 with all frequencies zero",
    "m2.6-pure-rotation": "m2 with dot products, no decay, no noise (RoPER)",
    "b1-rope-as-released": "b1 with the rotary map of the paper's released code",
    "x1-riccati": "m2 with the Riccati prior",
    "x2-riccati-alibi": "x1 started at ALiBi's slopes",
    "x3-rotation-riccati": "m2.6 with learned Riccati slopes, started at ALiBi's",
    "x4-content-riccati": "c7 with Kalman gains from the content for slopes",
    "x5-content-clock": "x2 on a clock whose speed the tokens set",
    "x6-content-dynamics": "m2 whose decay, frequencies and noise each token sets",
    "x7-gated-roper": "a forget gate with RoPE and values turned too",
    "m2-no-innovation": "m2 that returns the estimate, not the step toward it",
    "m2-released-bias": "m2 with the query's noise in the bias, as released",
    "c1-nope": "dot product without positions",
    "c2-window": "b1 that sees one training length",
    "c3-yarn": "b1 with YaRN beyond the training length",
    "c4-fox": "dot product with a forget gate (Forgetting Transformer)",
    "c5-rope-innovation": "b1 with RFA's innovation step",
    "c6-alibi-innovation": "b2 with RFA's innovation step",
    "c7-rope-alibi-innovation": "b1 with ALiBi's slopes and RFA's innovation step",
    "c8-fox-clock": "b1 with learned slopes on x5's clock, which makes a forget gate of them",
    "c9-rotation-fox": "x7 under its older name",
    "c10-rotation-learned": "b1 with values turned too, learned frequencies and learned slopes, started at ALiBi's",
    "c12-kerple": "dot product with KERPLE's logarithmic bias",
}


_OF_CLASSIFIERS = ("num_labels", "id2label", "label2id", "problem_type", "classifier_dropout")  # transformers' fields


def describe(name: str) -> str:
    """A short description of a preset."""
    return _SUMMARIES[PLAIN_NAMES.get(name, name)]


def preset(name: str, /, **overrides: Any) -> RFAConfig:
    """The configuration of a model of the paper.

    Args:
        name: one of `PRESETS`.
        overrides: fields of `RFAConfig` that replace the preset's, such as `hidden_size=128`, and fields of its
            attention by flat names, such as `damping=0.2`. Also transformers' fields of classifiers: `num_labels`,
            `id2label`, `label2id`, `problem_type` and `classifier_dropout`.

    Raises:
        ValueError: for an unknown preset or field, a value of the wrong type, values that do not fit together, or a
            field that has no effect in this preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: got {name!r}, expected one of {', '.join(PRESETS)}")
    known = [*RFAConfig.field_names(), *sorted(FLAT_NAMES)]
    for field in overrides:
        if field not in (*known, *_OF_CLASSIFIERS):
            raise ValueError(f"{field}: not a field of RFAConfig, expected one of {', '.join(known)}")
    config = RFAConfig(**{"attention": PRESETS[name], **overrides})
    for field in sorted(overrides.keys() & config.attention.without_effect()):
        raise ValueError(f"{field}: got {overrides[field]!r}, expected nothing: it has no effect in {name}")
    return config
