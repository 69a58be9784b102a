"""A call of the kernels: the tensors of one problem, by address."""

from typing import get_args

import torch
from torch import Tensor

from ..fused import Score
from .library import Problem, Strided

SCORES = get_args(Score)


class Call:
    """One problem, and the tensors whose addresses it holds."""

    def __init__(self, query, key, value, rotation, prior, visibility, causal, score, gate, rotate_values, blocks):
        self.problem, self._held = Problem(), []
        batch, heads, queries, channels = query.shape
        keys, value_channels = value.shape[2:]
        self.empty = not (batch * heads * queries * keys)
        threads = torch.get_num_threads()
        for name, number in {
            "batch": batch, "heads": heads, "queries": queries, "keys": keys, "channels": channels,
            "value_channels": value_channels, "causal": causal, "score": SCORES.index(score), "gate": gate,
            "turned": rotation[0] is not None, "rotate_values": rotate_values, "threads": threads,
            "slices": slices(batch * heads, blocks, threads),
        }.items():  # fmt: skip
            setattr(self.problem, name, int(number))
        self.states(query=query, key=key, value=value)
        names = ("key_cos", "key_sin", "query_cos", "query_sin")
        self.states(**dict(zip(names, rotation, strict=True)))
        tables, key_path, query_path, key_bias, scalars, bound = prior
        key_times, query_times, key_groups, query_groups = visibility
        self.set(
            tables=tables, key_path=key_path, query_path=query_path, key_bias=key_bias,
            scalars=scalars.to(torch.float32), bound=bound,
            key_times=key_times, query_times=query_times, key_groups=key_groups, query_groups=query_groups,
        )  # fmt: skip
        self.problem.lags = 0 if tables is None else tables.shape[-1]
        self.problem.times_batch = key_times.shape[0]
        if key_path is not None:
            self.problem.path_rows, self.problem.path_batch = key_path.shape[:2]

    def set(self, **fields: Tensor | Strided | int | None) -> None:
        """Contiguous tensors by address, in the dtype that they have; None as a null pointer."""
        for name, value in fields.items():
            if isinstance(value, Tensor):
                value = value.contiguous()
                self._held.append(value)
                value = value.data_ptr()
            setattr(self.problem, name, value)

    def states(self, **fields: Tensor | None) -> None:
        """Tensors `(batch, heads, length, channels)` to read, in float32."""
        for name, value in fields.items():
            if value is not None:
                value = value.to(torch.float32)
                value = value if value.stride(-1) == 1 else value.contiguous()
                self._held.append(value)
            setattr(self.problem, name, Strided.of(value))

    def norms(self, key_norm: Tensor) -> None:
        """Squared norms `(batch, heads, keys)` that are known already."""
        key_norm = key_norm.to(torch.float32)
        key_norm = key_norm if key_norm.stride(-1) == 1 else key_norm.contiguous()
        batch, head, _ = key_norm.stride()
        self._held.append(key_norm)
        self.problem.key_norms = key_norm.data_ptr()
        self.problem.key_norms_batch, self.problem.key_norms_head = batch if key_norm.shape[0] > 1 else 0, head


def slices(heads: int, blocks: int, threads: int) -> int:
    """Into how many tasks each head is cut: several where there are too few heads to keep the threads busy."""
    if heads == 0 or heads % threads == 0 or heads >= 4 * threads:
        return 1
    return max(1, min(-(-4 * threads // heads), blocks))
