"""Whole problems at uniform times in six launches, which `operator.py` orders."""
