"""The Triton kernels. Importing a module of this folder imports triton, so the host code does it at the first call.

Every kernel is marked `no_type_check`, so that a hook that wraps functions for shape checks leaves it to `triton.jit`,
which compiles the source of the bare function.
"""
