"""A table in, a forecast out: CSV files, forecasts by filters, the figure."""

from rfa.checks import needs

needs("pandas")
