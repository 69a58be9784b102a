"""Perplexity over context length, retrieval at a distance, maps of attention; scores of forecasts."""

from rfa.forecasting.scores import ForecastScores, central_interval, crps, forecast_scores

from .attention_maps import MAP_LENGTHS, attention_maps
from .evaluate import evaluate, full_evaluation, generate
from .perplexity import PROTOCOLS, LossByDocument, LossByPosition, Window, loss_by_position, perplexities, windows
from .probes import probe, probe_layout
from .trigram import Trigram, evaluate_trigram, trigram_losses

__all__ = [
    "MAP_LENGTHS",
    "PROTOCOLS",
    "ForecastScores",
    "LossByDocument",
    "LossByPosition",
    "Trigram",
    "Window",
    "attention_maps",
    "central_interval",
    "crps",
    "evaluate",
    "evaluate_trigram",
    "forecast_scores",
    "full_evaluation",
    "generate",
    "loss_by_position",
    "perplexities",
    "probe",
    "probe_layout",
    "trigram_losses",
    "windows",
]
