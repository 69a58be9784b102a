"""Tests of `rfa.nn` against layers written by hand in numpy, closed forms and transformers."""
