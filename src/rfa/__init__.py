"""Robust Filter Attention."""
