"""Tests of `rfa.dynamics` against numerical solutions and closed forms."""
