"""The sum of what programs have stored."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def sum_kernel(
    parts, sums, batch, heads, programs, length, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`parts` `(batch, heads, programs, length)` added up to `(heads, length)` in float64, BLOCK numbers of a head."""
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float64)
    for start in range(0, batch * programs, ROWS):
        row = start + tl.arange(0, ROWS)
        place = ((row // programs) * heads + head) * programs + row % programs
        inside = (row < batch * programs)[:, None] & (column < length)[None, :]
        total += tl.load(parts + place[:, None] * length + column[None, :], mask=inside, other=0.0).to(tl.float64)
    tl.store(sums + head * length + column, tl.sum(total, 0), mask=column < length)
