"""The calls whose kernels are counted: the operator as users call it, and plain attention beside it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from rfa.checks import require
from rfa.ops import backends, robust_filter_attention
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.kernel import TRITON_CHANNELS
from rfa.ops.positions import checked_positions

from .launches import Launch, launches
from .units import ARCHITECTURES

BATCH, HEADS, LENGTH = 4, 8, 4096  # no instruction depends on them, but whether a number is a multiple of 16 does
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # float32 is not multiplied by tensor cores
TIMES = ("uniform", "irregular")
SCORES = ("student_t", "exponential", "riccati", "dot_product")
_DYNAMICS = ("decay", "process_noise", "key_noise", "query_noise", "noise_floor", "robustness", "inverse_temperature")


class KernelCase(NamedTuple):
    """One way to call causal attention.

    Fields:
        arch: of `ARCHITECTURES`.
        dtype: of `DTYPES`.
        channels: of a head, in keys and values.
        times: of `TIMES`.
        score: of `SCORES`; "riccati" is the score of Student-t with that prior. "softmax" is plain attention.
    """

    arch: str
    dtype: str
    channels: int
    times: str
    score: str

    def __str__(self) -> str:
        return f"{self.arch}, {self.dtype}, {self.channels} channels, {self.times} times, {self.score}"

    def launches(self) -> list[tuple[str, Launch]]:
        """The kernels of a forward and a backward pass by name, then those that give the gradients of the prior too."""
        found: dict[str, tuple[str, Launch]] = {}
        for learned in (False,) if self.score == "softmax" else (False, True):
            names = Counter[str]()
            for launch in launches(partial(self._call, learned), ARCHITECTURES[self.arch].number):
                name = launch.name + (" with prior" if learned else "")
                names[name] += 1
                numbered = name if names[name] == 1 else f"{name} {names[name]}"
                found.setdefault(launch.identity, (numbered, launch))
        return list(found.values())

    def _call(self, learned: bool) -> None:
        """Estimates and gradients; of the prior too where it is `learned`."""
        dtype = DTYPES[self.dtype]
        shape = BATCH, HEADS, LENGTH, self.channels
        query, key, value = (torch.empty(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        with mock.patch.object(backends, "choose_backend", return_value="triton"):  # which there is no device for
            estimate = self._attention(query, key, value, learned)
        estimate.backward(torch.empty_like(estimate))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, learned: bool) -> Tensor:
        if self.score == "softmax":
            from .flash import flash_attention

            return flash_attention(query, key, value)
        call = self._dot_product if self.score == "dot_product" else self._filter
        return call(query, key, value, learned)

    def _filter(self, query: Tensor, key: Tensor, value: Tensor, learned: bool) -> Tensor:
        given: dict[str, Any] = {name: torch.empty(HEADS, requires_grad=learned) for name in _DYNAMICS}
        estimate = robust_filter_attention(
            query,
            key,
            value,
            **given,
            frequency=torch.empty(HEADS, self.channels // 2),
            times=self._times(),
            weight="exponential" if self.score == "exponential" else "student_t",
            prior="riccati" if self.score == "riccati" else "lyapunov",
        )
        assert isinstance(estimate, Tensor)  # no log precision was asked for
        return estimate

    def _dot_product(self, query: Tensor, key: Tensor, value: Tensor, learned: bool) -> Tensor:
        return decayed_dot_product_attention(
            query,
            key,
            value,
            positions=checked_positions(BATCH, LENGTH, LENGTH, query.device, self._times()),
            frequency=torch.empty(HEADS, self.channels // 2),
            decay=torch.empty(HEADS, requires_grad=learned),
            slopes=torch.empty(HEADS, requires_grad=learned),
            rotate_values=True,
        )

    def _times(self) -> Tensor | None:
        return torch.empty(LENGTH) if self.times == "irregular" else None


def cases(
    archs: Sequence[str],
    dtypes: Sequence[str] = (),
    channels: Sequence[int] = (),
    times: Sequence[str] = (),
    scores: Sequence[str] = (),
) -> list[KernelCase]:
    """Every combination, and plain attention beside it.

    Args:
        archs: of `ARCHITECTURES`.
        dtypes, times: all by default.
        channels: 64 and 128 by default.
        scores: Student-t by default.

    Raises:
        ValueError: for an unknown value.
    """
    known: dict[str, tuple[Sequence[Any], Iterable[Any]]] = {
        "arch": (archs, ARCHITECTURES),
        "dtype": (dtypes, DTYPES),
        "channels": (channels, TRITON_CHANNELS),
        "times": (times, TIMES),
        "score": (scores, SCORES),
    }
    for field, (given, expected) in known.items():
        for each in given:
            require(each in expected, field, each, f"one of {', '.join(map(str, expected))}")
    combinations = product(archs, dtypes or DTYPES, channels or (64, 128))
    chosen = [*product(times or TIMES, scores or SCORES[:1]), ("uniform", "softmax")]
    return list(dict.fromkeys(KernelCase(*each, *how) for each in combinations for how in chosen))
