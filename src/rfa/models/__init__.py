"""The configuration, the decoder and the presets."""

from rfa.checks import needs

needs("transformers")

import transformers

from .attention import (
    AttentionConfig,
    ContentAttentionConfig,
    DecayRates,
    FilterAttentionConfig,
    FrequencyBank,
    RoutingAttentionConfig,
)
from .configuration import AUTO_CLASSES, RFAConfig
from .dot_product import DotProductAttentionConfig
from .modeling import RFAForCausalLM, RFAForMaskedLM, RFAForSequenceClassification, RFAForTokenClassification, RFAModel
from .presets import PRESETS, describe, preset
from .time_series import RFAForTimeSeries, TimeSeriesOutput
from .time_series_data import RFATimeSeriesConfig, TimeSeriesCollator

for _model_type, _classes in AUTO_CLASSES.items():
    _config = globals()[_classes["AutoConfig"]]
    # `import rfa` has announced the configurations, hence exist_ok
    transformers.AutoConfig.register(_model_type, _config, exist_ok=True)
    for _auto in _classes.keys() - {"AutoConfig"}:
        getattr(transformers, _auto).register(_config, globals()[_classes[_auto]])

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
