"""Tests of `rfa.models`: what the presets are, and that the decoder is a well-behaved transformers model."""
