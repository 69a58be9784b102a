"""A run as a folder that transformers loads, with a model card of the run's own results."""

from rfa.checks import needs

needs("transformers")

from .folder import export_run
from .model_card import model_card

__all__ = ["export_run", "model_card"]
