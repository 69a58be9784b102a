"""A table in, a forecast out: CSV files, forecasts by filters and by trained networks, scores, the figure."""

from rfa.checks import needs

needs("pandas", "matplotlib", "transformers")
