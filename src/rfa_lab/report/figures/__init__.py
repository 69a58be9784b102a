"""Figures of measurements in one style, from result files."""
