"""Figures in one style: the theory from its closed forms, and measurements from result files."""
