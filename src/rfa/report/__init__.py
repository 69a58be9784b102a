"""Figures and tables from result files."""
