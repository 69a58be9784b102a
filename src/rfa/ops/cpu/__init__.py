"""The fused operator on CPUs: blocked, in linear memory, from the wheel or compiled on first use.

How it reads: `operator.py` (a registered PyTorch operator with its gradient) -> `library.py` (what is handed to C++) ->
`build.py` (what `prebuilt.py` finds, or `compiler.py` makes for the cache) -> `kernels/`. There `run.h` hands tasks
to threads; `forward.h` and `backward.h` run over blocks, `decode.h` over a cache, which `enter.h` fills (`token.h`
does both);
`lag_tables.h`, `separable_path.h` and `product_path.h` give the prior of a pair, `score.h` its weight, `phases.h` the
rotation.
"""
