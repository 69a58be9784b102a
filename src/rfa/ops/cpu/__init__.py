"""The fused operator on CPUs: blocked, in linear memory, from the wheel or compiled on first use.

How it reads: `operator.py` (what is handed to C++, registered as a PyTorch operator with its gradient) -> `build.py`
(what the wheel has, or `compiler.py` makes for the cache) -> `kernels/`; `decoding.py` serves new tokens of a decoder.
In `kernels/` `run.h` hands tasks to threads; `forward.h` and `backward.h` run over blocks, `decode.h` over a cache,
which `enter.h` fills (`token.h` does both); `lag_tables.h`, `separable_path.h` and `product_path.h` give the prior of a
pair, `score.h` its weight, `phases.h` the rotation.
"""
