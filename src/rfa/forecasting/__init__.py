"""Series in, forecasts out: `Forecaster` for tables; CSV files and the figure of the command."""

from rfa.checks import needs

needs("pandas", "narwhals")

from .forecaster import Forecaster

__all__ = ["Forecaster"]
