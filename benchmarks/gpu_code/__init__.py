"""The machine code of the Triton kernels, read without a GPU.

`launches.py` records what the operator launches, `listings.py` compiles a launch and counts the instructions of its
loops.
"""
