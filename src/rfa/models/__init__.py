"""The configuration, the decoder and the presets."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .attention import AttentionConfig, DecayRates, FilterAttentionConfig, FrequencyBank, RoutingAttentionConfig
from .configuration import RFAConfig
from .dot_product import DotProductAttentionConfig
from .modeling import RFAForCausalLM, RFAModel
from .presets import PRESETS, describe, preset

AutoConfig.register("rfa", RFAConfig)
AutoModel.register(RFAConfig, RFAModel)
AutoModelForCausalLM.register(RFAConfig, RFAForCausalLM)

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "DecayRates",
    "DotProductAttentionConfig",
    "FilterAttentionConfig",
    "FrequencyBank",
    "RFAConfig",
    "RFAForCausalLM",
    "RFAModel",
    "RoutingAttentionConfig",
    "describe",
    "preset",
]
