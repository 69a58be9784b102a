"""The configuration, the decoder and the presets."""

from rfa.checks import needs

needs("transformers")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .attention import (
    AttentionConfig,
    ContentAttentionConfig,
    DecayRates,
    FilterAttentionConfig,
    FrequencyBank,
    RoutingAttentionConfig,
)
from .configuration import RFAConfig
from .dot_product import DotProductAttentionConfig
from .modeling import RFAForCausalLM, RFAForMaskedLM, RFAForSequenceClassification, RFAForTokenClassification, RFAModel
from .presets import PRESETS, describe, preset
from .time_series import RFAForTimeSeries, TimeSeriesOutput
from .time_series_config import RFATimeSeriesConfig
from .time_series_data import TimeSeriesCollator

# `rfa.auto_classes` has announced the configurations, hence exist_ok
AutoConfig.register("rfa", RFAConfig, exist_ok=True)
AutoModel.register(RFAConfig, RFAModel)
AutoModelForCausalLM.register(RFAConfig, RFAForCausalLM)
AutoModelForMaskedLM.register(RFAConfig, RFAForMaskedLM)
AutoModelForSequenceClassification.register(RFAConfig, RFAForSequenceClassification)
AutoModelForTokenClassification.register(RFAConfig, RFAForTokenClassification)
AutoConfig.register("rfa_time_series", RFATimeSeriesConfig, exist_ok=True)
AutoModel.register(RFATimeSeriesConfig, RFAForTimeSeries)

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "ContentAttentionConfig",
    "DecayRates",
    "DotProductAttentionConfig",
    "FilterAttentionConfig",
    "FrequencyBank",
    "RFAConfig",
    "RFAForCausalLM",
    "RFAForMaskedLM",
    "RFAForSequenceClassification",
    "RFAForTimeSeries",
    "RFAForTokenClassification",
    "RFAModel",
    "RFATimeSeriesConfig",
    "RoutingAttentionConfig",
    "TimeSeriesCollator",
    "TimeSeriesOutput",
    "describe",
    "preset",
]
