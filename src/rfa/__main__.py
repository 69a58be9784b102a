"""`python -m rfa` is the command `rfa`, which the lab holds."""

import runpy

runpy.run_module("rfa_lab", run_name="__main__")
