"""One configuration, one decoder, the presets."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration import RFAConfig
from .modeling import RFAForCausalLM, RFAModel
from .presets import PRESETS, describe, preset

AutoConfig.register("rfa", RFAConfig)
AutoModel.register(RFAConfig, RFAModel)
AutoModelForCausalLM.register(RFAConfig, RFAForCausalLM)

__all__ = ["PRESETS", "RFAConfig", "RFAForCausalLM", "RFAModel", "describe", "preset"]
