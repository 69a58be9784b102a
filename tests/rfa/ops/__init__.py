"""Tests of `rfa.ops` against an independent oracle."""
